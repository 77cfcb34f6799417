"""Tests of tools/train/compare.py: the table of several runs, and the largest loss difference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flagscale.errors import ConfigError

TOOL = Path(__file__).resolve().parents[3] / "tools" / "train" / "compare.py"


@pytest.fixture(scope="module")
def compare() -> Any:
    spec = importlib.util.spec_from_file_location("compare_runs", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_events(experiment: Path, *events: str) -> Path:
    file = experiment / "logs" / "details" / "host_0_h0" / "run" / "status" / "rank_0.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{event}\n" for event in events))
    return experiment


def test_progress_without_gradient_norm_is_compared(compare: Any, tmp_path: Path) -> None:
    first = write_events(
        tmp_path / "a",
        '{"event": "progress", "time": 1.0, "step": 1, "loss": 2.0, "grad_norm": 1.5}',
        '{"event": "progress", "time": 2.0, "step": 2, "loss": 1.0}',
    )
    second = write_events(
        tmp_path / "b",
        '{"event": "progress", "time": 1.0, "step": 1, "loss": 2.2}',
        '{"event": "progress", "time": 2.0, "step": 2}',
    )
    runs = [compare.read_steps(first), compare.read_steps(second)]
    console = Console(record=True, width=100)
    console.print(compare.build_table(["a", "b"], runs))
    cells = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["1", "2.000000", "1.500000", "2.200000", "-"] in cells
    assert ["2", "1.000000", "-", "-", "-"] in cells
    assert compare.find_largest_loss_difference(*runs) == (pytest.approx(0.1), 1)


def test_runs_without_a_loss_in_common_are_rejected(compare: Any) -> None:
    with pytest.raises(ConfigError, match="no step with a loss in common"):
        compare.find_largest_loss_difference({1: (2.0, 1.0)}, {1: (None, 1.0)})
