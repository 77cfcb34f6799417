#!/usr/bin/env python3
"""Compare loss and gradient norm of several runs.

    tools/train/compare.py REFERENCE_EXPERIMENT EXPERIMENT...

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

MetricsByStep = dict[int, tuple[float | None, float | None]]
"""Loss in nats and gradient norm, by step; None if the program has not reported it."""


def read_steps(experiment: Path) -> MetricsByStep:
    """Return the metrics of all steps that rank 0 of the newest run in ``experiment`` has logged.

    Raises:
        ConfigError: there is no run with status events of rank 0.
    """
    files = experiment.glob("logs/details/host_0_*/*/status/rank_0.jsonl")
    newest_file = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest_file is None:
        raise ConfigError(f"{experiment} has no run with status events of rank 0")
    events, _ = read_events(newest_file)
    return {
        event.get("step"): (event.get("loss"), event.get("grad_norm"))
        for event in events
        if event.event == "progress"
    }


def build_table(names: Sequence[str], runs: Sequence[MetricsByStep]) -> Table:
    """Return a table with one row per step that all runs have."""
    table = Table("step")
    for name in names:
        table.add_column(f"{name}\nloss", justify="right")
        table.add_column("grad norm", justify="right")
    for step in find_common_steps(runs):
        cells = ["-" if x is None else f"{x:.6f}" for run in runs for x in run[step]]
        table.add_row(str(step), *cells)
    return table


def find_common_steps(runs: Sequence[MetricsByStep]) -> list[int]:
    """Return the steps that all runs have logged, in order."""
    return sorted(set.intersection(*(set(run) for run in runs)))


def find_largest_loss_difference(
    reference: MetricsByStep, compared: MetricsByStep
) -> tuple[float, int]:
    """Return the largest relative difference between the losses of a step, and that step.

    Raises:
        ConfigError: no step has a loss in both runs.
    """
    losses = {
        step: (reference[step][0], compared[step][0])
        for step in find_common_steps([reference, compared])
    }
    differences = [
        (abs(loss - reference_loss) / abs(reference_loss), step)
        for step, (reference_loss, loss) in losses.items()
        if reference_loss and loss is not None
    ]
    if not differences:
        raise ConfigError("the runs have no step with a loss in common")
    return max(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("experiment", nargs="+", type=Path, help="directory of an experiment")
    directories: list[Path] = parser.parse_args().experiment
    runs = [read_steps(directory) for directory in directories]
    if not find_common_steps(runs):
        raise ConfigError("the runs have no step in common")
    Console().print(build_table([directory.name for directory in directories], runs))
    for directory, run in zip(directories[1:], runs[1:], strict=True):
        difference, step = find_largest_loss_difference(runs[0], run)
        print(
            f"{directory.name}: largest relative loss difference {difference:.1e}, at step {step}"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
