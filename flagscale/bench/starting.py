"""Starting a command's ranks on other hosts: over SSH, by mpirun, inside Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flagscale.bench.collectives.slurm import run_in_slurm
from flagscale.bench.collectives.spec import Placement
from flagscale.bench.collectives.starters import run_by_mpirun, without_starting


def is_elsewhere(place: Placement) -> bool:
    """Whether ``place`` says where to start."""
    return place.slurm or bool(place.hosts)


def start_elsewhere(
    place: Placement, module: str, words: Sequence[str], *, header: bool, dumps: bool
) -> int:
    """Run ``python -m module`` with ``words`` as every rank of ``place``; the exit code.

    ``header``: lines about the start are wanted; ``dumps``: the command takes ``--dump-dir``.

    Raises:
        FlagscaleError: a host, Slurm or mpirun cannot be used, or the ranks do not fit.
    """
    program, line = ("-m", module), without_starting(words)
    if place.slurm:
        return run_in_slurm(place, [sys.executable, *program, *line], os.environ, note=header)
    if place.starter == "ssh":
        # What opens connections is no business of the ranks, which load this module too.
        from flagscale.bench.collectives.over_ssh import run_over_ssh

        return run_over_ssh(place, program, line, os.environ, dumps=dumps)
    return run_by_mpirun(place, [*program, *line], os.environ)
