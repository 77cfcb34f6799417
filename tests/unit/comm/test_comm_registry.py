from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from flagscale.comm import registry
from flagscale.comm.base import TRAINING
from flagscale.comm.registry import Gloo
from flagscale.errors import ConfigError


def test_names_lists_auto_first() -> None:
    assert registry.names()[:3] == ("auto", "nccl", "gloo")


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
    assert registry.backend(name).torch_backend(device) == expected


@pytest.mark.parametrize("name", registry.names())
def test_every_backend_describes_itself(name: str) -> None:
    found = registry.backend(name)
    assert found.name == name
    assert found.summary
    assert found.devices


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncll", "did you mean 'nccl'?"),
        ("glo", "did you mean 'gloo'?"),
        ("infiniband", "known: auto, nccl, gloo"),
        ("", "known: auto, nccl, gloo"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.backend(name)
    assert expected in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.torch
def test_auto_on_a_cpu_is_gloo() -> None:
    assert registry.usable("auto", "cpu").name == "gloo"


@pytest.mark.torch
def test_nccl_without_a_gpu_says_why_and_what_works() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError) as error:
        registry.usable("nccl", "cpu")
    assert "no CUDA device is visible" in str(error.value)
    assert "auto, gloo" in str(error.value)


class _WithGpu(Gloo):
    """gloo where there is a GPU."""

    def unavailable(self, device: registry.DeviceType) -> str | None:
        return None


@pytest.mark.torch
def test_what_a_backend_cannot_do_on_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWN, "gloo", _WithGpu())
    assert registry.usable("gloo", "cuda", ["all_reduce"]).name == "gloo"
    assert registry.usable("gloo", "cpu", TRAINING).name == "gloo"
    with pytest.raises(ConfigError, match="it cannot do sendrecv on GPU memory"):
        registry.usable("gloo", "cuda", TRAINING)
    assert "permute" not in registry.backend("cpu:gloo,cuda:gloo").operations_on("cuda")
    assert "permute" in registry.backend("cpu:gloo,cuda:gloo").operations_on("cpu")


def test_listing_backends_imports_no_torch() -> None:
    code = """
        import sys
        from flagscale.comm import registry
        [registry.backend(name).torch_backend("cpu") for name in registry.names()]
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
