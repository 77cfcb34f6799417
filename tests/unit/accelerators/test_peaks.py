from __future__ import annotations

import pytest
import torch

from flagscale.accelerators.cuda import Cuda
from flagscale.accelerators.device import Device


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GB200", 2500.0),
        ("cpu", None),
        ("Frobnicator 9000", None),
    ],
)
def test_peaks(name: str, expected: float | None) -> None:
    assert Cuda().peak_tflops(name) == expected


def test_no_peak_in_fp32() -> None:
    assert Device(Cuda(), torch.device("cuda", 0)).peak_tflops(sixteen_bit=False) is None
