"""Succession of coordinators: which host continues a job whose coordinator is lost. No I/O.

The coordinator shares the state of the job (:class:`~.messages.JobState`) with the agents of all
hosts. An agent that has lost the contact to it turns to the next host by number, the *candidate*,
whose agent has lost the contact, too. The candidate asks the agents to accept a state of the next
term, in which it is the coordinator. It takes over if a majority accepts.

Two coordinators never act at the same time for longer than a lost host takes to notice its loss:

- An agent accepts one coordinator per term, and none of an earlier term.
- A candidate needs more than half of each electorate, and a coordinator the contact to at least
  half. So if one has what it needs, the other one has not, and ends its part of the job.
- A host that votes has accepted the electorates. A changed electorate is in force in addition to
  the previous one, until enough hosts of both have accepted it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.messages import (
    Departure,
    Hello,
    HostMessage,
    JobState,
    JobStateAccepted,
    KeepAlive,
    Order,
    ShareJobState,
    StopSignalled,
)

MIN_SUCCESSION_AGENTS = 3
"""Number of agents below which there is no majority without the coordinator."""
MAX_CANDIDATES = 3
"""Number of hosts that an agent turns to, one after another."""
CANDIDACY_TIMEOUTS = 2
"""Multiple of ``lost_host_timeout`` after which a candidate without a majority gives up."""

Electorates = Sequence[Collection[int]]


def has_majority(electorates: Electorates, hosts: Collection[int]) -> bool:
    """Return True if the hosts are more than half of each electorate."""
    return all(2 * len({*hosts}.intersection(e)) > len(e) for e in electorates)


def has_half(electorates: Electorates, hosts: Collection[int]) -> bool:
    """Return True if the hosts are at least half of each electorate."""
    return all(2 * len({*hosts}.intersection(e)) >= len(e) for e in electorates)


class SharedState:
    """The coordinator's record of the state that it shares, and of the hosts that accepted it."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self._number = state.coordinator
        self._accepted = {self._number}
        self._electorate = state.electorates[-1]  # the last one that enough hosts have accepted

    @property
    def is_accepted(self) -> bool:
        """True if enough hosts have accepted the state since it has changed."""
        return has_half(self.state.electorates, self._accepted)

    def accept(self, host: int, message: JobStateAccepted) -> None:
        """Record that a host has accepted a state."""
        if (message.term, message.revision) == self.state.version:
            self._accepted.add(host)
            if self.is_accepted:
                self._electorate = self.state.electorates[-1]

    def update(self, hosts: Iterable[int], state: JobState) -> bool:
        """Set the state to share, with these hosts as the electorate; return True if it is new.

        Term, revision, coordinator and electorates of ``state`` are ignored.
        """
        electorate = tuple(sorted(hosts))
        electorates: tuple[tuple[int, ...], ...] = (self._electorate,)
        if electorate != self._electorate:
            electorates += (electorate,)
        current = self.state
        updated = replace(
            state,
            term=current.term,
            revision=current.revision,
            coordinator=self._number,
            electorates=electorates,
        )
        if updated == current:
            return False
        self.state = updated
        self.renew()
        return True

    def renew(self) -> None:
        """Require that the hosts accept the state once more."""
        self.state = replace(self.state, revision=self.state.revision + 1)
        self._accepted = {self._number}

    def has_quorum(self, hosts: Collection[int]) -> bool:
        """Return True if the contact to these hosts suffices to coordinate the job."""
        return has_half(self.state.electorates, hosts)

    def could_elect(self, hosts: Collection[int]) -> bool:
        """Return True if these hosts could elect a successor."""
        return has_majority(self.state.electorates, hosts)

    def summary(self) -> dict[str, int]:
        """Return the part of the job's summary by which readers find the newest one."""
        return {"term": self.state.term, "coordinator": self._number}


class CoordinatorSearch:
    """One agent's view of who coordinates the job.

    Args:
        number: Number of this host.
        host_count: Number of hosts.
    """

    def __init__(self, number: int, host_count: int) -> None:
        self.state: JobState | None = None
        """Newest state of the job that this agent has accepted."""
        self.target = 0
        """Number of the coordinator, or of the candidate that this agent has turned to."""
        self.is_searching = False
        self._number = number
        self._host_count = host_count
        self._candidates: list[int] = []

    def accept(self, state: JobState, sender: int) -> bool:
        """Accept a state from the coordinator or a candidate, which is followed from now on.

        Returns:
            False for a state that is not the sender's, or of a coordinator that another one has
            succeeded.
        """
        current = self.state
        if sender != state.coordinator or not self._is_valid(state):
            return False
        if current is not None and (
            state.version < current.version
            or (state.term == current.term and sender != current.coordinator)
        ):
            return False
        self.state, self.target, self.is_searching = state, sender, False
        return True

    def _is_valid(self, state: JobState) -> bool:
        numbers = {*state.places, *(d.host for d in state.departures)}
        numbers.update(*state.electorates)
        return bool(state.electorates and state.places) and all(
            0 <= number < self._host_count for number in numbers
        )

    def begin(self) -> bool:
        """Begin the search after the loss of the coordinator; return False if there can be no
        successor that this host could follow.
        """
        self._candidates = self.list_candidates()
        self.is_searching = self.turn()
        return self.is_searching

    def list_candidates(self) -> list[int]:
        """Return the hosts that this one would turn to without the coordinator, in order; none if
        they could have no majority.
        """
        state = self.state
        if state is None or not all(self._number in e for e in state.electorates):
            return []
        others = [{*electorate} - {state.coordinator} for electorate in state.electorates]
        if not all(map(has_majority, ([e] for e in state.electorates), others)):
            return []
        departed = {departure.host for departure in state.departures}
        return sorted(others[-1] - departed)[:MAX_CANDIDATES]

    def turn(self) -> bool:
        """Turn to the next candidate; return False if there is none."""
        if not self._candidates:
            return False
        self.target = self._candidates.pop(0)
        return True

    @property
    def is_candidate(self) -> bool:
        """True if this host is the candidate."""
        return self.is_searching and self.target == self._number


