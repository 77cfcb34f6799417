"""What a run and its job keep in ``<exp_dir>/logs/slurm/<run id>``, which both see.

The launcher writes ``hosts`` (their names in the order of the plan, where a hostfile gives it),
``secrets.<node rank>`` and, to have the job end, ``stop``. The job's batch script writes ``nodes``
once it has some, ``ended`` when it ends, and ``output``. Both are lines ``name=value``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from flagscale.files import make_private_directory, write_atomic
from flagscale.hosts.names import expand_list
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan

NODES = "nodes"
CANCELLED, TIME, STOP = "cancelled", "time", "stop"
"""Why a batch script ended: told by Slurm, out of time, stopped."""


def of_run(exp_dir: Path, run_id: str) -> Path:
    """The directory of a run's job."""
    return Layout(exp_dir).logs / "slurm" / run_id


@dataclass(frozen=True)
class Started:
    """That a job has begun: its id, how often it had before, and the nodes by node rank."""

    job: str
    start: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """That a batch script has ended: of which start of the job, with which code, and why (empty
    where its ranks ended by themselves)."""

    start: int
    code: int
    why: str


def started(directory: Path) -> Started | None:
    """What ``nodes`` says; None while there is none."""
    said = _said(directory / NODES)
    try:
        return Started(said["job"], int(said["start"]), tuple(expand_list(said["nodes"])))
    except (KeyError, ValueError):
        return None


def ended(directory: Path) -> Ended | None:
    """What ``ended`` says; None while there is none."""
    said = _said(directory / "ended")
    try:
        return Ended(int(said["start"]), int(said["code"]), said["why"])
    except (KeyError, ValueError):
        return None


def _said(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def write(plan: LaunchPlan, directory: Path, *, named: bool) -> None:
    """What a job needs beside its script. ``named``: the plan's hosts have their own names."""
    make_private_directory(directory)
    if named:
        write_atomic(directory / "hosts", "".join(f"{host.name}\n" for host in plan.hosts))
    for host in plan.hosts:
        if secrets := host.secrets.items():
            lines = (f"export {name}={shlex.quote(value)}\n" for name, value in secrets)
            write_atomic(directory / f"secrets.{host.node_rank}", "".join(lines))


def forget_secrets(directory: Path) -> None:
    """Remove the secrets of a job that will not start again."""
    for path in directory.glob("secrets.*"):
        path.unlink(missing_ok=True)
