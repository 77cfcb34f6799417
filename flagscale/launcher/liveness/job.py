"""What the coordinator knows of each host of a job, which rank of a stalled one holds up the
others, and what it tells people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.launcher.liveness.diagnosis import Failure, Report, Severity
from flagscale.launcher.liveness.messages import HostStatus, RankProgress


@dataclass
class JobHost:
    """What is known of a host in this attempt. Times are the coordinator's monotonic clock."""

    name: str
    place: str = ""
    """What it holds, where ranks are unlike."""
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


def held(place: str) -> str:
    """The end of a message on a host that is gone."""
    return f"; it held {place}" if place else ""


def unreached(port: int | None) -> str:
    """Why agents may not have met: nobody can look at a firewall between them."""
    if port is None:
        return ""
    return (
        f" at port {port} of the first host (experiment.runner.liveness_port): an agent did not "
        "start, or a firewall drops the port"
    )


def behind(ranks: Sequence[RankProgress]) -> RankProgress | None:
    """The rank that the others wait for: the lowest step, then a process that is stopped, then
    one that does not answer where others do, then one that waits for nobody."""
    if not ranks:
        return None
    lowest = min((rank.step for rank in ranks if rank.step is not None), default=None)
    last = [rank for rank in ranks if lowest is None or rank.step == lowest]
    return min(last, key=lambda rank: (not rank.stopped, rank.answered, rank.waits, rank.rank))


def stalled_report(
    ranks: Sequence[RankProgress], seconds: float, host: str, output: Path
) -> Report:
    """The failure of a job that got no further for ``seconds``. ``host`` and ``output`` stand in
    where no rank could be asked. The report's time is left to the caller."""
    last = behind(ranks)
    if last is None:
        reason = f"stalled: no rank has got on for {seconds:.0f} s"
        return Report(Failure(host, None, None, reason, "", output), 0.0, Severity.KILLED)
    at = f" {last.doing}" if last.doing else ""
    at += f" at step {last.step}" if last.step is not None else ""
    reason = f"stalled: no rank has got on for {seconds:.0f} s, and this one is behind{at}"
    if last.stopped:
        reason += "; its process is stopped (SIGSTOP)"
    elif not last.answered:
        reason += "; it did not say where it is"
    failure = Failure(last.host, last.rank, None, reason, last.stack, last.log)
    return Report(failure, 0.0, Severity.KILLED)
