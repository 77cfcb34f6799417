"""Measure launching and the quickstart's training on this machine; write the figures to a file.

- CPU seconds of ``action=dryrun``.
- Launch overhead: seconds from the command to every rank having joined, by ``action=run`` until it
  returns and by starting the rendered script by hand until the last rank says so, in turns.
- Training steps a second of the quickstart on 1 and 2 ranks.

Every figure is a median, given with the samples it is of.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.errors import JobError
from flagscale.status import Event, read_events

PROJECT = Path(__file__).resolve().parents[2]
CONFIG = ("--config-path", "./examples/llama3/conf", "--config-name", "train")
WARM_UP_STEPS = 20
JOIN_SECONDS = 120.0


@dataclass(frozen=True)
class Figure:
    """A median and what it is of."""

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


def measure(scratch: Path, *, repeats: int, steps: int) -> Iterator[Figure]:
    """All figures, one after the other. ``scratch`` is an empty directory for the runs."""
    yield Figure("dryrun", "CPU s", tuple(_dryrun() for _ in range(repeats)))
    by_run, by_hand = [], []
    for turn in range(repeats):
        exp_dir = scratch / f"launch{turn}"
        by_run.append(_by_run(exp_dir))
        by_hand.append(_by_hand(exp_dir))
    yield Figure("action=run until it returns", "s", tuple(by_run))
    yield Figure("script by hand until every rank joined", "s", tuple(by_hand))
    overhead = tuple(run - hand for run, hand in zip(by_run, by_hand, strict=True))
    yield Figure("launch overhead", "s", overhead)
    for ranks in (1, 2):
        seconds = _step_seconds(scratch / f"train{ranks}", ranks, steps)
        yield Figure(f"tiny, {ranks} rank(s)", "s/step", seconds)
        paces = tuple(1 / second for second in seconds)
        yield Figure(f"tiny, {ranks} rank(s)", "steps/s", paces)


def _command(action: str, exp_dir: Path, *overrides: str) -> list[str]:
    directory = f"experiment.exp_dir={exp_dir}"
    return [sys.executable, "run.py", *CONFIG, f"action={action}", directory, *overrides]


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _dryrun() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _call(_command("dryrun", Path("outputs")))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _by_run(exp_dir: Path) -> float:
    begin = time.time()
    limits = ("train.model.train_iters=100000", "train.model.eval_iters=0")
    _call(_command("run", exp_dir, "experiment.runner.wait_for=joined", *limits))
    seconds = time.time() - begin
    _call(_command("stop", exp_dir))
    return seconds


def _by_hand(exp_dir: Path) -> float:
    """Start the script that the last run has left; wait until its ranks have joined."""
    ranks = json.loads(_call(_command("query", exp_dir, "json=true")))["world_size"]
    begin = time.time()
    script = subprocess.Popen(
        ["bash", *map(str, exp_dir.glob("logs/scripts/host_0_*_run.sh"))],
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    try:
        return _joined(exp_dir, begin, ranks) - begin
    finally:
        script.terminate()
        script.wait()


def _joined(exp_dir: Path, begin: float, ranks: int) -> float:
    """When the last rank of a run that began at ``begin`` joined, in Unix seconds."""
    while time.time() < begin + JOIN_SECONDS:
        joined = [event.time for event in _events(exp_dir, "joined") if event.time >= begin]
        if len(joined) == ranks:
            return max(joined)
        time.sleep(0.02)
    raise JobError(f"the ranks in {exp_dir} did not join within {JOIN_SECONDS:g} s")


def _step_seconds(exp_dir: Path, ranks: int, steps: int) -> tuple[float, ...]:
    """Seconds of each group of steps that was reported, after the first."""
    limits = (f"train.model.train_iters={steps}", "train.model.eval_iters=0")
    _call(_command("test", exp_dir, f"experiment.runner.nproc_per_node={ranks}", *limits))
    events = _events(exp_dir, "progress")
    return tuple(event.get("step_seconds") for event in events if event.get("step") > WARM_UP_STEPS)


def _events(exp_dir: Path, kind: str) -> list[Event]:
    """What the ranks of the only run in this directory have reported."""
    paths = exp_dir.glob("logs/details/host_*/*/status/rank_*.jsonl")
    return [event for path in paths for event in read_events(path)[0] if event.event == kind]


def main() -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="The machine should be idle. Takes about three minutes on two cores.",
    )
    parser.add_argument("--repeats", type=int, default=5, help="launches of each kind")
    parser.add_argument("--steps", type=int, default=120, help="training steps of each run")
    parser.add_argument("--output", type=Path, default=Path("docs/results/local-launch-cpu.json"))
    options = parser.parse_args()
    record = machine.facts()
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        for figure in measure(Path(scratch), repeats=options.repeats, steps=options.steps):
            print(f"{figure.name:42} {figure.median:9.3f} {figure.unit}", flush=True)
            figures.append(figure.to_json())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**record, "figures": figures}, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
