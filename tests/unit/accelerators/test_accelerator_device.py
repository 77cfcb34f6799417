"""Tests of adapters as used by ranks, without any accelerator."""

from __future__ import annotations

import pytest
import torch

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.device import Device, current_device, select_device
from flagscale.accelerators.registry import get_accelerator
from flagscale.comm import registry
from flagscale.comm.plugins import DeviceMap
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch


class Npu(Accelerator):
    name = "npu"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    plugin = "torch_npu"
    default_backend = "cpu:gloo,npu:hccl"


class Musa(Accelerator):
    name = "musa"
    visible_variable = "MUSA_VISIBLE_DEVICES"
    plugin = "torch_musa"
    default_backend = "cpu:gloo,musa:mccl"


class Xpu(Accelerator):
    name = "xpu"
    title = "XPU"
    visible_variable = "ZE_AFFINITY_MASK"
    default_backend = "cpu:gloo,xpu:xccl"
    dispatch_key = "XPU"


class PrivateUse(Accelerator):
    """A kind whose torch device type has another name."""

    name = "chip"
    default_backend = "cpu:gloo,privateuseone:own"
    torch_type = "privateuseone"


@pytest.mark.parametrize(
    ("kind", "error_text"),
    [
        pytest.param(Npu(), "torch cannot use npu here: No module named 'torch_npu'", id="npu"),
        pytest.param(Musa(), "torch cannot use musa here: No module named", id="musa"),
        pytest.param(
            Xpu(), "no XPU device is visible (check ZE_AFFINITY_MASK and the driver)", id="xpu"
        ),
        pytest.param(PrivateUse(), "torch cannot use chip here: ", id="privateuseone"),
    ],
)
def test_adapter_attributes_suffice(kind: Accelerator, error_text: str) -> None:
    torch_type = kind.default_backend.rpartition(",")[2].partition(":")[0]
    assert (kind.torch_type, kind.is_host) == (torch_type, False)
    assert torch.device(kind.torch_type, 1).type == torch_type if kind.plugin is None else True
    assert (kind.explain_unavailable() or "").startswith(error_text)
    with pytest.raises(ConfigError, match=f"device: {kind.name} is asked for, but "):
        kind.select(0)
    backend = registry.get_backend(kind.default_backend)
    assert isinstance(backend, DeviceMap)
    assert backend.devices == ("cpu", torch_type)


def test_cpu_device_properties() -> None:
    device = select_device("cpu", 7)
    assert current_device() == device == Device.from_torch(torch.device("cpu"))
    assert (device.kind, device.name, device.torch_device.type) == ("cpu", "cpu", "cpu")
    assert (device.is_host, device.compiles) == (True, False)
    assert (device.supports_fp8, device.supports_block_scaled_fp8) == (True, True)
    assert device.product not in ("", "cpu")
    assert (device.peak_memory_gib(), device.peak_tflops(sixteen_bit=True)) == (None, None)
    assert device.nominal_bus_gb_per_second is None
    device.synchronize()


@pytest.mark.parametrize("kind", ["tpu", "CPU"])
def test_an_unknown_kind(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"known: auto, cpu, cuda"):
        select_device(kind, 0)


def test_unsupported_torch_device_type() -> None:
    with pytest.raises(ConfigError, match="no kind of device is called 'meta'"):
        Device.from_torch(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_kind_without_devices() -> None:
    with pytest.raises(ConfigError) as error:
        select_device("cuda", 0)
    assert str(error.value) == (
        "device: cuda is asked for, but no CUDA device is visible (check CUDA_VISIBLE_DEVICES and "
        "the driver)\n  hint: or set device: cpu"
    )
    assert select_device("auto", 0).kind == "cpu"


@pytest.mark.parametrize(
    ("product", "nominal"),
    [
        ("NVIDIA H200", 450.0),
        ("NVIDIA GB200", 900.0),
        ("NVIDIA H100 80GB HBM3", 450.0),
        ("x", None),
    ],
)
def test_bus_bandwidth(product: str, nominal: float | None) -> None:
    assert get_accelerator("cuda").bus_gb_per_second(product) == nominal
