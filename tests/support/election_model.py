"""Model of the succession without time: messages are delivered late, or never, and nobody ends.

A coordinator of an earlier term goes on for ever here, and shares states with any host that does
not follow a later term. So the rules about terms and states alone have to keep the job consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.messages import (
    Hello,
    JobState,
    JobStateAccepted,
    ShareJobState,
)
from flagscale.launcher.liveness.succession import Candidacy, CoordinatorSearch, SharedState
from support.liveness_job import PROGRESS
from support.succession_lab import SharedHistory

NOW = 1000.0


def describe_loss(number: int) -> Failure:
    """Return the loss of a host."""
    return Failure(f"h{number}", None, None, "was lost", "", Path("out"))


class ElectionModel:
    """Hosts whose agents vote; each operation is one step of one host or one delivered message."""

    def __init__(self, hosts: int) -> None:
        self.searches = [CoordinatorSearch(number, hosts) for number in range(hosts)]
        self.candidacies: dict[int, Candidacy] = {}
        self.shared: dict[int, SharedState] = {}
        """State that each host shares which coordinates a job."""
        self.turned_to: dict[int, int] = {}
        """Candidate that each host is connected to."""
        self._history = SharedHistory()
        self._history.record_coordinator(0, None)
        first_state = JobState(0, 0, 0, ((0,),), 0, (0, 1))
        self.shared[0] = SharedState(first_state)
        for _ in range(2):  # the electorate changes in two steps
            self.change(0, range(hosts))
            self.share(0, range(hosts))

    def perform(self, operation: str, actor: int, hosts: Collection[int]) -> None:
        """Perform an operation of one of the hosts that it is possible for."""
        actors = {
            "stand": [n for n in range(len(self.searches)) if n not in self.shared],
            "propose": [n for n, c in self.candidacies.items() if c.proposal is not None],
        }
        numbers = actors.get(operation.split(maxsplit=1)[0], [*self.shared])
        if numbers:
            OPERATIONS[operation](self, numbers[actor % len(numbers)], hosts)

    def change(self, number: int, hosts: Collection[int]) -> None:
        """Let a coordinator change its state, with contact to these hosts."""
        shared = self.shared[number]
        state = replace(shared.state, replacements=shared.state.replacements + 1)
        shared.update({number, *hosts}, state)
        self._check()

    def share(
        self, number: int, receivers: Collection[int], *, are_replies_lost: bool = False
    ) -> None:
        """Deliver the state of a coordinator."""
        shared = self.shared[number]
        for receiver in set(receivers).difference(self.shared):
            if self.searches[receiver].accept(shared.state, number):
                self.candidacies.pop(receiver, None)
                self.turned_to.pop(receiver, None)
                if not are_replies_lost:
                    shared.record_acceptance(receiver, self._reply(receiver, shared.state))
        self._check()

    def stand(self, number: int, voters: Collection[int]) -> None:
        """Let a host without a coordinator stand as a candidate, and others turn to it."""
        state = self.searches[number].state
        if state is None:
            return
        if number not in self.candidacies:
            self.turned_to.pop(number, None)
            self.candidacies[number] = Candidacy(number, state, 0, describe_loss, NOW, 10.0, 1.0)
        candidacy = self.candidacies[number]
        for voter in set(voters).difference(self.shared, {number}):
            self.candidacies.pop(voter, None)
            self.turned_to[voter] = number
            hello = Hello(voter, 0, NOW, PROGRESS, self.searches[voter].state)
            candidacy.receive(voter, hello, NOW)
        candidacy.tick(NOW)
        orders, candidacy.orders = candidacy.orders, []
        for _host, order in orders:
            if isinstance(order, ShareJobState):
                self.searches[number].vote_for_own(order.job_state)

    def propose(
        self, number: int, receivers: Collection[int], *, are_replies_lost: bool = False
    ) -> None:
        """Deliver the proposal of a candidate to hosts that are connected to it."""
        candidacy = self.candidacies[number]
        proposal = candidacy.proposal
        assert proposal is not None
        for receiver in receivers:
            if self.turned_to.get(receiver) == number:
                has_accepted = self.searches[receiver].accept(proposal, number)
                if has_accepted and not are_replies_lost:
                    candidacy.receive(receiver, self._reply(receiver, proposal), NOW)
        if candidacy.is_elected:
            self._take_over(number, proposal)

    def share_without_replies(self, number: int, receivers: Collection[int]) -> None:
        self.share(number, receivers, are_replies_lost=True)

    def propose_without_replies(self, number: int, receivers: Collection[int]) -> None:
        self.propose(number, receivers, are_replies_lost=True)

    def _reply(self, number: int, state: JobState) -> JobStateAccepted:
        return JobStateAccepted(number, 0, NOW, *state.version)

    def _take_over(self, number: int, state: JobState) -> None:
        del self.candidacies[number]
        self._history.record_coordinator(number, state)
        self.shared[number] = SharedState(state)
        self._check()

    def _check(self) -> None:
        for shared in self.shared.values():
            self._history.record_state(shared)


OPERATIONS: dict[str, Callable[[ElectionModel, int, Collection[int]], None]] = {
    "change": ElectionModel.change,
    "share": ElectionModel.share,
    "share without replies": ElectionModel.share_without_replies,
    "stand": ElectionModel.stand,
    "propose": ElectionModel.propose,
    "propose without replies": ElectionModel.propose_without_replies,
}
