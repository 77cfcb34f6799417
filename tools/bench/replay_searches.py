#!/usr/bin/env python3
"""Replay the search of ``auto_tune`` on grids whose times are known, without any run.

A replay decides as ``auto_tune`` does; only the measurement of a trial is drawn at random: the time
of its layout, an error that the whole trial has, and an error of each step. Two kinds of grids:

- recorded: the layouts of ``docs/results/auto-tune-cpu.json`` that were measured. The time of a
  layout is the mean of its trials. The errors of trials are drawn from those of the record.
- generated: layouts of several models and machines. Each cause of the predicted time is wrong by a
  random factor, and so is each cause for each value of a size, and each layout.

Every trial counts: whole ones, those that end early, and repeats. A replay reaches the target if
its winner takes at most 3 % more than the fastest layout of the grid. The winner after trials for a
quarter of the layouts is judged alike.

    python tools/bench/replay_searches.py --seeds 50
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from auto_tune import BUDGET, CASES, CONFIG, Case  # noqa: E402

from flagscale.bench import machine  # noqa: E402
from flagscale.cli_errors import run_command  # noqa: E402
from flagscale.config.arguments.layout_choices import (  # noqa: E402
    ARGUMENTS_OF_GROUPS,
    CHOSEN_ARGUMENTS,
)
from flagscale.config.load import load  # noqa: E402
from flagscale.config.tuner_schema import Tuner, TunerAlgorithm  # noqa: E402
from flagscale.estimate.plan import get_device_spec  # noqa: E402
from flagscale.files import read_json, write_atomic  # noqa: E402
from flagscale.tune.machine import Machine, make_gpu_machine  # noqa: E402
from flagscale.tune.problem import make_problem  # noqa: E402
from flagscale.tune.records import CUT_SHORT, MEASURED, Trial, time_steps  # noqa: E402
from flagscale.tune.search import Search  # noqa: E402
from flagscale.tune.space import Layout, SearchProblem, Space, enumerate_space  # noqa: E402

_RECORD = PROJECT / "docs/results/auto-tune-cpu.json"
_STEPS = 8
"""Counted steps of a trial."""
_LEAST_STEPS = 3
_OUTLIERS = 0.02
"""Part of the steps that take half as long again, as if another program had run."""
_MOST_TRIALS = 200
_REACHED = 0.03

TrialError = Callable[[random.Random], float]
"""Draw of the logarithm of a trial's error."""


@dataclass(frozen=True)
class Grid:
    """Layouts whose times are known, by key."""

    name: str
    problem: SearchProblem
    layouts: Sequence[Layout]
    seconds: Mapping[str, float]
    trial_error: TrialError
    step_error: float = 0.04


class Replay(NamedTuple):
    """Result of a replay: its trials, and those of them that are repeats.

    ``loss`` is the time that the winner takes longer than the fastest layout, as a fraction, and
    ``early_loss`` that of the winner after trials for a quarter of the layouts.
    """

    layouts: int
    trials: int
    repeats: int
    loss: float
    early_loss: float


def replay_search(grid: Grid, tuner: Tuner, seed: int) -> Replay:
    """Search a grid until the search ends."""
    generator = random.Random(seed)
    space = Space(tuple(grid.layouts), (), len(grid.layouts), 0)
    trials: list[Trial] = []
    repeats = 0
    early_loss = None
    while True:
        search = Search(grid.problem, space, tuner, trials)
        if len(trials) == int(BUDGET * len(grid.layouts)):
            early_loss = _find_loss(grid, search)
        last = trials[-1].setting if trials else None
        decision = search.decide(0.0, partial(_share_groups, last))
        if decision.layout is None or len(trials) == _MOST_TRIALS:
            loss = _find_loss(grid, search)
            if early_loss is None:  # it ends before
                early_loss = loss
            return Replay(len(grid.layouts), len(trials), repeats, loss, early_loss)
        repeats += decision.is_repeat
        seconds = grid.seconds[decision.layout.key] * math.exp(grid.trial_error(generator))
        state, steps = _run_trial(
            seconds, grid.step_error, generator, search, is_repeat=decision.is_repeat
        )
        trials.append(Trial(len(trials) + 1, decision.layout.setting, state, steps))


def _find_loss(grid: Grid, search: Search) -> float:
    """Return how much longer the winner takes than the fastest layout, as a fraction."""
    assert search.winner is not None
    return grid.seconds[search.winner.layout.key] / min(grid.seconds.values()) - 1


def _share_groups(setting: Mapping[str, Any] | None, layout: Layout) -> bool:
    return setting is not None and all(
        layout.setting[name] == setting[name] for name in ARGUMENTS_OF_GROUPS
    )


