"""Command lines of launchers (mpirun, srun), run with this process's output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagscale.bench.starters.local import log_path
from flagscale.hosts.workers.children import ChildProcesses

_GRACE_SECONDS = 10.0


def run_launcher(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a launcher and return its exit code. An interrupt of this process terminates it; it
    forwards the signal to the ranks."""
    sys.stdout.flush()
    with ChildProcesses(grace_seconds=_GRACE_SECONDS) as children:
        return children.start(argv, environment, dies_with_parent=False).wait()


def run_rank_launcher(
    argv: Sequence[str], environment: Mapping[str, str], log_dir: Path | None
) -> int:
    """Run a launcher that starts ranks, and print rank 0's log where the launcher wrote one.
    Returns the launcher's exit code."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    code = run_launcher(argv, environment)
    if log_dir is not None and (log := log_path(log_dir, 0)).is_file():
        print(log.read_text(encoding="utf-8", errors="replace"), end="")
    return code
