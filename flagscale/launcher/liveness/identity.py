"""Record of the agent that watches a host's part of a run, and cleanup after an agent that was
killed.
"""

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
from flagscale.launcher.liveness.agent_log import write_record


def register_agent(run_dir: Path, earlier_starts: int = 0) -> str | None:
    """Record in the run's directory that this process is its agent, and remove files of earlier
    starts.

    Args:
        earlier_starts: Number of starts of the job by a scheduler before this one. The reports of
            their ranks are kept under another name, because the run continues from their
            checkpoints.

    Returns:
        An error message; None on success.
    """
    process = processes.identify_process(os.getpid())
    record = {
        "pid": os.getpid(),
        "start_ticks": process.start_ticks if process else 0,
        "boot_id": processes.read_boot_id(),
    }
    try:
        make_private_directory(run_dir / status_directory(0))
        if earlier_starts:
            _rename_earlier_reports(run_dir, earlier_starts)
        _remove_stale_files(run_dir, earlier=bool(earlier_starts))
        write_json(run_dir / AGENT_FILE, record)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    return None


def _rename_earlier_reports(run_dir: Path, start: int) -> None:
    """Rename the reports of the previous start to a name that no attempt uses."""
    for directory in list(run_dir.glob(f"{status_directory(0)}*")):
        if not directory.name.startswith(EARLIER_STATUS):
            name = directory.name.replace(".", "-")
            directory.rename(run_dir / f"{EARLIER_STATUS}{start}-{name}")
    make_private_directory(run_dir / status_directory(0))


def _remove_stale_files(run_dir: Path, *, earlier: bool) -> None:
    """Remove the files of an earlier run of the script; ``earlier``: keep renamed reports."""
    reports = list(run_dir.glob(f"{status_directory(0)}*/rank_*"))
    preserved = [
        path for path in reports if earlier and path.parent.name.startswith(EARLIER_STATUS)
    ]
    for stale in {run_dir / EXIT_FILE, run_dir / LIVENESS_FILE, *reports}.difference(preserved):
        stale.unlink(missing_ok=True)
    for stale in run_dir.glob(f"{status_directory(0)}.*"):
        with suppress(OSError):
            stale.rmdir()


def find_living_agent(run_id: str, run_dir: Path) -> int | None:
    """Return the pid of an agent that already watches this run here; None if there is none."""
    record = read_json(run_dir / AGENT_FILE)
    if record is None or record.get("boot_id") != processes.read_boot_id():
        return None
    process = processes.Process(int(record["pid"]), int(record["start_ticks"]))
    alive = processes.is_alive(process) and processes.belongs_to_run(process.pid, run_id)
    return process.pid if alive else None


def sweep_after_agent(run_id: str, run_dir: Path, grace: float) -> int:
    """End the processes that a killed agent left behind, and record the end of the job for it."""
    # Let the kernel reap orphans from now on, so that they do not remain as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    swept = processes.kill_run_processes(run_id, grace, exclude=processes.find_spared_pids(run_id))
    if not (run_dir / EXIT_FILE).exists():
        record = {"code": 137, "phase": "agent", "signal": None, "ended": round(time.time(), 3)}
        record["swept"] = [*swept.terminated, *swept.killed]
        write_record(run_dir / EXIT_FILE, record, instead_of=run_dir / AGENT_FILE)
    return 0
