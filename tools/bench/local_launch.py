"""Benchmark launching and the quickstart's training on this machine; write the results as JSON.

- CPU seconds of ``action=dryrun``.
- Launch overhead: seconds from the command until every rank has joined. ``action=run`` until it
  returns alternates with the rendered script, started by hand, until the last rank has joined.
- Training steps per second of the quickstart on 1 and 2 ranks.

Each metric is a median, stored together with its samples.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import JobError
from flagscale.status import Event, read_events

PROJECT = Path(__file__).resolve().parents[2]
CONFIG = ("--config-path", "./examples/llama3/conf", "--config-name", "train")
WARMUP_STEPS = 20
JOIN_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class SampledMetric:
    """Samples of one metric and their median."""

    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, Any]:
        samples = [round(sample, 4) for sample in self.samples]
        median = round(self.median, 4)
        return {"name": self.name, "unit": self.unit, "median": median, "samples": samples}


def measure_launch_and_training(
    scratch: Path, *, repeats: int, steps: int
) -> Iterator[SampledMetric]:
    """Yield all metrics, one after the other. ``scratch`` is an empty directory for the runs."""
    yield SampledMetric("dryrun", "CPU s", tuple(_measure_dryrun() for _ in range(repeats)))
    run_seconds, script_seconds = [], []
    for round_number in range(repeats):
        exp_dir = scratch / f"launch{round_number}"
        run_seconds.append(_measure_run_action(exp_dir))
        script_seconds.append(_measure_script(exp_dir))
    yield SampledMetric("action=run until it returns", "s", tuple(run_seconds))
    yield SampledMetric("script by hand until every rank joined", "s", tuple(script_seconds))
    overhead = tuple(
        run_time - script_time
        for run_time, script_time in zip(run_seconds, script_seconds, strict=True)
    )
    yield SampledMetric("launch overhead", "s", overhead)
    for ranks in (1, 2):
        seconds = _measure_step_seconds(scratch / f"train{ranks}", ranks, steps)
        yield SampledMetric(f"tiny, {ranks} rank(s)", "s/step", seconds)
        steps_per_second = tuple(1 / second for second in seconds)
        yield SampledMetric(f"tiny, {ranks} rank(s)", "steps/s", steps_per_second)


def _build_command(action: str, exp_dir: Path, *overrides: str) -> list[str]:
    directory = f"experiment.exp_dir={exp_dir}"
    return [sys.executable, "run.py", *CONFIG, f"action={action}", directory, *overrides]


def _run_checked(command: Sequence[str]) -> str:
    process = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if process.returncode:
        raise JobError(f"{' '.join(command)} ended with {process.returncode}:\n{process.stderr}")
    return process.stdout


def _measure_dryrun() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run_checked(_build_command("dryrun", Path("outputs")))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measure_run_action(exp_dir: Path) -> float:
    begin = time.time()
    limits = ("train.model.train_iters=100000", "train.model.eval_iters=0")
    _run_checked(_build_command("run", exp_dir, "experiment.runner.wait_for=joined", *limits))
    seconds = time.time() - begin
    _run_checked(_build_command("stop", exp_dir))
    return seconds


def _measure_script(exp_dir: Path) -> float:
    """Start the script rendered by the last run. Return the seconds until its ranks have joined."""
    ranks = json.loads(_run_checked(_build_command("query", exp_dir, "json=true")))["world_size"]
    begin = time.time()
    script = subprocess.Popen(
        ["bash", *map(str, exp_dir.glob("logs/scripts/host_0_*_run.sh"))],
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    try:
        return _wait_for_ranks(exp_dir, begin, ranks) - begin
    finally:
        script.terminate()
        script.wait()


def _wait_for_ranks(exp_dir: Path, start_time: float, ranks: int) -> float:
    """Return the Unix time at which the last rank of a run started at ``start_time`` joined.

    Raises:
        JobError: The ranks have not joined within :data:`JOIN_TIMEOUT_SECONDS`.
    """
    while time.time() < start_time + JOIN_TIMEOUT_SECONDS:
        join_times = [
            event.time for event in _read_rank_events(exp_dir, "joined") if event.time >= start_time
        ]
        if len(join_times) == ranks:
            return max(join_times)
        time.sleep(0.02)
    raise JobError(f"the ranks in {exp_dir} did not join within {JOIN_TIMEOUT_SECONDS:g} s")


def _measure_step_seconds(exp_dir: Path, ranks: int, steps: int) -> tuple[float, ...]:
    """Train for ``steps`` steps. Return the step times reported after the warm-up."""
    limits = (f"train.model.train_iters={steps}", "train.model.eval_iters=0")
    _run_checked(
        _build_command("test", exp_dir, f"experiment.runner.nproc_per_node={ranks}", *limits)
    )
    events = _read_rank_events(exp_dir, "progress")
    return tuple(event.get("step_seconds") for event in events if event.get("step") > WARMUP_STEPS)


def _read_rank_events(exp_dir: Path, kind: str) -> list[Event]:
    """Read the status events of one kind from all ranks of the only run in ``exp_dir``."""
    paths = exp_dir.glob("logs/details/host_*/*/status/rank_*.jsonl")
    return [event for path in paths for event in read_events(path)[0] if event.event == kind]


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="The machine should be idle. Takes about three minutes on two cores.",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="number of launches of each kind (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        help="number of training steps per run (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("docs/results/local-launch-cpu.json"),
        help="JSON file to write (default: %(default)s)",
    )
    options = parser.parse_args()
    record = machine.describe_machine()
    metric_records = []
    with tempfile.TemporaryDirectory() as scratch:
        for metric in measure_launch_and_training(
            Path(scratch), repeats=options.repeats, steps=options.steps
        ):
            print(f"{metric.name:42} {metric.median:9.3f} {metric.unit}", flush=True)
            metric_records.append(metric.to_json())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**record, "figures": metric_records}, indent=2) + "\n")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