def _run_trial(
    seconds: float,
    step_error: float,
    generator: random.Random,
    search: Search,
    *,
    is_repeat: bool,
) -> tuple[str, tuple[float, ...]]:
    """Return the state and the steps of a trial, which ends early as real ones do."""
    steps: tuple[float, ...] = ()
    for _ in range(_STEPS):
        error = math.exp(generator.gauss(0.0, step_error))
        outlier = 1.5 if generator.random() < _OUTLIERS else 1.0
        steps += (seconds * error * outlier,)
        timing = time_steps(steps)
        if (
            timing is not None
            and timing.steps >= _LEAST_STEPS
            and not is_repeat
            and search.is_hopeless(timing)
        ):
            return CUT_SHORT, steps
    return MEASURED, steps


def list_recorded_grids() -> Iterator[Grid]:
    """Yield the grids of the record."""
    record = read_json(_RECORD)
    assert record is not None
    for name, experiment in record["experiments"].items():
        problem, space = _enumerate_case(_find_case(name))
        times = {row["layout"]: _list_times(row) for row in experiment["rows"]}
        measured = [layout for layout in space.candidates if times.get(layout.key)]
        seconds = {layout.key: statistics.fmean(times[layout.key]) for layout in measured}
        errors = [
            math.log(time / seconds[key]) * math.sqrt(len(times[key]) / (len(times[key]) - 1))
            for key in seconds
            if len(times[key]) > 1
            for time in times[key]
        ]
        yield Grid(name, problem, measured, seconds, partial(_draw, errors))


def _list_times(row: Mapping[str, Any]) -> list[float]:
    return list(row["seconds"] or filter(None, [row["cut_short"]]))


def _draw(errors: Sequence[float], generator: random.Random) -> float:
    return generator.choice(errors)


def _enumerate_case(case: Case) -> tuple[SearchProblem, Space]:
    experiment = load(PROJECT / CONFIG, "train", case.words(Path("none")), "plan").experiment
    problem = make_problem(experiment, probing=False)
    return problem, enumerate_space(problem)


_WAITING = ("pipeline", "cores")
_AT_ONCE = ("data", "optimizer")
"""Causes of time in which a rank waits for passes of others, and those that occur once per step."""


class Errors(NamedTuple):
    """Standard deviations of the errors of generated grids, of the logarithm of the time.

    ``compute``, ``waiting`` and ``causes`` are the errors of computation, of waiting for other
    ranks, and of each other cause; the second number is what each value of each size adds.
    ``trial`` is the range of the error of a trial, ``step`` the error of a step.
    """

    common: float
    compute: tuple[float, float]
    waiting: tuple[float, float]
    causes: tuple[float, float]
    layout: float
    trial: tuple[float, float]
    step: float


_KNOWN = Errors(0.1, (0.08, 0.015), (0.2, 0.05), (0.4, 0.1), 0.01, (0.003, 0.01), 0.015)
_UNKNOWN = Errors(0.5, (0.8, 0.03), (0.3, 0.05), (1.0, 0.12), 0.01, (0.01, 0.03), 0.04)


class GeneratedProblem(NamedTuple):
    """A problem with its layouts, without their true times."""

    name: str
    problem: SearchProblem
    layouts: Sequence[Layout]


def _make_machines() -> Mapping[str, tuple[str, Machine | None]]:
    """Return cases of :mod:`auto_tune` with a machine, None for the case's own, by a name."""
    h100 = get_device_spec("NVIDIA H100 80GB HBM3")
    return {
        "CPU, dense, 2 ranks": ("dense-2", None),
        "CPU, mixture, 2 ranks": ("mixture-2", None),
        "CPU, dense, 4 ranks": ("dense-4", None),
        "CPU, wide, 4 ranks": ("wide-4", None),
        "GPU, 2 ranks": ("gpu-4k", make_gpu_machine(2, 2, h100, None)),
        "GPU, 8 ranks": ("gpu-8k", make_gpu_machine(8, 8, h100, None)),
        "unknown device, 8 ranks": ("gpu-4k", make_gpu_machine(8, 8, None, None)),
    }


GENERATED = tuple(_make_machines())
"""Names of generated grids: tiny models on a CPU, and eight layers of a Llama on GPUs."""


@cache
def make_generated_problem(name: str) -> GeneratedProblem:
    """Return the problem of generated grids."""
    case_name, devices = _make_machines()[name]
    case = _find_case(case_name)
    if devices is None:
        problem, space = _enumerate_case(case)
    else:
        case = replace(case, overrides={**case.overrides, "nproc_per_node": devices.ranks})
        problem = replace(_enumerate_case(case)[0], machine=devices)
        space = enumerate_space(problem)
    return GeneratedProblem(name, problem, space.candidates)


