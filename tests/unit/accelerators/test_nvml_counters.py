"""Tests of the counters of GPUs, with a library in place of NVML, which needs a driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.accelerators.registry import get_accelerator

PROGRAM = """
import dataclasses, json
from flagscale.accelerators.registry import get_accelerator
print(json.dumps([dataclasses.asdict(c) for c in get_accelerator("cuda").read_counters()]))
"""


@pytest.mark.compiler
def test_counters_that_a_gpu_reports(tmp_path: Path) -> None:
    source = Path(__file__).parent / "nvml_counters.c"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
    ).stdout
    full, partial = json.loads(output)
    assert full == {
        "index": 0,
        "uuid": "GPU-8a",
        "product": "NVIDIA H100",
        "utilization": 0.55,
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 80 << 30,
        "power_watts": 700.5,
        "temperature_celsius": 61.0,
    }
    known = {name: value for name, value in partial.items() if value}
    assert known == {"index": 2, "product": "NVIDIA H100"}


def test_other_devices_report_no_counters() -> None:
    assert get_accelerator("cpu").read_counters() == ()