class Candidacy:
    """A host's attempt to become the coordinator.

    The caller sends and removes ``orders`` (pairs of a host's number, or None for all, and the
    order).

    Args:
        number: Number of this host.
        state: Newest state of the job that this host has accepted.
        attempt: Number of this host's attempt.
        loss: Loss of the coordinator.
        timeout: ``lost_host_timeout``.
        beat_seconds: Interval of heartbeats.
    """

    def __init__(
        self,
        number: int,
        state: JobState,
        attempt: int,
        loss: Failure,
        now: float,
        timeout: float,
        beat_seconds: float,
    ) -> None:
        self.orders: list[tuple[int | None, Order]] = []
        self.messages: list[tuple[int, HostMessage]] = []
        """Messages for the coordinator that this host may become."""
        self.proposal: JobState | None = None
        """State of the next term, once a majority of the hosts is here."""
        self._number = number
        self._state = state
        self._attempt = attempt
        self._loss = loss
        self._deadline = now + CANDIDACY_TIMEOUTS * timeout
        self._beat_seconds = beat_seconds
        self._last_beat_at = now
        self._contacts: dict[int, float] = {}
        self._accepted = {number}
        self.has_failed = False

    @property
    def is_elected(self) -> bool:
        """True if this host is the coordinator, with ``proposal`` as the state of the job."""
        return self.proposal is not None and has_majority(self.proposal.electorates, self._accepted)

    def receive(self, host: int, message: HostMessage, now: float) -> None:
        """Process a message of a host that has turned to this one."""
        if isinstance(message, StopSignalled):
            self.messages.append((host, message))
        elif isinstance(message, Hello):
            if message.job_state is not None:
                self._contacts[host] = now
                self._learn(message.job_state, message.attempt)
            if self.proposal is not None:
                self.orders.append((host, ShareJobState(self.proposal)))
        elif (
            isinstance(message, JobStateAccepted)
            and self.proposal is not None
            and (message.term, message.revision) == self.proposal.version
        ):
            self._accepted.add(host)
        if host in self._contacts:
            self._contacts[host] = now

    def _learn(self, state: JobState, attempt: int) -> None:
        """Continue from a newer state than this host's; a proposal is repeated in a later term."""
        self._attempt = max(self._attempt, attempt)
        newest = self.proposal or self._state
        if state.term > newest.term or (
            self.proposal is None and state.version > self._state.version
        ):
            self._state, self.proposal = state, None
        elif self.proposal is not None and attempt > self.proposal.attempt:
            # A host that knows of a later attempt: it is over, but its number is used.
            self._propose(replace(self.proposal, attempt=attempt))
        departed = {departure.host for departure in self._state.departures}
        self.has_failed |= self._number in departed

    def tick(self, now: float) -> None:
        """Perform the actions that are due."""
        if now - self._last_beat_at >= self._beat_seconds:
            self._last_beat_at = now
            self.orders.append((None, KeepAlive()))
        recent = {h for h, at in self._contacts.items() if now - at <= 3 * self._beat_seconds}
        if self.proposal is None and has_majority(self._state.electorates, {self._number, *recent}):
            state = self._state
            departures = {departure.host: departure for departure in state.departures}
            if state.coordinator != self._number:
                # The predecessor is the last one.
                loss = Departure(state.coordinator, self._loss)
                departures[state.coordinator] = departures.pop(state.coordinator, loss)
            electorate = {*state.electorates[-1]} - {state.coordinator} | {self._number}
            self._propose(
                replace(
                    state,
                    term=state.term + 1,
                    coordinator=self._number,
                    electorates=(*state.electorates, tuple(sorted(electorate))),
                    attempt=max(state.attempt, self._attempt),
                    departures=tuple(departures.values()),
                )
            )
        self.has_failed |= now > self._deadline and not self.is_elected

    def _propose(self, state: JobState) -> None:
        self.proposal = replace(state, revision=state.revision + 1)
        self._accepted = {self._number}
        self.orders.append((None, ShareJobState(self.proposal)))
