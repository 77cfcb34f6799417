"""Measure how long the page of a long run takes to write, and how large it is; print JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.config.schema import PROJECT
from flagscale.files import write_json
from flagscale.launcher.layout import EXIT_FILE, Layout, status_directory
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState

_BEGAN = 1_790_000_000.0
_SECONDS_A_STEP = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="The machine should be idle. Takes some seconds."
    )
    parser.add_argument("--steps", type=int, default=100_000, help="lines of progress of the run")
    parser.add_argument("--times", type=int, default=7, help="how often it is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        made = lay(Path(scratch), options.steps)
        page = Path(scratch) / "page.html"
        wall, cpu = zip(*(_written(made, page) for _ in range(options.times)), strict=True)
        measured = {
            "steps": options.steps,
            "status_bytes": sum(path.stat().st_size for path in made.rglob("rank_0.jsonl")),
            "seconds": {"median": statistics.median(wall), "all": wall},
            "cpu_seconds": {"median": statistics.median(cpu), "all": cpu},
            "page_bytes": page.stat().st_size,
        }
    print(json.dumps({**machine.facts(), **measured}, indent=2))
    return 0


def lay(root: Path, steps: int) -> Path:
    """A run of so many steps that has ended, with a checkpoint every thousand; its directory."""
    run_id, exp_dir = "20260921-000000-aaaaaa", root / "exp"
    run_dir = Layout(exp_dir).run_dir(0, "localhost", run_id)
    (run_dir / status_directory(0)).mkdir(parents=True)
    script, output, pid_file = (exp_dir / name for name in ("script", "output", "pid"))
    host = HostState(
        name="localhost",
        first_rank=0,
        nproc=1,
        node_rank=0,
        run_dir=run_dir,
        script=script,
        output=output,
        pid_file=pid_file,
    )
    runner = RunnerHandle("local")
    state = RunState(run_id, "long", exp_dir, _BEGAN, 1, False, 1.0, runner, (host,))
    state.save(Layout(exp_dir).state)
    with (run_dir / status_directory(0) / "rank_0.jsonl").open("w", encoding="utf-8") as file:
        for number, event in enumerate(_events(steps)):
            record = {"time": round(_BEGAN + _SECONDS_A_STEP * number, 3), **event}
            file.write(json.dumps(record) + "\n")
    ended = _BEGAN + _SECONDS_A_STEP * steps
    write_json(run_dir / EXIT_FILE, {"code": 0, "phase": "job", "signal": None, "ended": ended})
    return exp_dir


def _events(steps: int) -> Iterator[dict[str, object]]:
    """What a rank reports, as a GPU's does: every figure there is."""
    chance = random.Random(7)
    for step in range(1, steps + 1):
        yield {
            "event": "progress",
            "step": step,
            "train_steps": steps,
            "samples": 512 * step,
            "loss": round(2 + 9 * math.exp(-9 * step / steps) + chance.gauss(0, 0.05), 6),
            "grad_norm": round(abs(chance.gauss(1, 0.2)), 6),
            "learning_rate": 3e-4 * (1 - step / steps),
            "step_seconds": round(abs(chance.gauss(_SECONDS_A_STEP, 0.01)), 4),
            "tokens_per_second": round(chance.gauss(80_000, 900), 1),
            "tflops_per_gpu": round(chance.gauss(400, 4), 3),
            "mfu": round(chance.gauss(0.4, 0.01), 4),
            "memory_gib": 71.23,
        }
        if step % 1000 == 0:
            path = f"/data/checkpoints/iter_{step:07}"
            yield {"event": "checkpoint", "step": step, "path": path, "seconds": 12.5}
            yield {"event": "evaluation", "step": step, "loss": 2.5}


def _written(exp_dir: Path, page: Path) -> tuple[float, float]:
    """Seconds of the whole command, by the clock and of CPU time."""
    words = [sys.executable, "-m", "flagscale.cli", "report", str(exp_dir), "-o", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "XDG_STATE_HOME": str(exp_dir)}
    began, spent = time.monotonic(), _spent()
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - began, 3), round(_spent() - spent, 3)


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


if __name__ == "__main__":
    sys.exit(main())
