"""Files that a run and its job exchange in ``<exp_dir>/logs/slurm/<run id>``.

The launcher writes ``hosts`` (host names in the order of the plan, if a hostfile defines it),
``secrets.<node rank>`` and, to end the job, ``stop``. The job's batch script writes ``nodes`` once
it has been allocated nodes, ``ended`` when it ends, and ``output``. ``nodes`` and ``ended`` consist
of lines ``name=value``. If the node of that script is lost, guard.sh writes ``ended`` on another
node, which it reserves for itself with the directory ``guard.<start>``.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from flagscale.files import make_private_directory, write_atomic
from flagscale.hosts.names import expand_list
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan

NODES = "nodes"
# Reasons why a batch script ended (`why` in `ended`, written by job.sh), unless its ranks ended by
# themselves.
CANCELLED = "cancelled"  # TERM from Slurm: cancelled, preempted, or at its time limit
TIME = "time"  # signal before the time limit
STOP = "stop"  # `action=stop`
# The last value of a tuple is what older batch scripts wrote.
# The script has requeued its job.
REQUEUED = ("requeued_at_time_limit", "requeued_after_loss", "again")
TOO_MANY_REQUEUES = ("too_many_requeues", "requeued")  # Slurm restarted it more than slurm.requeue
PORT = "port"  # no free port on the first node
DISK = "disk"  # could not write `nodes`
BATCH_NODE_LOST = "batch_node_lost"  # written by guard.sh on another node


def job_directory(exp_dir: Path, run_id: str) -> Path:
    """Return the directory of a run's job."""
    return Layout(exp_dir).logs / "slurm" / run_id


@dataclass(frozen=True)
class JobStart:
    """Record that a job has started: its id, the number of earlier starts, and the nodes by node
    rank.
    """

    job: str
    start: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class JobEnd:
    """Record that a batch script has ended.

    Attributes:
        start: Number of starts of the job before this one.
        code: Exit code.
        reason: Reason for the end; empty if the ranks ended by themselves.
    """

    start: int
    code: int
    reason: str


def read_start(directory: Path) -> JobStart | None:
    """Return the contents of ``nodes``; None if it does not exist."""
    fields = _read_fields(directory / NODES)
    try:
        return JobStart(fields["job"], int(fields["start"]), tuple(expand_list(fields["nodes"])))
    except (KeyError, ValueError):
        return None


def start_time(directory: Path) -> float:
    """Return the time of the last start of a job, in Unix seconds; infinity if it is not known."""
    try:
        return (directory / NODES).stat().st_mtime
    except OSError:
        return math.inf


def read_end(directory: Path) -> JobEnd | None:
    """Return the contents of ``ended``; None if it does not exist."""
    fields = _read_fields(directory / "ended")
    try:
        return JobEnd(int(fields["start"]), int(fields["code"]), fields["why"])
    except (KeyError, ValueError):
        return None


def _read_fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def write_job_files(plan: LaunchPlan, directory: Path, *, has_host_names: bool) -> None:
    """Write the files of a job next to its script.

    Args:
        plan: Plan of the run.
        directory: Directory of the job.
        has_host_names: True if the plan's hosts have their real names.
    """
    make_private_directory(directory)
    if has_host_names:
        write_atomic(directory / "hosts", "".join(f"{host.name}\n" for host in plan.hosts))
    for host in plan.hosts:
        if secrets := host.secrets.items():
            lines = (f"export {name}={shlex.quote(value)}\n" for name, value in secrets)
            write_atomic(directory / f"secrets.{host.node_rank}", "".join(lines))


def remove_secrets(directory: Path) -> None:
    """Remove the secrets of a job that will not start again."""
    for path in directory.glob("secrets.*"):
        path.unlink(missing_ok=True)
