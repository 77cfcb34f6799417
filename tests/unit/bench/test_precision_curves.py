"""Tests of tools/bench/precision.py, which compares loss curves of several seeds."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flagscale.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SETTING = {"text": "t", "vocabulary": 9, "steps": 20}


@pytest.fixture(scope="module")
def precision() -> Any:
    tools = str(ROOT / "tools" / "bench")
    sys.path.insert(0, tools)
    try:
        return importlib.import_module("precision")
    finally:
        sys.path.remove(tools)


def curve(name: str, seed: int, loss: float) -> dict[str, Any]:
    return {
        "precision": name,
        "seed": seed,
        "steps": [10, 20],
        "loss": [2 * loss, loss],
        "validation_loss": loss,
        "step_seconds": 0.1,
        "last_100_steps": loss,
    }


PAIRED = [
    *(curve("bf16", seed, loss) for seed, loss in ((1, 2.0), (2, 3.0), (3, 4.0))),
    # 1, 2 and 3 percent above bf16 of the same seed; the seeds differ by far more.
    *(curve("fp8", seed, loss) for seed, loss in ((3, 4.12), (1, 2.02), (2, 3.06))),
    curve("e4m3", 1, 1.98),
    curve("rowwise", 9, 2.0),
]


def test_precision_is_compared_with_the_first_one_per_seed(precision: Any) -> None:
    # rowwise has no run of bf16 with its seed.
    fp8, e4m3 = precision.compare_precisions(PAIRED)
    assert (fp8["precision"], fp8["seeds"]) == ("fp8", [3, 1, 2])
    assert fp8["percent"] == pytest.approx(2.0, abs=0.01)
    # Student's quantile of two degrees of freedom, 4.303, times 1 % / sqrt(3).
    assert (fp8["low"], fp8["high"]) == (
        pytest.approx(-0.45, abs=0.05),
        pytest.approx(4.5, abs=0.05),
    )
    assert e4m3 == {
        "precision": "e4m3", "seeds": [1], "percent": -1.0, "low": None, "high": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "comparison"),
    [
        (1, []),
        (6, ["    +2.00 % from bf16 (-0.46 to +4.51, 3 seeds)"]),
        (7, ["    -1.00 % from bf16 (one seed)"]),
        (8, []),
    ],
    ids=["of-itself", "three-seeds", "one-seed", "no-reference"],
)
def test_run_description_compares_with_earlier_runs(
    precision: Any, count: int, comparison: list[str]
) -> None:
    first_line, *comparison_lines = precision.describe_last_run(PAIRED[:count])
    last = PAIRED[count - 1]
    assert first_line.startswith(f"{last['precision']}, seed {last['seed']}: validation loss ")
    assert comparison_lines == comparison


def test_append_continues_an_earlier_file(precision: Any, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    options = argparse.Namespace(append=True, output=path)
    assert precision.read_earlier_curves(options, SETTING) == []
    precision.write_results(path, SETTING, PAIRED)
    assert path.with_suffix(".svg").read_text().count("<svg") == 1
    assert json.loads(path.read_text())["compared"] == precision.compare_precisions(PAIRED)
    assert precision.read_earlier_curves(options, SETTING) == PAIRED
    assert (
        precision.read_earlier_curves(argparse.Namespace(append=False, output=path), SETTING) == []
    )
    with pytest.raises(ConfigError, match=r"curves.json is of steps 20, not 30"):
        precision.read_earlier_curves(options, {**SETTING, "steps": 30})


@pytest.mark.parametrize(
    ("seeds", "names", "message"),
    [
        ("1,x", "bf16", "--seeds: expected numbers such as 1,2,3, found '1,x'"),
        ("", "bf16", "--seeds: expected numbers"),
        ("1", "bf16;fp9", "--precisions: there is no 'fp9'"),
    ],
)
def test_invalid_runs_are_rejected(precision: Any, seeds: str, names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        precision.parse_runs(argparse.Namespace(seeds=seeds, precisions=names))


def test_every_seed_runs_in_all_precisions(precision: Any) -> None:
    options = argparse.Namespace(seeds="3,1", precisions="bf16;fp8 rowwise")
    assert precision.parse_runs(options) == [
        (3, "bf16"), (3, "fp8 rowwise"), (1, "bf16"), (1, "fp8 rowwise")
    ]  # fmt: skip
