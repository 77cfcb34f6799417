"""Train for an hour on a busy machine, and count what the run takes for a fault.

    python tools/bench/false_alarms.py --minutes 60 --output docs/results/false-alarms-cpu.json

Four hosts and a spare, namespaces of this machine with a real sshd each (tests/bed), train a tiny
Llama-3 with ``on_bad_host: replace`` and ``health: quick``. Busy processes start and end beside
them at random. Nothing fails, so each restart, each replaced host and each report of a hang is a
false alarm. The exit code is 4 if there was one, or a process is left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults import FaultRun, wait_for

from flagscale.bench import machine
from flagscale.files import write_json
from flagscale.launcher.liveness.job_record import read_newest_job_record

PROJECT = Path(__file__).resolve().parents[2]
_HOSTS = 4
_LOST_HOST_TIMEOUT = 10
_HANG_TIMEOUT = 20
_BUSY_SECONDS = (2.0, 20.0)
_FIRST_STEPS = 10
_BUSY_PROGRAM = "while True: pass"


class BusyProcesses:
    """Processes beside a run, each of which uses a core for a random time."""

    def __init__(self, most: int, rng: random.Random) -> None:
        self._most, self._rng = most, rng
        self._processes: list[subprocess.Popen[bytes]] = []
        self._change_at = 0.0

    def update(self) -> None:
        """Start and end processes if it is time for another number of them."""
        if time.monotonic() < self._change_at:
            return
        self._change_at = time.monotonic() + self._rng.uniform(*_BUSY_SECONDS)
        count = self._rng.randint(0, self._most)
        while len(self._processes) > count:
            self._end(self._processes.pop())
        while len(self._processes) < count:
            self._processes.append(subprocess.Popen([sys.executable, "-c", _BUSY_PROGRAM]))

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


def train_undisturbed(minutes: float, busy: int, seed: int) -> dict[str, Any]:
    """Train for so long beside busy processes, and count the alarms."""
    from bed.lab import Bed  # type: ignore[import-not-found]
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]
    from support.training_lab import read_events_of_ranks  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        bed_directory, shared = Path(directory) / "bed", Path(directory) / "shared"
        bed_directory.mkdir()
        shared.mkdir()
        with (
            Bed.open(bed_directory, _HOSTS + 1, shared=[shared]) as bed,
            ssh_lab(bed, shared / "lab") as lab,
        ):
            _start(lab)
            run = FaultRun(bed, lab)
            wait_for(lambda: len(run.read_steps(0)) >= _FIRST_STEPS, "steps")
            processes = BusyProcesses(busy, random.Random(seed))
            loads, hangs = [], set()
            end = time.monotonic() + 60 * minutes
            try:
                while time.monotonic() < end:
                    processes.update()
                    time.sleep(1)
                    loads.append(os.getloadavg()[0])
                    hangs |= {_read_job(lab).get("hang")} - {None, ""}
            finally:
                processes.end()
            job, steps, end_time = _read_job(lab), run.read_steps(0), time.time()
            state = lab.query()["state"]
            stragglers = sum(event.event == "stragglers" for event in read_events_of_ranks(lab))
            lab.run_action("stop", timeout=180)
            return {
                "minutes": minutes,
                "mean_load": round(sum(loads) / len(loads), 1),
                "largest_load": round(max(loads), 1),
                "steps": max(step for _, step in steps),
                "longest_gap": _longest_gap([*(moment for moment, _ in steps), end_time]),
                "state": state,
                "attempts": job["attempt"],
                "replaced": job.get("replaced", {}),
                "sick": job.get("sick", {}),
                "hangs": sorted(hangs),
                "straggler_reports": stragglers,
                "processes": sum(map(len, lab.remaining_processes().values())),
            }


def _start(lab: Any) -> None:
    from support.training_lab import (
        LLAMA,
        PROGRAM,
        train_sections,
    )

    train = train_sections(
        None,
        logging={"non_persistent_save_interval": 10, "log_interval": 10, "log_straggler": True},
    )
    train["model"] = {**LLAMA["model"], "global_batch_size": _HOSTS, "train_iters": 10_000_000}
    lab.configure(
        light=False,
        task={"entrypoint": str(PROGRAM)},
        top={"train": train},
        runner={
            "nnodes": _HOSTS,
            "spares": 1,
            "on_bad_host": "replace",
            "health": "quick",
            "max_restarts": 5,
            "lost_host_timeout": _LOST_HOST_TIMEOUT,
            "hang_detection_timeout": _HANG_TIMEOUT,
        },
    )
    result = lab.run_action("run", timeout=300)
    if result.returncode:
        raise SystemExit(f"the run did not start\n{result.stderr}")


def _read_job(lab: Any) -> dict[str, Any]:
    return read_newest_job_record(lab.state().hosts[0].run_dir)


def _longest_gap(moments: list[float]) -> float:
    """Return the longest time without a report, in seconds."""
    return round(max(later - earlier for earlier, later in itertools.pairwise(moments)), 1)


def main() -> int:
    """Train, and return 4 if there was a false alarm, training ended, or a process is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=60, help="default: %(default)s")
    parser.add_argument(
        "--busy", type=int, default=4, help="most busy processes at a time; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    sys.path.insert(0, str(PROJECT / "tests"))
    figures = train_undisturbed(options.minutes, options.busy, options.seed)
    record = {
        **machine.describe_machine("flagscale", "torch"),
        "hosts": _HOSTS,
        "busy": options.busy,
        "seed": options.seed,
        "hosts_are": "namespaces of this machine",
        "lost_host_timeout": _LOST_HOST_TIMEOUT,
        "hang_detection_timeout": _HANG_TIMEOUT,
        **figures,
    }
    print(json.dumps(record, indent=1))
    if options.output:
        write_json(options.output, record)
    alarms = figures["replaced"] or figures["sick"] or figures["hangs"] or figures["processes"]
    is_disturbed = figures["attempts"] > 1 or figures["state"] != "running"
    return 4 if alarms or is_disturbed else 0


if __name__ == "__main__":
    sys.exit(main())
