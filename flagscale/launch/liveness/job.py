"""What the coordinator knows of each host of a job, and what it tells people."""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.launch.liveness.diagnosis import Failure
from flagscale.launch.liveness.messages import HostStatus
from flagscale.launch.liveness.stall import RankProgress


@dataclass
class JobHost:
    """What is known of a host in this attempt. Times are the coordinator's monotonic clock."""

    name: str
    heard: float | None = None
    status: HostStatus = HostStatus.ABSENT
    joined: int = 0
    nproc: int = 0
    moves: int = -1
    busy: bool = False
    ended: int | None = None
    lost: bool = False
    offset: float | None = None
    """What to add to this host's Unix time to get the coordinator's monotonic time."""
    ranks: tuple[RankProgress, ...] | None = None
    """The answer to the last question for stacks."""

    @property
    def over(self) -> bool:
        return self.lost or self.ended is not None


@dataclass(frozen=True)
class Notice:
    """Something that people want to be told of: ``failed``, ``finished`` or ``stopped``, which are
    the end, ``stalled`` or ``restarted``."""

    event: str
    attempt: int
    failure: Failure | None = None


def unreached(port: int | None) -> str:
    """Why agents may not have met: nobody can look at a firewall between them."""
    if port is None:
        return ""
    return (
        f" at port {port} of the first host (experiment.runner.liveness_port): an agent did not "
        "start, or a firewall drops the port"
    )
