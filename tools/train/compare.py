#!/usr/bin/env python3
"""Loss and gradient norm of runs side by side.

    tools/train/compare.py outputs_one outputs_other

Each argument is the directory of an experiment, of which the newest run counts. The first is what
the others are compared with, step by step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flagscale.errors import ConfigError, FlagscaleError
from flagscale.status import read_events

Steps = dict[int, tuple[float, float]]
"""Loss in nats and gradient norm, by step."""


def steps_of(experiment: Path) -> Steps:
    """What rank 0 of the newest run in ``experiment`` has told of its steps."""
    files = experiment.glob("logs/details/host_0_*/*/status/rank_0.jsonl")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(f"{experiment} holds no run whose rank 0 has told anything")
    events, _ = read_events(newest)
    return {
        event.get("step"): (event.get("loss"), event.get("grad_norm"))
        for event in events
        if event.event == "progress"
    }


def table(names: Sequence[str], runs: Sequence[Steps]) -> Table:
    """A row a step that all runs have."""
    made = Table("step")
    for name in names:
        made.add_column(f"{name}\nloss", justify="right")
        made.add_column("grad norm", justify="right")
    for step in common(runs):
        cells = [f"{value:.6f}" for run in runs for value in run[step]]
        made.add_row(str(step), *cells)
    return made


def common(runs: Sequence[Steps]) -> list[int]:
    return sorted(set.intersection(*(set(run) for run in runs)))


def furthest(first: Steps, other: Steps) -> tuple[float, int]:
    """The largest relative difference of a loss, and its step."""
    return max(
        (abs(other[step][0] - first[step][0]) / abs(first[step][0]), step)
        for step in common([first, other])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("experiment", nargs="+", type=Path, help="directory of an experiment")
    directories: list[Path] = parser.parse_args().experiment
    runs = [steps_of(directory) for directory in directories]
    if not common(runs):
        raise ConfigError("the runs have no step in common")
    Console().print(table([directory.name for directory in directories], runs))
    for directory, run in zip(directories[1:], runs[1:], strict=True):
        difference, step = furthest(runs[0], run)
        print(f"{directory.name}: the loss differs by {difference:.1e} at most, at step {step}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
