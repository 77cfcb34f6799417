"""Starting a command's ranks on other hosts: over SSH, by mpirun, inside Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.placement import Placement
from flagscale.bench.rank import Job
from flagscale.bench.spawn import call, log_path


def start_elsewhere(
    place: Placement, run: Callable[..., int], plan: Any, *, header: bool = True
) -> int:
    """Have every rank of ``place`` carry out ``run`` with ``plan``; the exit code.

    ``header``: lines about the start are wanted.

    Raises:
        FlagscaleError: a host, Slurm or mpirun cannot be used, or the ranks do not fit.
    """
    if place.slurm:
        from flagscale.bench.starters.slurm import run_in_slurm

        return run_in_slurm(place, Job.of(run, plan), os.environ, note=header)
    if place.starter == "mpirun":
        from flagscale.bench.starters.mpirun import run_by_mpirun

        return run_by_mpirun(place, Job.of(run, plan), os.environ)
    from flagscale.bench.starters.ssh import run_over_ssh

    return run_over_ssh(place, run, plan, os.environ)


def call_starter(argv: Sequence[str], environment: Mapping[str, str], log_dir: Path | None) -> int:
    """Run a line that starts ranks, and show rank 0's output where the starter put it in a file;
    the starter's code."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    code = call(argv, environment)
    if log_dir is not None and (log := log_path(log_dir, 0)).is_file():
        print(log.read_text(encoding="utf-8", errors="replace"), end="")
    return code