def _find_case(name: str) -> Case:
    return next(case for cases in CASES.values() for case in cases if case.name == name)


def generate_grid(generated: GeneratedProblem, seed: int) -> Grid:
    """Return a grid with random errors of the predictions."""
    generator = random.Random(f"{generated.name} {seed}")
    errors = _KNOWN if generated.problem.machine.is_known else _UNKNOWN
    common = math.exp(generator.gauss(0.0, errors.common))
    drawn: dict[tuple[Any, ...], float] = {}

    def draw(deviation: float, *key: Any) -> float:
        if key not in drawn:
            drawn[key] = generator.gauss(0.0, deviation)
        return drawn[key]

    def correct(cause: str, setting: Mapping[str, Any]) -> float:
        deviation, of_sizes = errors.causes
        if cause in ("compute", *_WAITING):
            deviation, of_sizes = errors.compute if cause == "compute" else errors.waiting
        return math.exp(
            draw(deviation, cause)
            + sum(draw(of_sizes, cause, name, setting[name]) for name in CHOSEN_ARGUMENTS)
        )

    seconds = {}
    for layout in generated.layouts:
        causes, setting = layout.prediction.seconds_by_cause, layout.setting
        corrected = {cause: s * correct(cause, setting) for cause, s in causes.items()}
        passes = [cause for cause in causes if cause not in (*_WAITING, *_AT_ONCE)]
        slower = sum(corrected[c] for c in passes) / sum(causes[c] for c in passes)
        total = sum(s * (slower if c in _WAITING else 1.0) for c, s in corrected.items())
        seconds[layout.key] = common * total * math.exp(generator.gauss(0.0, errors.layout))
    deviation = generator.uniform(*errors.trial)
    return Grid(
        generated.name,
        generated.problem,
        generated.layouts,
        seconds,
        partial(_gauss, deviation),
        errors.step,
    )


def _gauss(deviation: float, generator: random.Random) -> float:
    return generator.gauss(0.0, deviation)


def summarize(replays: Sequence[Replay]) -> dict[str, Any]:
    """Return the trials and the losses of some replays."""
    losses = sorted(replay.loss for replay in replays)
    layouts = statistics.fmean(replay.layouts for replay in replays)
    trials = [replay.trials for replay in replays]
    return {
        "replays": len(replays),
        "layouts": round(layouts),
        "trials": round(statistics.fmean(trials), 2),
        "repeats": round(statistics.fmean(replay.repeats for replay in replays), 2),
        "share_of_layouts": round(statistics.fmean(trials) / layouts, 3),
        "within_share": round(statistics.fmean(t <= BUDGET * layouts for t in trials), 3),
        "within_3_percent": _count_reached(losses),
        "within_3_percent_early": _count_reached([replay.early_loss for replay in replays]),
        "mean_loss": round(statistics.fmean(losses), 4),
        "loss_of_95_percent": round(losses[math.ceil(0.95 * len(losses)) - 1], 4),
        "largest_loss": round(losses[-1], 4),
    }


def _count_reached(losses: Sequence[float]) -> float:
    """Return the part of the losses that are within the target."""
    return round(statistics.fmean(loss <= _REACHED for loss in losses), 3)


def _replay_seed(name: str, tuner: Tuner, seed: int) -> Replay:
    """Replay one search, in a process of its own."""
    grid = _recorded_grids().get(name)
    return replay_search(grid or generate_grid(make_generated_problem(name), seed), tuner, seed)


@cache
def _recorded_grids() -> Mapping[str, Grid]:
    return {grid.name: grid for grid in list_recorded_grids()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=50, help="replays per grid")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", action="append", metavar="GRID", help="these grids")
    parser.add_argument("--tolerance", type=float, default=Tuner().algo.tolerance)
    parser.add_argument("--output", type=Path, help="result file, JSON")
    options = parser.parse_args(argv)
    tuner = Tuner(algo=TunerAlgorithm(tolerance=options.tolerance))
    results = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in options.only or (*_recorded_grids(), *GENERATED):
            replay = partial(_replay_seed, name, tuner)
            results[name] = summarize(list(pool.map(replay, range(options.seeds))))
            print(f"{name}: {results[name]}", flush=True)
            if options.output is not None:
                record = {**machine.describe_machine("flagscale"), "grids": results}
                write_atomic(options.output, f"{json.dumps(record, indent=1)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
