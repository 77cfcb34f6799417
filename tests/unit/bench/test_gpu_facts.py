"""Tests of the GPU facts that tools/bench/gpu.py records with its results."""

from __future__ import annotations

import gpu
import pytest


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "580.159.04, 700.00 W, 1980 MHz, 3201 MHz\n" * 2,
            {"driver": "580.159.04", "power_limit": "700.00 W", "sm_clock_at_most": "1980 MHz",
             "memory_clock_at_most": "3201 MHz"},
        ),
        (
            "535.1, 700.00 W, 1980 MHz, [N/A]\n535.1, 500.00 W, 1980 MHz, [N/A]\n",
            {"driver": "535.1", "power_limit": "700.00 W, 500.00 W",
             "sm_clock_at_most": "1980 MHz"},
        ),
        ("Unable to determine the device handle for GPU0: Unknown Error\n", {}),
        ("", {}),
    ],
    ids=["identical", "different", "lost", "no-driver"],
)  # fmt: skip
def test_output_of_nvidia_smi_is_parsed(lines: str, expected: dict[str, str]) -> None:
    assert gpu.parse_nvidia_smi(lines) == expected
