"""Which agent watches a host's part of a run, as the run's directory says; and what becomes of the
run where that agent was killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from flagscale.files import make_private_directory, read_json, write_json
from flagscale.hosts import processes
from flagscale.launcher.layout import (
    AGENT_FILE,
    EARLIER_STATUS,
    EXIT_FILE,
    LIVENESS_FILE,
    status_directory,
)
from flagscale.launcher.liveness.agent_log import keep


def announce(run_dir: Path, earlier_starts: int = 0) -> str | None:
    """Say in the run's directory that this process watches, and forget an earlier start of its
    script; what went wrong. ``earlier_starts`` of the job by a scheduler: what their ranks have
    reported is kept beside, for the run goes on from the checkpoints of these."""
    own = processes.identify(os.getpid())
    record = {
        "pid": os.getpid(),
        "start_ticks": own.start_ticks if own else 0,
        "boot_id": processes.boot_id(),
    }
    try:
        make_private_directory(run_dir / status_directory(0))
        if earlier_starts:
            _put_aside(run_dir, earlier_starts)
        _forget(run_dir, earlier=bool(earlier_starts))
        write_json(run_dir / AGENT_FILE, record)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    return None


def _put_aside(run_dir: Path, start: int) -> None:
    """Give the reports of the start before a name that no attempt has."""
    for directory in list(run_dir.glob(f"{status_directory(0)}*")):
        if not directory.name.startswith(EARLIER_STATUS):
            name = directory.name.replace(".", "-")
            directory.rename(run_dir / f"{EARLIER_STATUS}{start}-{name}")
    make_private_directory(run_dir / status_directory(0))


def _forget(run_dir: Path, *, earlier: bool) -> None:
    reports = list(run_dir.glob(f"{status_directory(0)}*/rank_*"))
    kept = [path for path in reports if earlier and path.parent.name.startswith(EARLIER_STATUS)]
    for stale in {run_dir / EXIT_FILE, run_dir / LIVENESS_FILE, *reports}.difference(kept):
        stale.unlink(missing_ok=True)
    for stale in run_dir.glob(f"{status_directory(0)}.*"):
        with suppress(OSError):
            stale.rmdir()


def already_alive(run_id: str, run_dir: Path) -> int | None:
    """The pid of an agent that watches this very run already, or None."""
    record = read_json(run_dir / AGENT_FILE)
    if record is None or record.get("boot_id") != processes.boot_id():
        return None
    process = processes.Process(int(record["pid"]), int(record["start_ticks"]))
    alive = processes.is_alive(process) and processes.belongs(process.pid, run_id)
    return process.pid if alive else None


def sweep_after_agent(run_id: str, run_dir: Path, grace: float) -> int:
    """End what a killed agent left behind and record the end that it could not record."""
    # The kernel reaps orphans from now on, so that they don't stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    swept = processes.sweep(run_id, grace, exclude=processes.spared(run_id))
    if not (run_dir / EXIT_FILE).exists():
        record = {"code": 137, "phase": "agent", "signal": None, "ended": round(time.time(), 3)}
        record["swept"] = [*swept.terminated, *swept.killed]
        keep(run_dir / EXIT_FILE, record, instead_of=run_dir / AGENT_FILE)
    return 0
