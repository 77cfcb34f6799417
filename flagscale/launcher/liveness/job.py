"""Coordinator's record of each host, and notices of events."""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.messages import HostStatus, RankExit


@dataclass
class JobHost:
    """Status of a host in this attempt; times are seconds of the coordinator's monotonic clock.

    ``status`` to ``overdue_since`` are copied from the host's last
    :class:`~.messages.HostProgress`.
    """

    name: str
    mesh_position: str = ""
    """Position of the host's ranks in the heterogeneous meshes; empty for a homogeneous run."""
    last_message_at: float | None = None
    status: HostStatus = HostStatus.ABSENT
    joined: int = 0
    nproc: int = 0
    progress_count: int = -1
    in_busy_activity: bool = False
    ended_ranks: int = 0
    early_exits: tuple[RankExit, ...] = ()
    overdue_since: float | None = None
    exit_code: int | None = None
    """Exit code of the host's part of the attempt; None while it runs."""
    is_lost: bool = False
    sickness: str = ""
    """Reason for which it has left the job, if a check found its hardware sick."""
    loss: Failure | None = None
    """Reason for which it is lost or sick."""
    returned_at: float | None = None
    """Time at which it has come back after it was lost; None once it is in the job."""
    clock_offset: float | None = None
    """Difference between the coordinator's monotonic time and this host's Unix time, in seconds."""

    @property
    def has_left(self) -> bool:
        """True if the job does not use it any more."""
        return self.is_lost or bool(self.sickness)

    def begin_attempt(self) -> None:
        """Reset what was reported in the last attempt."""
        self.status, self.exit_code = HostStatus.STARTING, None
        self.joined, self.progress_count, self.in_busy_activity = 0, -1, False
        self.ended_ranks, self.early_exits, self.overdue_since = 0, (), None


@dataclass(frozen=True)
class Notice:
    """Event for notifications: ``failed``, ``finished``, ``stopped``, ``stalled`` or
    ``restarted``; or ``early-exit``, ``hang``, ``health`` or ``succession``, which are only logged.

    The first three end the job. ``remark`` is a line for the host's output.
    """

    event: str
    attempt: int
    failure: Failure | None = None
    remark: str = ""


def describe_mesh_position(mesh_position: str) -> str:
    """Return the end of a message about a lost host, with the position of its ranks."""
    return f"; it held {mesh_position}" if mesh_position else ""


def explain_missing_agents(port: int | None) -> str:
    """Return the possible reasons why an agent did not connect to this port. A firewall between
    hosts cannot be detected directly.
    """
    if port is None:
        return ""
    return (
        f" at port {port} of the first host (experiment.runner.liveness_port): an agent did not "
        "start, or a firewall drops the port"
    )
