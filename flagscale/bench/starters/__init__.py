"""Starting a command's ranks on other hosts: over SSH, by mpirun, inside Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flagscale.bench.placement import Placement
from flagscale.bench.rank import Job


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
