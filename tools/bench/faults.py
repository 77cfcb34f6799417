"""Measure how long a run needs to name a fault and to go on.

    python tools/bench/faults.py --output docs/results/faults-cpu.json

The hosts are namespaces of this machine, each with a real sshd (tests/bed). Each case trains a tiny
Llama-3 on them, causes a fault after some steps, and reads the run's files:

- ``named``: seconds from the fault until the first failure is reported that the agents agree on;
- ``next_step``: seconds from the fault until a rank reports a step of the next attempt;
- ``lost_steps``: steps that had been finished before and are repeated;
- ``processes``: processes of the run that are left after the end, on all hosts but those that are
  switched off.

All hosts share this machine's cores, so most of the time between the name and the next step is the
start of Python and torch. The exit code is 4 if a run does not go on, or leaves a process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench import machine
from flagscale.files import read_json, write_json
from flagscale.launcher.layout import EXIT_FILE, status_directory
from flagscale.launcher.liveness.job_record import read_newest_job_record

PROJECT = Path(__file__).resolve().parents[2]
_LOST_HOST_TIMEOUT = 4
_HANG_TIMEOUT = 5
_STEPS_BEFORE = 12
_POLL_SECONDS = 0.02
_MAX_SECONDS = 90.0
_SAVE_INTERVAL = 5
_REPLACE = {"nnodes": 2, "spares": 1, "on_bad_host": "replace"}
_SHRINK = {"nnodes": "2:3", "on_bad_host": "shrink"}
_RESTART = {"nnodes": 2, "max_restarts": 1}


class FaultRun:
    """A run on the hosts of a bed, and its files."""

    def __init__(self, bed: Any, lab: Any) -> None:
        self.bed, self.lab = bed, lab

    def signal_processes(self, host: str, number: signal.Signals, word: str = "") -> None:
        """Signal the processes of the run on a host whose command line contains ``word``."""
        for process in self.lab.run_processes(self.bed[host]):
            if word in " ".join(process.argv):
                os.kill(process.pid, number)

    def signal_rank(self, host: str, number: signal.Signals) -> None:
        """Signal the process that torchrun has started as a rank, once there is one."""
        ranks: list[int] = []

        def has_ranks() -> bool:
            processes = self.lab.run_processes(self.bed[host])
            ranks[:] = [p.pid for p in processes if "LOCAL_RANK" in p.environment()]
            return bool(ranks)

        wait_for(has_ranks, f"rank on {host}")
        os.kill(min(ranks), number)

    def read_steps(self, attempt: int) -> list[tuple[float, int]]:
        """Return time and number of the steps that ranks of an attempt have reported."""
        from support.training_lab import read_events_of_ranks  # type: ignore[import-not-found]

        return sorted(
            (event.time, int(event.get("step")))
            for event in read_events_of_ranks(self.lab, status_directory(attempt))
            if event.event == "progress"
        )

    def read_failure(self, *, without_first_host: bool) -> tuple[dict[str, Any] | None, bool]:
        """Return the first failure as far as it is known, and whether the agents have agreed on it.

        Without the first host, each of the others records the end.
        """
        first, second, *_ = self.lab.state().hosts
        if without_first_host:
            failure = (read_json(second.run_dir / EXIT_FILE) or {}).get("failure")
            return failure, failure is not None
        job = read_newest_job_record(first.run_dir)
        restarts = job.get("restarts", [])
        return (restarts[0]["failure"], True) if restarts else (job.get("failure"), False)


@dataclass(frozen=True)
class FaultCase:
    """A fault, and a run that it happens to."""

    fault: str
    answer: str
    """Reaction of the run that its configuration asks for."""
    cause: Callable[[FaultRun], None]
    runner: Mapping[str, Any]
    in_memory: bool = True
    """True if the training state is copied to host memory at every step; otherwise it is saved
    every few steps."""
    goes_on: bool = True
    is_measured: bool = False
    """True if the hosts have devices of a kind of the tests, whose faults a file decides."""


def _make_h01_sick(run: FaultRun) -> None:
    from support.health_lab import install_chip  # type: ignore[import-not-found]

    install_chip(run.lab.root / "site", {"h01": {"rate": 100, "fault": "its memory is broken"}})
    run.signal_rank("h00", signal.SIGKILL)


def _cut_power(run: FaultRun) -> None:
    run.bed["h01"].cut_power()


def _cut_first_power(run: FaultRun) -> None:
    run.bed["h00"].cut_power()


CASES = (
    FaultCase(
        "rank killed",
        "restart",
        lambda run: run.signal_rank("h01", signal.SIGKILL),
        _RESTART,
    ),
    FaultCase(
        f"rank stopped, `hang_detection_timeout: {_HANG_TIMEOUT}`",
        "restart",
        lambda run: run.signal_rank("h01", signal.SIGSTOP),
        {**_RESTART, "hang_detection_timeout": _HANG_TIMEOUT},
    ),
    FaultCase(
        "rank killed, and a host is sick, `health: quick`",
        "replace",
        _make_h01_sick,
        {**_REPLACE, "health": "quick"},
        is_measured=True,
    ),
    FaultCase("host without power", "replace", _cut_power, _REPLACE),
    FaultCase(
        f"host without power, `save_interval: {_SAVE_INTERVAL}` alone",
        "replace",
        _cut_power,
        _REPLACE,
        in_memory=False,
    ),
    FaultCase(
        "host without network",
        "replace",
        lambda run: run.bed["h01"].set_link("down"),
        _REPLACE,
    ),
    FaultCase(
        "host frozen",
        "replace",
        lambda run: run.signal_processes("h01", signal.SIGSTOP),
        _REPLACE,
    ),
    FaultCase(
        "agent killed",
        "replace",
        lambda run: run.signal_processes("h01", signal.SIGKILL, "flagscale.launcher.agent"),
        {**_REPLACE, "max_restarts": 1},
    ),
    FaultCase("host without power", "shrink", _cut_power, _SHRINK),
    FaultCase(
        "host without network",
        "shrink",
        lambda run: run.bed["h01"].set_link("down"),
        _SHRINK,
    ),
    FaultCase("first host without power", "replace", _cut_first_power, _REPLACE),
    FaultCase(
        "first host without network",
        "replace",
        lambda run: run.bed["h00"].set_link("down"),
        _REPLACE,
    ),
    FaultCase("first host without power", "shrink", _cut_first_power, _SHRINK),
    FaultCase(
        "first host without power, `on_bad_host: stop`",
        "end",
        _cut_first_power,
        _RESTART,
        goes_on=False,
    ),
)


def measure_case(case: FaultCase) -> dict[str, Any]:
    """Run a case, and return its figures."""
    from bed.lab import Bed  # type: ignore[import-not-found]
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        bed_directory, shared_directory = Path(directory) / "bed", Path(directory) / "shared"
        bed_directory.mkdir()
        shared_directory.mkdir()
        with (
            Bed.open(bed_directory, 3, shared=[shared_directory]) as bed,
            ssh_lab(bed, shared_directory / "lab") as lab,
        ):
            run = FaultRun(bed, lab)
            _start(case, run)
            figures = _measure_fault(case, run)
            lab.run_action("stop", timeout=180)
            figures["processes"] = sum(map(len, lab.remaining_processes().values()))
            return figures


def _start(case: FaultCase, run: FaultRun) -> None:
    """Start training, and wait until it is some steps from its start."""
    from support.health_lab import install_chip
    from support.training_lab import (
        LLAMA,
        PROGRAM,
        train_sections,
    )

    bed, lab = run.bed, run.lab
    with bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    checkpoints = str(lab.exp_dir / "checkpoints")
    disk = {"save": checkpoints, "load": checkpoints, "save_interval": _SAVE_INTERVAL}
    train = train_sections(
        None, logging={"non_persistent_save_interval": 1} if case.in_memory else disk
    )
    # Divides by the replicas of two and of three hosts.
    train["model"] = {**LLAMA["model"], "global_batch_size": 12}
    environment = {}
    if case.is_measured:
        install_chip(lab.root / "site", {name: {"rate": 100} for name in bed.names})
        environment = {"PYTHONPATH": os.pathsep.join([str(lab.root / "site"), str(PROJECT)])}
        os.environ["PYTHONPATH"] = environment["PYTHONPATH"]
    lab.configure(
        light=False,
        task={"entrypoint": str(PROGRAM)},
        top={"train": train},
        runner={"lost_host_timeout": _LOST_HOST_TIMEOUT, **case.runner},
        envs=environment,
    )
    result = lab.run_action("run", timeout=240)
    if result.returncode:
        raise SystemExit(f"{case.fault}: the run did not start\n{result.stderr}")
    wait_for(lambda: len(run.read_steps(0)) >= _STEPS_BEFORE, "steps before the fault")


def _measure_fault(case: FaultCase, run: FaultRun) -> dict[str, Any]:
    start = time.time()
    case.cause(run)
    # A rank that has lost another one may be reported before the cause.
    times: dict[tuple[str, int | None], float] = {}
    failure: dict[str, Any] = {}

    def is_agreed() -> bool:
        reported, agreed = run.read_failure(without_first_host=not case.goes_on)
        if reported is not None:
            times.setdefault((reported["host"], reported["rank"]), time.time())
            failure.update(reported)
        return agreed

    wait_for(is_agreed, "a name")
    named = times[failure["host"], failure["rank"]]
    figures: dict[str, Any] = {"named": round(named - start, 1)}
    rank = "" if failure.get("rank") is None else f"rank {failure['rank']} on "
    figures["sentence"] = f"{rank}{failure['host']}: {failure['reason'].splitlines()[0]}"
    if not case.goes_on:
        return figures
    wait_for(lambda: bool(run.read_steps(1)), "the next step")
    first_time, first_step = run.read_steps(1)[0]
    last_step = max(step for _, step in run.read_steps(0))
    figures["next_step"] = round(first_time - start, 1)
    figures["lost_steps"] = last_step - first_step + 1
    return figures


def wait_for(condition: Callable[[], bool], event: str, seconds: float = _MAX_SECONDS) -> None:
    """Wait until the condition is true; end the program if an event does not come in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {event} within {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def main() -> int:
    """Measure all cases; return 4 if a run has left a process, 1 if one does not go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--only", default="", help="cases whose fault and answer contain this text")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    sys.path.insert(0, str(PROJECT / "tests"))
    record = {
        **machine.describe_machine("flagscale", "torch"),
        "hosts_are": "namespaces of this machine",
        "lost_host_timeout": _LOST_HOST_TIMEOUT,
        "rounds": options.rounds,
    }
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if options.only not in f"{case.fault}, {case.answer}":
            continue
        rounds = [measure_case(case) for _ in range(options.rounds)]
        row: dict[str, Any] = {"fault": case.fault, "answer": case.answer}
        row |= {key: _summarize([figures[key] for figures in rounds]) for key in rounds[0]}
        row["processes"] = max(figures["processes"] for figures in rounds)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.output:
            write_json(options.output, {**record, "rows": rows})
    return 4 if any(row["processes"] for row in rows) else 0


def _summarize(values: list[Any]) -> Any:
    """Return the median of numbers, and the first of other values."""
    return statistics.median(values) if isinstance(values[0], (int, float)) else values[0]


if __name__ == "__main__":
    sys.exit(main())
