#!/usr/bin/env python3
"""Compare loss and gradient norm of several runs.

    tools/train/compare.py outputs_one outputs_other

Each argument is the directory of an experiment, whose newest run is used. The other runs are
compared with the first one, step by step.
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


def read_steps(experiment: Path) -> Steps:
    """Return the steps that rank 0 of the newest run in ``experiment`` has reported.

    Raises:
        ConfigError: there is no run with status events of rank 0.
    """
    files = experiment.glob("logs/details/host_0_*/*/status/rank_0.jsonl")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(f"{experiment} has no run with status events of rank 0")
    events, _ = read_events(newest)
    return {
        event.get("step"): (event.get("loss"), event.get("grad_norm"))
        for event in events
        if event.event == "progress"
    }


def build_table(names: Sequence[str], runs: Sequence[Steps]) -> Table:
    """Return a table with one row per step that all runs have."""
    table = Table("step")
    for name in names:
        table.add_column(f"{name}\nloss", justify="right")
        table.add_column("grad norm", justify="right")
    for step in common_steps(runs):
        cells = [f"{value:.6f}" for run in runs for value in run[step]]
        table.add_row(str(step), *cells)
    return table


def common_steps(runs: Sequence[Steps]) -> list[int]:
    return sorted(set.intersection(*(set(run) for run in runs)))


def largest_loss_difference(first: Steps, compared: Steps) -> tuple[float, int]:
    """Return the largest relative difference of a loss, and its step."""
    return max(
        (abs(compared[step][0] - first[step][0]) / abs(first[step][0]), step)
        for step in common_steps([first, compared])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("experiment", nargs="+", type=Path, help="directory of an experiment")
    directories: list[Path] = parser.parse_args().experiment
    runs = [read_steps(directory) for directory in directories]
    if not common_steps(runs):
        raise ConfigError("the runs have no step in common")
    Console().print(build_table([directory.name for directory in directories], runs))
    for directory, run in zip(directories[1:], runs[1:], strict=True):
        difference, step = largest_loss_difference(runs[0], run)
        print(f"{directory.name}: the loss differs by {difference:.1e} at most, at step {step}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
