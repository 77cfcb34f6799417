"""Benchmark `flagscale report` on a long run: time to write the page and its size, as JSON."""

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

from flagscale.bench import machine
from flagscale.config.schema import PROJECT
from flagscale.files import write_json
from flagscale.launcher.layout import EXIT_FILE, Layout, status_directory
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState

_START_TIME = 1_790_000_000.0
_STEP_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="The machine should be idle. Takes some seconds."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100_000,
        help="number of progress lines of the run (default: %(default)s)",
    )
    parser.add_argument(
        "--times", type=int, default=7, help="number of measurements (default: %(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        exp_dir = write_run(Path(scratch), options.steps)
        page = Path(scratch) / "page.html"
        wall_seconds, cpu_seconds = zip(
            *(_measure_report(exp_dir, page) for _ in range(options.times)), strict=True
        )
        result = {
            "steps": options.steps,
            "status_bytes": sum(path.stat().st_size for path in exp_dir.rglob("rank_0.jsonl")),
            "seconds": {"median": statistics.median(wall_seconds), "all": wall_seconds},
            "cpu_seconds": {"median": statistics.median(cpu_seconds), "all": cpu_seconds},
            "page_bytes": page.stat().st_size,
        }
    print(json.dumps({**machine.describe_machine(), **result}, indent=2))
    return 0


def write_run(root: Path, steps: int) -> Path:
    """Write the files of a finished run with ``steps`` progress lines and a checkpoint every 1000
    steps.

    Return its experiment directory.
    """
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
    state = RunState(
        run_id,
        name="long",
        exp_dir=exp_dir,
        started=_START_TIME,
        world_size=1,
        external=False,
        stop_grace=1.0,
        runner=runner,
        hosts=(host,),
    )
    state.save(Layout(exp_dir).state)
    with (run_dir / status_directory(0) / "rank_0.jsonl").open("w", encoding="utf-8") as file:
        for number, event in enumerate(_generate_events(steps)):
            record = {"time": round(_START_TIME + _STEP_SECONDS * number, 3), **event}
            file.write(json.dumps(record) + "\n")
    end_time = _START_TIME + _STEP_SECONDS * steps
    write_json(run_dir / EXIT_FILE, {"code": 0, "phase": "job", "signal": None, "ended": end_time})
    return exp_dir


def _generate_events(steps: int) -> Iterator[dict[str, object]]:
    """Yield the status events of one rank, with every metric that a GPU rank reports."""
    generator = random.Random(7)
    for step in range(1, steps + 1):
        yield {
            "event": "progress",
            "step": step,
            "train_steps": steps,
            "samples": 512 * step,
            "loss": round(2 + 9 * math.exp(-9 * step / steps) + generator.gauss(0, 0.05), 6),
            "grad_norm": round(abs(generator.gauss(1, 0.2)), 6),
            "learning_rate": 3e-4 * (1 - step / steps),
            "step_seconds": round(abs(generator.gauss(_STEP_SECONDS, 0.01)), 4),
            "tokens_per_second": round(generator.gauss(80_000, 900), 1),
            "tflops_per_gpu": round(generator.gauss(400, 4), 3),
            "mfu": round(generator.gauss(0.4, 0.01), 4),
            "memory_gib": 71.23,
        }
        if step % 1000 == 0:
            path = f"/data/checkpoints/iter_{step:07}"
            yield {"event": "checkpoint", "step": step, "path": path, "seconds": 12.5}
            yield {"event": "evaluation", "step": step, "loss": 2.5}


def _measure_report(exp_dir: Path, page: Path) -> tuple[float, float]:
    """Run ``flagscale report`` once. Return its wall-clock and CPU seconds."""
    command = [sys.executable, "-m", "flagscale.cli", "report", str(exp_dir), "-o", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "XDG_STATE_HOME": str(exp_dir)}
    start, cpu_before = time.monotonic(), _children_cpu_seconds()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - start, 3), round(_children_cpu_seconds() - cpu_before, 3)


def _children_cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


if __name__ == "__main__":
    sys.exit(main())
