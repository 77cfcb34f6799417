"""Detection of ranks that end early in an attempt, from the reports of all hosts.

:mod:`.rank_exits` finds them on each host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flagscale.launcher.liveness.hang import format_clock
from flagscale.launcher.liveness.job import JobHost, Notice
from flagscale.launcher.liveness.messages import RankExit
from flagscale.launcher.liveness.places import Places

# Time that ranks may take to end after the first one has ended with exit code 0.
EARLY_EXIT_SECONDS = 10.0
_MAX_LISTED_RANKS = 4


class EarlyExitDetector:
    """Detector of ranks of one attempt that have ended with exit code 0 while others are running.

    It decides when this is logged. The ranks may be meant to end: the job continues. The caller
    calls :meth:`tick` regularly until it returns a notice, or the attempt has a failure. The last
    reported exits of each host (:class:`~.job.JobHost`) are read at each call.

    Attributes:
        description: Description of the ranks, once there is a notice of them; empty before.
        remark: The same with the number of running ranks.
    """

    def __init__(self, places: Places, attempt: int) -> None:
        """Begin with the start of the attempt.

        Args:
            places: Hosts of the job by node rank.
            attempt: Number of the attempt.
        """
        self.description = self.remark = ""
        self._places = places
        self._attempt = attempt

    def tick(self, active_hosts: Collection[JobHost], now: float) -> Notice | None:
        """Return a notice of the ranks that have ended early; None without any.

        Args:
            active_hosts: Hosts whose part of the attempt is not over.
            now: Current time.
        """
        exits, ages = list[RankExit](), list[float]()
        for host in self._places.job_hosts:
            exits += host.early_exits
            ages += (now - (e.time + (host.clock_offset or 0.0)) for e in host.early_exits)
        running_ranks = sum(host.nproc - host.ended_ranks for host in active_hosts)
        if max(ages, default=0.0) < EARLY_EXIT_SECONDS or running_ranks <= 0:
            return None
        others = f"{running_ranks} ranks are" if running_ranks > 1 else "1 rank is"
        self.description = describe_early_exits(exits)
        self.remark = f"{self.description} while {others} still running"
        return Notice("early-exit", self._attempt, remark=self.remark)


def describe_early_exits(exits: Sequence[RankExit]) -> str:
    """Return ``rank 3 ended with exit code 0 at 14:02:11``, or the same of several ranks."""
    exits = sorted(exits, key=lambda rank_exit: rank_exit.time)
    clock = format_clock(exits[0].time)
    numbers = [str(r) for r in sorted(exit_.rank for exit_ in exits[:_MAX_LISTED_RANKS])]
    if len(exits) == 1:
        return f"rank {numbers[0]} ended with exit code 0 at {clock}"
    if len(exits) > _MAX_LISTED_RANKS:
        numbers.append("others")
    listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"ranks {listed} ended with exit code 0 from {clock} on"
