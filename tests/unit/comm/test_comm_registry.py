"""Tests of the built-in backends: names, devices and operations."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from flagscale.comm import registry
from flagscale.comm.base import TRAINING_OPERATIONS
from flagscale.comm.registry import Gloo
from flagscale.errors import ConfigError


def test_auto_is_listed_first() -> None:
    assert registry.list_backend_names()[:3] == ("auto", "nccl", "gloo")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", "gloo"),
        ("auto", "cuda", "nccl"),
        ("gloo", "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
    ],
)
def test_torch_backend(name: str, device: registry.DeviceType, expected: str) -> None:
    assert registry.get_backend(name).torch_backend(device) == expected


@pytest.mark.parametrize("name", registry.list_backend_names())
def test_every_backend_describes_itself(name: str) -> None:
    backend = registry.get_backend(name)
    assert backend.name == name
    assert backend.summary
    assert backend.devices


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncll", "did you mean 'nccl'?"),
        ("glo", "did you mean 'gloo'?"),
        ("infiniband", "known: auto, nccl, gloo"),
        ("", "known: auto, nccl, gloo"),
    ],
)
def test_unknown_name_suggests_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.get_backend(name)
    assert expected in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.torch
def test_auto_on_a_cpu_is_gloo() -> None:
    assert registry.get_usable_backend("auto", "cpu").name == "gloo"


@pytest.mark.torch
def test_nccl_without_a_gpu_is_rejected() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError) as error:
        registry.get_usable_backend("nccl", "cpu")
    assert "no CUDA device is visible" in str(error.value)
    assert "auto, gloo" in str(error.value)


class _GlooOnGpu(Gloo):
    """Gloo as on a machine with a GPU."""

    def explain_unavailable(self, device: registry.DeviceType) -> str | None:
        return None


@pytest.mark.torch
def test_unsupported_operations_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILTIN, "gloo", _GlooOnGpu())
    assert registry.get_usable_backend("gloo", "cuda", ["all_reduce"]).name == "gloo"
    assert registry.get_usable_backend("gloo", "cpu", TRAINING_OPERATIONS).name == "gloo"
    with pytest.raises(ConfigError, match="it cannot do sendrecv on GPU memory"):
        registry.get_usable_backend("gloo", "cuda", TRAINING_OPERATIONS)
    # TRAINING_OPERATIONS contain sendrecv. Gloo's other operation between two ranks, permute (every
    # rank sends to one rank and receives from another), is not supported on GPU memory either.
    assert "permute" not in registry.get_backend("cpu:gloo,cuda:gloo").operations_for("cuda")
    assert "permute" in registry.get_backend("cpu:gloo,cuda:gloo").operations_for("cpu")


def test_listing_backends_imports_no_torch() -> None:
    code = """
        import sys
        from flagscale.comm import registry
        [registry.get_backend(n).torch_backend("cpu") for n in registry.list_backend_names()]
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
