"""Tests of native.py: detection of a rank's native library from the environment and the GPU."""

from __future__ import annotations

import os

import pytest
import torch

from flagscale.comm import registry
from flagscale.comm.fsccl import native, nvlink
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch
NATIVE_VARIABLES = ("FSCCL_CUDA", "FSCCL_DEVICE", "FSCCL_NATIVE", "FSCCL_REACH")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NATIVE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("variables", "strings"),
    [
        pytest.param({}, ["cpu", "cpu", "own", ""], id="nothing"),
        pytest.param({"FSCCL_NATIVE": "gloo"}, ["cpu", "cpu", "gloo", ""], id="gloo"),
        pytest.param({"FSCCL_NATIVE": "own"}, ["cpu", "cpu", "own", ""], id="own"),
        pytest.param({"FSCCL_REACH": "rack 7"}, ["cpu", "cpu", "own", "rack 7"], id="reach"),
        pytest.param({"FSCCL_DEVICE": "cpu"}, ["cpu", "cpu", "own", ""], id="by-hand"),
    ],
)
def test_library_of_a_cpu_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], strings: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert native.detect_native_library().as_strings() == strings


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param(
            {"FSCCL_NATIVE": "goo"}, "FSCCL_NATIVE=goo: expected one of own, gloo, fsccl", id="name"
        ),
        pytest.param({"FSCCL_CUDA": "yes"}, "FSCCL_CUDA=yes: expected one of 0, 1", id="switch"),
        pytest.param({"FSCCL_DEVICE": "xpu"}, "FSCCL_DEVICE=xpu: expected one of", id="device"),
        pytest.param(
            {"FSCCL_DEVICE": "cuda", "FSCCL_CUDA": "0"},
            "FSCCL_DEVICE=cuda: FSCCL_CUDA=0 leaves CUDA tensors alone",
            id="contradiction",
        ),
        pytest.param({"FSCCL_REACH": "a\nb"}, "printable characters", id="line-break"),
    ],
)
def test_invalid_values_are_rejected(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        native.detect_native_library()


def test_forced_cuda_without_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.detect_native_library().device == "cpu"
    monkeypatch.setenv("FSCCL_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="no CUDA device"):
        native.detect_native_library()


@pytest.mark.parametrize(
    ("value", "message"),
    [("0", "FSCCL_CUDA=0 leaves CUDA tensors alone"), ("x", "FSCCL_CUDA=x: expected one of 0, 1")],
)
def test_list_of_backends_explains_why_cuda_is_off(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    fsccl = registry.get_backend("fsccl")
    assert fsccl.devices == ("cpu", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("FSCCL_CUDA", value)
    assert message in str(fsccl.explain_unavailable("cuda"))


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.delenv("FSCCL_NVLINK", raising=False)


@pytest.mark.parametrize(
    ("capability", "switch", "library"),
    [
        ((9, 0), "", "nccl 2.28.9+nvlink"),
        ((8, 0), "1", "nccl 2.28.9+nvlink"),
        ((9, 0), "0", "nccl 2.28.9"),
        ((7, 5), "", "nccl 2.28.9"),
    ],
)
def test_nvlink_engine_needs_a_supported_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], switch: str, library: str
) -> None:
    pretend_gpu(monkeypatch, capability)
    monkeypatch.setenv("FSCCL_NVLINK", switch)
    assert native.detect_native_library().library == library


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("FSCCL_NVLINK_BLOCKS", None, 0),
        ("FSCCL_NVLINK_BLOCKS", "32", 32),
        ("FSCCL_NVLINK_BLOCKS", "0", "from 1 to 64"),
        ("FSCCL_NVLINK_BLOCKS", "65", "from 1 to 64"),
        ("FSCCL_NVLINK_BLOCKS", "many", "FSCCL_NVLINK_BLOCKS=many"),
        ("FSCCL_NVLINK_SLOT_BYTES", None, 0),
        ("FSCCL_NVLINK_SLOT_BYTES", "66560", 66560),
        ("FSCCL_NVLINK_SLOT_BYTES", "66000", "multiple of 512"),
        ("FSCCL_NVLINK_SLOT_BYTES", "512", "at least 2048"),
    ],
)
def test_nvlink_engine_variables_are_validated(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, expected: int | str
) -> None:
    read_setting = nvlink.read_max_blocks if variable.endswith("BLOCKS") else nvlink.read_slot_bytes
    if value is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, value)
    if isinstance(expected, int):
        assert read_setting() == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            read_setting()


def test_forced_engine_explains_why_it_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (7, 5))
    monkeypatch.setenv("FSCCL_NVLINK", "1")
    with pytest.raises(ConfigError, match=r"FSCCL_NVLINK=1: .* 8\.0, this one has 7\.5"):
        native.detect_native_library()


def test_rank_with_a_gpu_uses_nccl_and_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    assert native.detect_native_library().as_strings() == [
        "cuda",
        "nvidia",
        "nccl 2.28.9+nvlink",
        "",
    ]
    monkeypatch.setenv("FSCCL_NATIVE", "gloo")
    with pytest.raises(ConfigError, match="FSCCL_NATIVE=gloo is for ranks on CPUs"):
        native.detect_native_library()
    monkeypatch.setenv("FSCCL_DEVICE", "cpu")
    assert native.detect_native_library().library == "gloo"


@pytest.mark.parametrize(
    ("name", "device", "strings"),
    [
        ("fsccl", "cpu", "cpu"),
        ("fsccl", "cuda", None),
        ("cpu:fsccl,cuda:nccl", "cuda", "cpu"),
        ("cpu:fsccl,cuda:fsccl", "cuda", None),
        ("cpu:fsccl,cuda:fsccl", "cpu", "cpu"),
    ],
)
def test_init_options_set_the_device_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, strings: str | None
) -> None:
    monkeypatch.setenv("FSCCL_DEVICE", "")  # restored at the end
    monkeypatch.delenv("FSCCL_DEVICE")
    registry.get_backend(name).init_options(torch.device(device))
    assert os.environ.get("FSCCL_DEVICE") == strings
    monkeypatch.setenv("FSCCL_DEVICE", "cuda")
    registry.get_backend("fsccl").init_options(torch.device("cpu"))
    assert os.environ["FSCCL_DEVICE"] == "cuda"
