r"""Train a small model with Adam, Muon and Lion, and compare losses and step times.

Every run is one of run.py's, of the quickstart's text (`make data`), in bf16. Runs of a seed start
from the same weights and see the same samples. Adam and Muon have the same learning rates, with
muon_extra_scale_factor 0.2; Lion has smaller ones. A run is compared with the first one of the same
seed; over several seeds, the mean has Student's 95 % confidence interval. With --speed, the
processor time of a step of the example's own model is measured instead and added to the file.

    python tools/bench/optimizers.py --seeds 1,2,3 --output docs/results/optimizers-cpu.json
    python tools/bench/optimizers.py --speed --output docs/results/optimizers-cpu.json
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer_states import SETTINGS, train_example
from precision import describe_last_run, parse_seeds, read_earlier_curves, write_results

from flagscale.cli_errors import run_command

_BETA, _LEARNING_RATE = "train.model.optimizer.adam_beta2", "train.model.optimizer.lr_scheduler.lr"
_MUON = (
    "+train.model.optimizer.optimizer=muon +train.model.muon_extra_scale_factor=0.2 "
    "+train.model.muon_use_nesterov=true"
)
_LION = "+train.model.optimizer.optimizer=lion"
RUNS = {
    "adam, lr 3e-3": f"{_LEARNING_RATE}=3e-3",
    "adam, lr 1e-2": f"{_LEARNING_RATE}=1e-2",
    "muon, lr 3e-3": f"{_MUON} {_LEARNING_RATE}=3e-3",
    "muon, lr 1e-2": f"{_MUON} {_LEARNING_RATE}=1e-2",
    "lion, lr 3e-4": f"{_LION} {_LEARNING_RATE}=3e-4",
    "lion, lr 1e-3": f"{_LION} {_LEARNING_RATE}=1e-3",
}
"""Overrides of the runs by name."""
_SPEED_SETTINGS = (
    "experiment.runner.nproc_per_node=1 train.system.checkpoint.save=null "
    "train.system.checkpoint.save_interval=null train.model.eval_iters=1 "
    "train.system.logging.log_interval=2 train.model.optimizer.lr_scheduler.lr_warmup_iters=0"
)
_SPEED_RUNS = {"adam": "", "muon": _MUON}
_SPEED_STEPS = (10, 50)
_SPEED_ROUNDS = 2
_MAX_PERCENT = 15
"""Limit of differences in the plot."""


def measure_speed(output: Path) -> None:
    """Add the processor time of a step with each optimizer to the results.

    It is the difference of a long and a short run, divided by the steps, and the least of several
    rounds. Unlike the duration, it hardly depends on what else the machine does.
    """
    record = json.loads(output.read_text())
    seconds: dict[str, list[float]] = {name: [] for name in _SPEED_RUNS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(_SPEED_ROUNDS):
            for name, overrides in _SPEED_RUNS.items():
                settings = [*_SPEED_SETTINGS.split(), *overrides.split()]
                short, long = (
                    _measure_run(settings, steps, Path(scratch) / f"{number}-{name}-{steps}")
                    for steps in _SPEED_STEPS
                )
                seconds[name].append((long - short) / (_SPEED_STEPS[1] - _SPEED_STEPS[0]))
                print(f"{name}: {seconds[name][-1]:.3f} s of a processor per step", flush=True)
    record["speed"] = {
        "settings": _SPEED_SETTINGS,
        "processor_seconds_per_step": {name: min(values) for name, values in seconds.items()},
    }
    output.write_text(json.dumps(record, indent=1) + "\n")


def _measure_run(settings: Sequence[str], steps: int, directory: Path) -> float:
    """Return the processor time of a run in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    train_example("speed", settings, 1, steps, directory)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", default="1,2,3", help="comma-separated seeds (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file; the plot is written next to it"
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the runs that --output already contains"
    )
    parser.add_argument(
        "--speed", action="store_true", help="measure the time of a step, and add it to --output"
    )
    options = parser.parse_args(argv)
    if options.speed:
        measure_speed(options.output)
        return 0
    settings = [
        setting
        for setting in SETTINGS.split()
        if not setting.startswith((f"{_BETA}=", f"{_LEARNING_RATE}="))
    ]
    record: dict[str, Any] = {
        "text": "quickstart",
        "steps": options.steps,
        "settings": settings,
        "runs": RUNS,
    }
    curves = read_earlier_curves(options, record)
    finished = {(curve["seed"], curve["precision"]) for curve in curves}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in parse_seeds(options.seeds):
            for index, (name, overrides) in enumerate(RUNS.items()):
                if (seed, name) not in finished:
                    directory = Path(scratch) / f"{seed}-{index}"
                    arguments = [*settings, *overrides.split()]
                    curves.append(train_example(name, arguments, seed, options.steps, directory))
                    write_results(options.output, record, curves, _MAX_PERCENT)
                    print("\n".join(describe_last_run(curves)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
