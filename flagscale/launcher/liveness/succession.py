"""Succession of coordinators: which host continues a job whose coordinator is lost. No I/O.

The coordinator shares the state of the job (:class:`~.messages.JobState`) with the agents of all
hosts. An agent that has lost the contact to it turns to the lowest-numbered remaining host, the
*candidate*. A host stands as candidate only once it has itself lost the coordinator; otherwise the
agent times out and tries the next number. The candidate asks the agents to accept a *proposal*: a
state of a later term, in which it is the coordinator. It takes over if a majority accepts.

The rules are Raft's, with joint consensus. An *electorate* is the set of hosts whose agents have a
vote: normally there is one, and two or more while it changes. Two coordinators never act at the
same time for longer than ``lost_host_timeout``, after which a coordinator that is cut off stops:

- An agent accepts one coordinator per term, and none of an earlier term.
- An agent accepts no proposal that continues an older state than its own, so that no accepted state
  is forgotten. A proposal is only a vote: it is no newer than the state that it continues.
- A candidate needs more than half of each electorate, and a coordinator the contact to at least
  half. So if one has what it needs, the other one has not, and ends its part of the job.
- A changed electorate is in force in addition to the previous ones, until enough hosts of all have
  accepted it.
- A host can vote only after it has accepted a state of a coordinator. An agent that was started
  again has no vote until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

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
"""Number of agents below which there is no majority without the coordinator, for checks of a plan.
:meth:`CoordinatorSearch.find_obstacle` decides during the run."""
MAX_CANDIDATES = 3
"""Number of hosts that an agent turns to, one after another. If none of them takes over, it ends
its part of the job, even if other hosts could."""
CANDIDACY_TIMEOUTS = 2
"""Multiple of ``lost_host_timeout`` after which a candidate without a majority gives up, so that
agents can turn to it that have tried another host before."""
CONTACT_BEATS = 3
"""Number of heartbeats without which a candidate does not expect the vote of a host any more. This
is less than ``lost_host_timeout``: hosts that accept a proposal without a majority cannot go back
to the previous coordinator."""

Electorates = Sequence[Collection[int]]


def has_majority(electorates: Electorates, hosts: Collection[int]) -> bool:
    """Return True if the hosts are more than half of each electorate."""
    return all(2 * len({*hosts}.intersection(e)) > len(e) for e in electorates)


def has_half(electorates: Electorates, hosts: Collection[int]) -> bool:
    """Return True if the hosts are at least half of each electorate."""
    return all(2 * len({*hosts}.intersection(e)) >= len(e) for e in electorates)


def can_accept(state: JobState, current: JobState) -> bool:
    """Return True if a host that has accepted ``current`` may accept ``state``.

    As in Raft, there is one coordinator per term, no way back to an earlier term, and no vote for a
    candidate that would continue an older state.
    """
    if state.term == current.term and state.coordinator != current.coordinator:
        return False
    return state.term >= current.term and state.origin >= current.origin


class SharedState:
    """The coordinator's record of the state that it shares, and of the hosts that accepted it.

    Args:
        state: State of a new job, or the proposal with which the coordinator was elected.
    """

    def __init__(self, state: JobState) -> None:
        # A successor's first state is newer than its proposal, which other candidates may ignore.
        self.state = replace(state, revision=state.revision + 1, origin_term=None)
        self._number = state.coordinator
        self._accepted = {self._number}
        # Electorates in force, to which a changed one is added.
        self._electorates = state.electorates

    @property
    def is_accepted(self) -> bool:
        """True if enough hosts have accepted the state since it has changed."""
        return has_half(self.state.electorates, self._accepted)

    def record_acceptance(self, host: int, message: JobStateAccepted) -> None:
        """Record that a host has accepted a state."""
        if (message.term, message.revision) == self.state.version:
            self._accepted.add(host)

    def update(self, hosts: Iterable[int], state: JobState) -> bool:
        """Set the state to share, with these hosts, the coordinator included, as the electorate.

        Term, revision, coordinator and electorates of ``state`` are ignored.

        Returns:
            True if the state is new, and has to be sent to all hosts.
        """
        if self.is_accepted:
            self._electorates = self.state.electorates[-1:]
        electorate = tuple(sorted(hosts))
        electorates = self._electorates
        if electorate != electorates[-1]:
            electorates = (*electorates, electorate)
        current = self.state
        updated = replace(
            state,
            term=current.term,
            revision=current.revision,
            coordinator=self._number,
            electorates=electorates,
            origin_term=None,
        )
        if updated == current:
            return False
        self.state = updated
        self.require_acceptance_again()
        return True

    def require_acceptance_again(self) -> None:
        """Require that the hosts accept the state once more: acceptances so far may be old."""
        self.state = replace(self.state, revision=self.state.revision + 1)
        self._accepted = {self._number}

    def has_quorum(self, hosts: Collection[int]) -> bool:
        """Return True if the contact to these hosts, the coordinator included, suffices to
        coordinate the job.
        """
        return has_half(self.state.electorates, hosts)

    def could_elect(self, hosts: Collection[int]) -> bool:
        """Return True if these hosts could elect a successor, so that the coordinator may leave."""
        return has_majority(self.state.electorates, hosts)

    def summary(self) -> dict[str, int]:
        """Return the part of the job's summary by which readers of several hosts' summaries
        recognise the current coordinator's.
        """
        return {"term": self.state.term, "coordinator": self._number}


class CoordinatorSearch:
    """One agent's view of who coordinates the job.

    Args:
        number: Number of this host.
        host_count: Number of hosts.
    """

    def __init__(self, number: int, host_count: int) -> None:
        self.state: JobState | None = None
        """Newest state of the job that this agent has accepted: its vote, if it is a proposal."""
        self.target = 0
        """Number of the coordinator, or of the candidate that this agent has turned to."""
        self.is_searching = False
        """True from the loss of the coordinator until the state of another host is accepted."""
        self._number = number
        self._host_count = host_count
        self._candidates: list[int] = []

    def accept(self, state: JobState, sender: int) -> bool:
        """Accept a state from the coordinator or a candidate, which is followed from now on.

        Returns:
            False for a state that is invalid, not the sender's, or older than the accepted one, for
            that of a coordinator with a successor, and for a proposal if this host has no vote.
        """
        if sender != state.coordinator or not self._is_valid(state):
            return False
        if self.state is None:
            is_acceptable = state.origin_term is None
        else:
            is_acceptable = can_accept(state, self.state)
        if is_acceptable:
            self.state, self.target, self.is_searching = state, sender, False
        return is_acceptable

    def vote_for_own(self, proposal: JobState) -> None:
        """Accept this host's own proposal, and keep searching until it is elected."""
        self.state = proposal

    def _is_valid(self, state: JobState) -> bool:
        numbers = {*state.places, *(d.host for d in state.departures)}
        numbers.update(*state.electorates)
        return bool(state.electorates and state.places) and all(
            0 <= number < self._host_count for number in numbers
        )

    def begin_search(self) -> bool:
        """Begin the search after the loss of the coordinator; return False if there can be no
        successor that this host could follow.
        """
        self._candidates = self.list_candidates()
        self.is_searching = self.turn_to_next_candidate()
        return self.is_searching

    def find_obstacle(self) -> str:
        """Return the reason why this host could follow no successor, or an empty string."""
        state = self.state
        if state is None:
            return "it has not received the state of the job yet"
        if not any(self._number in electorate for electorate in state.electorates):
            return "it has no vote"
        left = self._find_left_hosts(state)
        # Each electorate without those hosts must still be a majority.
        if not all(has_majority([e], {*e} - left) for e in state.electorates):
            return "the agents that are left are not more than half of them"
        return ""

    def list_candidates(self) -> list[int]:
        """Return the hosts that this one would turn to without the coordinator, in order; none if
        they could have no majority.

        A host in only one of two electorates votes, but is no candidate: it may have no vote in the
        end, and hosts with an older state would not turn to it.
        """
        state = self.state
        if state is None or self.find_obstacle():
            return []
        voters = set.intersection(*({*electorate} for electorate in state.electorates))
        return sorted(voters - self._find_left_hosts(state))[:MAX_CANDIDATES]

    def _find_left_hosts(self, state: JobState) -> set[int]:
        """Return the hosts that do not vote any more: those that have left the job, and the
        coordinator or candidate that this agent has lost.
        """
        return {state.coordinator, *(departure.host for departure in state.departures)}

    @property
    def is_first_remaining(self) -> bool:
        """True if no host with a lower number is left without the coordinator."""
        state = self.state
        if state is None:
            return self._number == 1
        left = self._find_left_hosts(state)
        return self._number == min({*chain(*state.electorates)} - left, default=-1)

    def turn_to_next_candidate(self) -> bool:
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
    order), unless there is an ``obstacle``.

    Args:
        number: Number of this host.
        state: Newest state of the job that this host has accepted.
        job_attempt: Attempt of the job that this host has started last.
        describe_loss: Returns the loss of a coordinator, by its number.
        now: Time in seconds, as in all methods.
        timeout: ``lost_host_timeout``.
        beat_seconds: Interval of heartbeats.
    """

    def __init__(
        self,
        number: int,
        state: JobState,
        job_attempt: int,
        describe_loss: Callable[[int], Failure],
        now: float,
        timeout: float,
        beat_seconds: float,
    ) -> None:
        self.orders: list[tuple[int | None, Order]] = []
        self.stop_signals: list[tuple[int, StopSignalled]] = []
        """Stop signals of hosts, for the coordinator that this host may become. Other messages are
        dropped: heartbeats repeat what they contain."""
        self.proposal: JobState | None = None
        """State of a later term, once a majority of the hosts is here. One that is overtaken is
        dropped; :meth:`tick` proposes anew in a later term."""
        self.obstacle = ""
        """Reason why this host cannot become the coordinator any more; empty while it can."""
        self._number = number
        self._state = state  # newest state of a coordinator that any contact has accepted
        self._term = state.term  # highest term that any contact has voted in
        self._job_attempt = job_attempt
        self._describe_loss = describe_loss
        self._deadline = now + CANDIDACY_TIMEOUTS * timeout
        self._beat_seconds = beat_seconds
        self._last_beat_at = now
        self._contacts: dict[int, float] = {}  # hosts with a vote, and times of their last messages
        self._accepted = {number}

    @property
    def is_elected(self) -> bool:
        """True if this host is the coordinator, with ``proposal`` as the state of the job."""
        return self.proposal is not None and has_majority(self.proposal.electorates, self._accepted)

    @property
    def has_contacts(self) -> bool:
        """True if any other host with a vote has turned to this one."""
        return bool(self._contacts)

    def extend(self, seconds: float, now: float) -> None:
        """Extend the timeouts by a time in which this process itself did not run."""
        self._deadline += seconds
        self._contacts = {host: min(at + seconds, now) for host, at in self._contacts.items()}

    def receive(self, host: int, message: HostMessage, now: float) -> None:
        """Process a message of a host that has turned to this one."""
        if isinstance(message, StopSignalled):
            self.stop_signals.append((host, message))
        elif isinstance(message, Hello):
            self._receive_hello(host, message, now)
        elif (
            isinstance(message, JobStateAccepted)
            and self.proposal is not None
            and (message.term, message.revision) == self.proposal.version
            and host in self._contacts
        ):
            self._accepted.add(host)
        if host in self._contacts:
            self._contacts[host] = now

    def _receive_hello(self, host: int, message: Hello, now: float) -> None:
        if message.job_state is None:  # an agent that was started again has no vote
            self._contacts.pop(host, None)
            return
        self._contacts[host] = now
        self._learn(message.job_state, message.attempt)
        if self.proposal is not None:
            self.orders.append((host, ShareJobState(self.proposal)))

    def _learn(self, state: JobState, job_attempt: int) -> None:
        """Continue from the newest state, in a term that no host has voted in yet."""
        self._term = max(self._term, state.term)
        # That later attempt has ended with the coordinator, but its number must not be used again.
        self._job_attempt = max(self._job_attempt, job_attempt, state.attempt)
        if state.origin > self._state.origin:
            self._state = state
        if self.proposal is not None and (
            not can_accept(self.proposal, state) or self.proposal.attempt < self._job_attempt
        ):
            self.proposal = None
        if any(departure.host == self._number for departure in self._state.departures):
            self.obstacle = "the job has gone on without it before"

    def tick(self, now: float) -> None:
        """Perform the actions that are due."""
        if now > self._deadline and not self.is_elected:
            self.obstacle = self.obstacle or "it has no contact to more than half of the agents"
        if self.obstacle:
            return
        if now - self._last_beat_at >= self._beat_seconds:
            self._last_beat_at = now
            self.orders.append((None, KeepAlive()))
        contact_seconds = CONTACT_BEATS * self._beat_seconds
        recent = {host for host, at in self._contacts.items() if now - at <= contact_seconds}
        if self.proposal is None and has_majority(self._state.electorates, {self._number, *recent}):
            self._propose()

    def _propose(self) -> None:
        state = self._state
        self._term += 1
        departures = {departure.host: departure for departure in state.departures}
        # A candidate whose proposal this host has accepted has not coordinated the job.
        predecessor = state.coordinator if state.origin_term is None else self._number
        if predecessor != self._number:
            loss = Departure(predecessor, self._describe_loss(predecessor))
            # The coordinator takes the last departure for that of its predecessor.
            departures[predecessor] = departures.pop(predecessor, loss)
        origin_term, revision = state.origin
        self.proposal = replace(
            state,
            term=self._term,
            revision=revision,
            origin_term=origin_term,
            coordinator=self._number,
            attempt=max(state.attempt, self._job_attempt),
            departures=tuple(departures.values()),
        )
        self._accepted = {self._number}
        self.orders.append((None, ShareJobState(self.proposal)))
