"""The NVLink engine on real GPUs: the checks of ``nvlink_check``, as tests.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu/test_nvlink_engine.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flagscale.comm.fsccl import nvlink_check

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


def run_nvlink_check(path: Path, *words: str) -> dict[str, object]:
    code = nvlink_check.main([*words, "--json", str(path)])
    report: dict[str, object] = json.loads(path.read_text())
    assert code == 0, report
    return report


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_ranks_on_one_gpu(tmp_path: Path, ranks: int) -> None:
    report = run_nvlink_check(tmp_path / "report.json", "--one-gpu", str(ranks))
    assert report["checks"]["right"]  # type: ignore[index]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_rank_per_gpu(tmp_path: Path, ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    report = run_nvlink_check(tmp_path / "report.json", "--ranks", str(ranks), "--no-measure")
    assert report["checks"]["right"]  # type: ignore[index]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_measurement_yields_table_and_small_groups(tmp_path: Path) -> None:
    report = run_nvlink_check(
        tmp_path / "report.json", "--ranks", "2", "--no-check", "--largest", "1"
    )
    assert "all_reduce ordinary" in str(report["table"])
    groups = report["groups"]
    assert isinstance(groups, dict)
    assert groups["MiB a GPU"] <= 512
