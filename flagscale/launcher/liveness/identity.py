"""Record of the agent that supervises a host's part of a run, and cleanup after an agent that was
killed. Used by :mod:`flagscale.launcher.agent`.
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
    EARLIER_STATUS_PREFIX,
    EXIT_FILE,
    HOST_RECORD_FILE,
    LIVENESS_FILE,
    RANKS_DIRECTORY,
    status_directory,
)
from flagscale.launcher.liveness.agent_log import log_line, write_record


def register_agent(run_dir: Path, earlier_starts: int = 0, *, returns: bool = False) -> str | None:
    """Record in the run's directory that this process is its agent, and remove files of earlier
    starts.

    Args:
        run_dir: Directory of the run on this host.
        earlier_starts: Number of starts of the job by a scheduler before this one. The reports of
            their ranks are kept under another name, because the run continues from their
            checkpoints.
        returns: True if the job may have gone on while this host had no agent. The reports of its
            ranks are kept.

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
        if returns:
            for name in (EXIT_FILE, LIVENESS_FILE):
                (run_dir / name).unlink(missing_ok=True)
        else:
            _remove_stale_files(run_dir, keep_renamed=bool(earlier_starts))
        write_json(run_dir / AGENT_FILE, record)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    return None


def _rename_earlier_reports(run_dir: Path, start: int) -> None:
    """Rename the reports of the previous start to a name that no attempt uses."""
    for directory in list(run_dir.glob(f"{status_directory(0)}*")):
        if not directory.name.startswith(EARLIER_STATUS_PREFIX):
            name = directory.name.replace(".", "-")
            directory.rename(run_dir / f"{EARLIER_STATUS_PREFIX}{start}-{name}")
    make_private_directory(run_dir / status_directory(0))


def _remove_stale_files(run_dir: Path, *, keep_renamed: bool) -> None:
    """Remove the files of an earlier run of the script, except renamed reports if
    ``keep_renamed``.
    """
    directories = f"{status_directory(0)}*"
    reports = [*run_dir.glob(f"{directories}/rank_*")]
    reports += run_dir.glob(f"{directories}/{HOST_RECORD_FILE}")
    renamed_reports = [
        path
        for path in reports
        if keep_renamed and path.parent.name.startswith(EARLIER_STATUS_PREFIX)
    ]
    for stale_path in {run_dir / EXIT_FILE, run_dir / LIVENESS_FILE, *reports}.difference(
        renamed_reports
    ):
        stale_path.unlink(missing_ok=True)
    for stale_path in run_dir.glob(f"{status_directory(0)}.*"):
        with suppress(OSError):
            stale_path.rmdir()


def find_live_agent(run_id: str, run_dir: Path) -> int | None:
    """Return the pid of an agent that already watches this run here; None if there is none."""
    record = read_json(run_dir / AGENT_FILE)
    if record is None or record.get("boot_id") != processes.read_boot_id():
        return None
    process = processes.Process(int(record["pid"]), int(record["start_ticks"]))
    is_live = processes.is_alive(process) and processes.belongs_to_run(process.pid, run_id)
    return process.pid if is_live else None


def sweep_after_agent(run_id: str, run_dir: Path, grace_seconds: float) -> int:
    """End the processes that a killed agent left behind, and record the end of the job for it.

    They get SIGTERM, and SIGKILL after ``grace_seconds``. Processes with an emptied environment are
    no descendants of a live agent any more; those that write to the ranks' files are reported.

    Returns the exit code of this process.
    """
    # Let the kernel reap orphans from now on, so that they do not remain as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    killed_processes = processes.kill_run_processes(run_id, grace_seconds, of_this_host=True)
    left = [process.pid for process in processes.find_writers(run_dir / RANKS_DIRECTORY)]
    if left:
        pids = ", ".join(map(str, left))
        log_line(f"the killed agent has left processes with an emptied environment: {pids}")
    if not (run_dir / EXIT_FILE).exists():
        record = {"code": 137, "phase": "agent", "signal": None, "ended": round(time.time(), 3)}
        record["left"] = left
        record["swept"] = [*killed_processes.terminated, *killed_processes.killed]
        write_record(run_dir / EXIT_FILE, record, expendable_path=run_dir / AGENT_FILE)
    return 0
