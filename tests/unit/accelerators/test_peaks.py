from __future__ import annotations

import pytest
import torch

from flagscale.accelerators.cuda import Cuda
from flagscale.accelerators.device import Device


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth", "eight"),
    [
        ("NVIDIA H200", 989.0, 4800.0, True),
        ("NVIDIA H100 80GB HBM3", 989.0, 3350.0, True),
        ("NVIDIA H100 PCIe", 756.0, 2000.0, True),
        ("NVIDIA H20", 148.0, 4000.0, True),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039.0, False),
        ("NVIDIA A100-SXM4-40GB", 312.0, 1555.0, False),
        ("NVIDIA L40S", 362.0, 864.0, True),
        ("NVIDIA L4", 121.0, 300.0, True),
        ("NVIDIA A10", 125.0, 600.0, False),
        ("NVIDIA GB200", 2500.0, 8000.0, True),
        ("cpu", None, None, None),
        ("Frobnicator 9000", None, None, None),
    ],
)
def test_product_data(
    name: str, peak: float | None, bandwidth: float | None, eight: bool | None
) -> None:
    cuda = Cuda()
    assert cuda.peak_tflops(name) == peak
    assert cuda.memory_gb_per_second(name) == bandwidth
    assert cuda.product_supports_fp8(name) is eight


def test_no_peak_in_fp32() -> None:
    assert Device(Cuda(), torch.device("cuda", 0)).peak_tflops(sixteen_bit=False) is None
