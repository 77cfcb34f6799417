"""What tools/bench/gpu.py writes of the GPUs that it ran on."""

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
    ids=["alike", "unlike", "lost", "no-driver"],
)  # fmt: skip
def test_what_the_driver_tells(lines: str, expected: dict[str, str]) -> None:
    assert gpu.told_by_driver(lines) == expected
