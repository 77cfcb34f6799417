"""Tests that a dry run rejects features which a device type does not support, with their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.load import load
from flagscale.errors import ConfigError
from flagscale.launcher.runners.base import runner_for_experiment

REPOSITORY = Path(__file__).resolve().parents[4]


def _plan(tmp_path: Path, kinds: list[str], *overrides: str) -> None:
    hostfile = tmp_path / "hosts"
    lines = (f"n{index} slots=1 {kind}\n" for index, kind in enumerate(kinds))
    hostfile.write_text("".join(lines))
    nodes = f"experiment.runner.nnodes={len(kinds)}"
    arguments = ["action=dryrun", f"experiment.runner.hostfile={hostfile}", nodes]
    arguments += ["train.system.precision.bf16=true", *overrides]
    experiment = load(REPOSITORY / "examples" / "llama3" / "conf", "train", arguments).experiment
    runner_for_experiment(experiment).plan(experiment)


@pytest.mark.parametrize("kind", ["A100", "V100", "A100-SXM4-40GB"])
def test_no_eight_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    kinds = ["type=H100", f"type={kind}"]
    with pytest.raises(ConfigError) as failed:
        _plan(tmp_path, kinds, "+train.system.precision.fp8=hybrid")
    (problem,) = failed.value.problems
    assert problem.key == "train.system.precision.fp8"
    assert f"hybrid, but n1 has type={kind}, which has no FP8 matrix" in problem.message


@pytest.mark.parametrize(
    ("kinds", "overrides"),
    [
        (["type=H100"], ["+train.system.precision.fp8=hybrid"]),
        (["type=Frobnicator", "type=H100"], ["+train.system.precision.fp8=hybrid"]),
        (["type=A100"], []),
        (["type=A100"], ["+train.system.precision.fp8=hybrid", "train.system.device=cpu"]),
    ],
    ids=["has-them", "not-known", "not-asked-for", "not-used"],
)
def test_unrecognized_types_are_left_to_the_ranks(
    kinds: list[str], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    _plan(tmp_path, kinds, *overrides)
