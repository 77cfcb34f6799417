"""Places of a job: which host has which node rank, and which hosts wait to take one.

A place is a node rank that a host can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from flagscale.launcher.liveness.job import JobHost
from flagscale.launcher.liveness.options import Policy


class Places:
    """Hosts of a job by node rank.

    Args:
        policy: Rules by which hosts leave the job.
        all_hosts: All hosts of the run by number, spares last. Their status is read at each call.
            A host that gets a place is no longer one that has come back (``returned_at``).
    """

    def __init__(self, policy: Policy, all_hosts: Sequence[JobHost]) -> None:
        # A single host, as in an agent without a secret, is never a spare.
        spares = min(policy.spares, len(all_hosts) - 1)
        self.host_by_rank = list(range(len(all_hosts) - spares))
        """Number of the host at each node rank."""
        self.replaced_by: dict[int, int] = {}
        """Number of the spare that took the place of each replaced host."""
        self._policy = policy
        self._all_hosts = all_hosts
        self._planned_count = len(self.host_by_rank)

    @property
    def job_hosts(self) -> list[JobHost]:
        """Hosts of the job by node rank, without spares and replaced hosts."""
        return [self._all_hosts[number] for number in self.host_by_rank]

    def find_host(self, rank: int) -> JobHost | None:
        """Return the host of a global rank, from the reported numbers of ranks per host; None if a
        host has not reported its number.
        """
        if not all(host.nproc for host in self.job_hosts):
            return None
        rank_count, rank_host = 0, self._all_hosts[0]
        for host in self.job_hosts:
            if rank_count <= rank:
                rank_host = host
            rank_count += host.nproc
        return rank_host

    @property
    def has_free_place(self) -> bool:
        """True if the job has fewer hosts than planned."""
        return len(self.host_by_rank) < self._planned_count

    @property
    def spare_timeout(self) -> float:
        """A spare that has been silent for this many seconds is not used."""
        return min(self._policy.lost_host_timeout, 3 * self._policy.beat_seconds)

    def list_live_spares(self, now: float) -> list[int]:
        """Return the numbers of the spares heard of within ``spare_timeout``, including hosts that
        have come back.
        """
        in_job = set(self.host_by_rank)
        return [
            number
            for number, host in enumerate(self._all_hosts)
            if number not in in_job
            and not host.has_left
            and host.last_message_at is not None
            and now - host.last_message_at <= self.spare_timeout
        ]

    @property
    def _min_count(self) -> int:
        """Number of hosts that the job needs: all of them, unless it may shrink."""
        count = len(self.host_by_rank)
        if self._policy.on_bad_host == "shrink" and self._policy.min_nnodes is not None:
            return min(count, self._policy.min_nnodes)
        return count

    def count_tolerable_losses(self, now: float) -> int:
        """Return how many of the job's hosts may be lost: one per live spare, plus those by which
        the job may shrink.
        """
        if self._policy.on_bad_host == "stop":
            return 0
        return len(self.list_live_spares(now)) + len(self.host_by_rank) - self._min_count

    def describe_shortage(self, now: float) -> str:
        """Return the reason why the job cannot go on without the hosts that have left; an empty
        string if it can go on.
        """
        lost = sum(host.has_left for host in self.job_hosts)
        if lost <= self.count_tolerable_losses(now):
            return ""
        if self._policy.on_bad_host == "stop":
            return "a host was lost"
        spares = len(self.list_live_spares(now))
        shortage = f"{lost} host(s) were lost, and {spares} spare(s) are there"
        if self._policy.on_bad_host == "shrink":
            # The key of `min_nnodes` is the first number of `runner.nnodes`.
            left = len(self.host_by_rank) - lost + spares
            shortage += f"; {left} of at least {self._min_count} host(s) are left (runner.nnodes)"
        return shortage

    def fill(self, now: float) -> str:
        """Let spares take the places of hosts that have left; without one, the place is given up.

        The caller checks :meth:`describe_shortage` before. If places are free, spares and hosts
        that have come back then join the job, under every policy. If a place is given up, later
        hosts move to other node ranks, and another host may get the first one.

        Returns:
            A sentence about these hosts.
        """
        spares = iter(self.list_live_spares(now))
        numbers, sentences = [], []
        for number in self.host_by_rank:
            if not self._all_hosts[number].has_left:
                numbers.append(number)
                continue
            name, spare = self._all_hosts[number].name, next(spares, None)
            if spare is None:
                sentences.append(f"the job goes on without {name}")
            else:
                numbers.append(spare)
                self.replaced_by[number], self._all_hosts[spare].returned_at = spare, None
                sentences.append(f"{self._all_hosts[spare].name} takes the place of {name}")
        if len(numbers) < len(self.host_by_rank):
            # Spares take the first places, so the last sentence is about a place without one.
            sentences[-1] += f": {len(numbers)} host(s) are left"
        for number in islice(spares, self._planned_count - len(numbers)):
            numbers.append(number)
            self._all_hosts[number].returned_at = None
            name = self._all_hosts[number].name
            sentences.append(f"{name} joins the job: {len(numbers)} host(s)")
        self.host_by_rank = numbers
        return "; ".join(sentences)

    def take_back(self, number: int) -> None:
        """Let a host that has come back wait for a place.

        It is not replaced any more: it may take the place of its own replacement, and
        ``replaced_by`` must have no cycle.
        """
        self.replaced_by.pop(number, None)
