"""What is said of curves of several seeds: tools/bench/precision.py."""

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
    # 1, 2 and 3 percent more than bf16 of the same seed, though seeds differ by far more.
    *(curve("fp8", seed, loss) for seed, loss in ((3, 4.12), (1, 2.02), (2, 3.06))),
    curve("e4m3", 1, 1.98),
    curve("rowwise", 9, 2.0),
]


def test_a_precision_is_compared_with_the_first_of_its_own_seed(precision: Any) -> None:
    fp8, e4m3 = precision.compared(PAIRED)  # of the seed of rowwise there is nothing to compare
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
    ("count", "told"),
    [
        (1, []),
        (6, ["    +2.00 % from bf16 (-0.46 to +4.51, 3 seeds)"]),
        (7, ["    -1.00 % from bf16 (one seed)"]),
        (8, []),
    ],
    ids=["of-itself", "three-seeds", "one-seed", "no-reference"],
)
def test_a_run_is_told_with_what_is_known_by_then(
    precision: Any, count: int, told: list[str]
) -> None:
    first, *rest = precision.lines(PAIRED[:count])
    last = PAIRED[count - 1]
    assert first.startswith(f"{last['precision']}, seed {last['seed']}: validation loss ")
    assert rest == told


def test_a_file_is_gone_on_with(precision: Any, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    options = argparse.Namespace(append=True, output=path)
    assert precision.kept(options, SETTING) == []
    precision.write(path, SETTING, PAIRED)
    assert path.with_suffix(".svg").read_text().count("<svg") == 1
    assert json.loads(path.read_text())["compared"] == precision.compared(PAIRED)
    assert precision.kept(options, SETTING) == PAIRED
    assert precision.kept(argparse.Namespace(append=False, output=path), SETTING) == []
    with pytest.raises(ConfigError, match=r"curves.json is of steps 20, not 30"):
        precision.kept(options, {**SETTING, "steps": 30})


@pytest.mark.parametrize(
    ("seeds", "names", "message"),
    [
        ("1,x", "bf16", "--seeds: expected numbers such as 1,2,3, found '1,x'"),
        ("", "bf16", "--seeds: expected numbers"),
        ("1", "bf16;fp9", "--precisions: there is no 'fp9'"),
    ],
)
def test_what_cannot_be_run(precision: Any, seeds: str, names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        precision.wanted(argparse.Namespace(seeds=seeds, precisions=names))


def test_each_seed_is_taken_in_all_precisions(precision: Any) -> None:
    options = argparse.Namespace(seeds="3,1", precisions="bf16;fp8 rowwise")
    assert precision.wanted(options) == [
        (3, "bf16"), (3, "fp8 rowwise"), (1, "bf16"), (1, "fp8 rowwise")
    ]  # fmt: skip
