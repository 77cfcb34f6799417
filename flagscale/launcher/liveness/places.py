"""Places of a job: which host has which node rank, and which hosts wait to take one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from flagscale.launcher.liveness.job import JobHost
from flagscale.launcher.liveness.options import Policy


class Places:
    """Hosts of a job by node rank.

    Args:
        policy: Rules by which hosts leave the job.
        hosts: All hosts of the run by number, spares last. Their status is read at each call.
    """

    def __init__(self, policy: Policy, hosts: Sequence[JobHost]) -> None:
        spares = min(policy.spares, len(hosts) - 1)
        self.numbers = list(range(len(hosts) - spares))
        """Number of the host at each node rank."""
        self.successors: dict[int, int] = {}
        """Hosts whose places spares have taken, with these."""
        self._policy = policy
        self._hosts = hosts
        self._planned_count = len(self.numbers)

    @property
    def hosts(self) -> list[JobHost]:
        """Hosts of the job by node rank, without spares and replaced hosts."""
        return [self._hosts[number] for number in self.numbers]

    def find_host(self, rank: int) -> JobHost:
        """Return the host of a global rank, from the reported numbers of ranks per host."""
        rank_count, rank_host = 0, self._hosts[0]
        for host in self.hosts:
            if rank_count <= rank:
                rank_host = host
            rank_count += host.nproc
        return rank_host

    @property
    def has_free_place(self) -> bool:
        """True if the job has fewer hosts than planned."""
        return len(self.numbers) < self._planned_count

    @property
    def spare_timeout(self) -> float:
        """Seconds without a message of a spare after which another one is chosen."""
        return min(self._policy.lost_host_timeout, 3 * self._policy.beat_seconds)

    def list_spares(self, now: float) -> list[int]:
        """Return the numbers of the spares that are there."""
        in_job = set(self.numbers)
        return [
            number
            for number, host in enumerate(self._hosts)
            if number not in in_job
            and not host.has_left
            and host.last_message_at is not None
            and now - host.last_message_at <= self.spare_timeout
        ]

    def count_dispensable(self, now: float) -> int:
        """Return how many hosts may leave the job: for each there is a spare, or the job may go on
        with fewer hosts.
        """
        if self._policy.on_bad_host == "stop":
            return 0
        smallest = len(self.numbers)
        if self._policy.on_bad_host == "shrink" and self._policy.min_nnodes is not None:
            smallest = min(smallest, self._policy.min_nnodes)
        return len(self.list_spares(now)) + len(self.numbers) - smallest

    def describe_shortage(self, now: float) -> str:
        """Return the reason why the job cannot go on without the hosts that have left, or an empty
        string.
        """
        lost = sum(host.has_left for host in self.hosts)
        if lost <= self.count_dispensable(now):
            return ""
        spares = len(self.list_spares(now))
        shortage = f"{lost} host(s) were lost, and {spares} spare(s) are there"
        if self._policy.on_bad_host == "shrink":
            left, smallest = len(self.numbers) - lost + spares, self._policy.min_nnodes
            shortage += f"; {left} of at least {smallest} host(s) are left (runner.nnodes)"
        return shortage

    def fill(self, now: float) -> str:
        """Let spares take the places of hosts that have left; without one, the place is given up.

        Returns:
            A sentence about these hosts.
        """
        spares = iter(self.list_spares(now))
        numbers, sentences = [], []
        for number in self.numbers:
            if not self._hosts[number].has_left:
                numbers.append(number)
                continue
            name, spare = self._hosts[number].name, next(spares, None)
            if spare is None:
                sentences.append(f"the job goes on without {name}")
            else:
                numbers.append(spare)
                self.successors[number], self._hosts[spare].returned_at = spare, None
                sentences.append(f"{self._hosts[spare].name} takes the place of {name}")
        if len(numbers) < len(self.numbers):
            sentences[-1] += f": {len(numbers)} host(s) are left"
        for number in islice(spares, self._planned_count - len(numbers)):
            numbers.append(number)
            self._hosts[number].returned_at = None
            sentences.append(f"{self._hosts[number].name} joins the job: {len(numbers)} host(s)")
        self.numbers = numbers
        return "; ".join(sentences)
