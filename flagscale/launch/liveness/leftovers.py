"""What a killed agent leaves behind, and how the host's script ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from flagscale.hosts import processes
from flagscale.launch.layout import AGENT_FILE, EXIT_FILE
from flagscale.launch.liveness.telling import keep


def sweep_run(run_id: str, grace: float, spared: Sequence[int]) -> processes.Swept:
    """End the run's processes but the spared ones, reaping those that are our children."""
    # The kernel reaps orphans from now on, so that they don't stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return processes.sweep(run_id, grace, exclude=spared)


def sweep_after_agent(run_id: str, run_dir: Path, grace: float) -> int:
    """End what a killed agent left behind and record the end that it could not record."""
    spared = [os.getpid(), *processes.ancestors(os.getpid())]
    swept = sweep_run(run_id, grace, spared)
    if not (run_dir / EXIT_FILE).exists():
        record = {"code": 137, "phase": "agent", "signal": None, "ended": round(time.time(), 3)}
        record["swept"] = [*swept.terminated, *swept.killed]
        keep(run_dir / EXIT_FILE, record, instead_of=run_dir / AGENT_FILE)
    return 0
