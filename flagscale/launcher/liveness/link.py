"""One agent's link to the job's coordinator, and the succession when it is lost. No I/O.

The agent passes what its connections receive, and calls :meth:`CoordinatorLink.check` periodically.
The link decides whose orders are followed, and creates the coordinator if this host becomes it.

It ends this host's ranks as soon as the coordinator is lost, before there is a successor: a host
that is cut off cannot know when a successor starts them elsewhere. A host ends its part of the job
for good if no candidate takes over, or if it is itself the candidate and gets no majority, even if
a later candidate wins. A candidate that cannot listen turns to the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.liveness.coordinator import Coordinator
from flagscale.launcher.liveness.diagnosis import Failure, host_failure
from flagscale.launcher.liveness.job import Notice, describe_mesh_position, explain_missing_agents
from flagscale.launcher.liveness.messages import (
    HandOver,
    Hello,
    HostMessage,
    JobState,
    JobStateAccepted,
    Order,
    ShareJobState,
)
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.liveness.succession import Candidacy, CoordinatorSearch


class Connections(Protocol):
    """Connections of this host to others, by their numbers."""

    @property
    def numbers(self) -> AbstractSet[int]:
        """Hosts that this one connects to, or tries to."""

    def resolve(self, number: int) -> None:
        """Look up and keep the address of a host now; the name server may be unreachable when it is
        needed. Blocks, so that heartbeats wait for a slow name server.
        """

    def connect(self, number: int) -> None:
        """Connect to a host, and reconnect, until :meth:`disconnect` is called."""

    def disconnect(self, number: int) -> None:
        """Close the connection to a host."""

    def send_message(self, number: int, message: HostMessage) -> None:
        """Send a message to a host, if it is connected."""

    def listen(self) -> None:
        """Accept connections of the other hosts.

        Raises:
            OSError: If that is impossible.
        """

    def stop_listening(self) -> None:
        """Close the port, and the connections of the other hosts."""

    def send_order(self, number: int | None, order: Order) -> None:
        """Send an order to a host that has connected, or to all."""


class NoConnections:
    """Connections of the only host of a run."""

    numbers: frozenset[int] = frozenset()

    def resolve(self, number: int) -> None: ...

    def connect(self, number: int) -> None: ...

    def disconnect(self, number: int) -> None: ...

    def send_message(self, number: int, message: HostMessage) -> None: ...

    def listen(self) -> None: ...

    def stop_listening(self) -> None: ...

    def send_order(self, number: int | None, order: Order) -> None: ...


class LinkedMember(Protocol):
    """State of this host's ranks: the part of :class:`.member.Member` that the link uses."""

    attempt_number: int
    has_given_up: bool
    job_finished: bool

    @property
    def ranks_joined(self) -> bool:
        """True if the ranks of all hosts have joined, or will not join any more."""

    def hello(self, job_state: JobState | None = None) -> Hello:
        """Return the first message on a connection, and repeat a stop signal after it."""

    def confirm_state(self, state: JobState) -> JobStateAccepted:
        """Return the reply to a state that this host has accepted."""

    def end_ranks_until_successor(self, failure: Failure) -> None:
        """End the ranks of this host; a successor may start them again."""

    def end_job_without_coordinator(self, failure: Failure) -> None:
        """End everything on this host for good."""


class CoordinatorLink:
    """Link of one agent, from its start until the end of the job.

    Args:
        number: Number of this host.
        options: Options of this host's agent.
        member: State of this host's ranks.
        connections: Its connections.
        create_coordinator: Creates the coordinator on this host, from a time and a state.
        output: Output file of this host.
        now: Time in seconds of the monotonic clock, as in all methods.
    """

    def __init__(
        self,
        number: int,
        options: AgentOptions,
        member: LinkedMember,
        connections: Connections,
        create_coordinator: Callable[[float, JobState | None], Coordinator],
        output: Path,
        now: float,
    ) -> None:
        self.coordinator: Coordinator | None = None
        """The coordinator, if it is on this host."""
        self.notices: list[Notice] = []
        """Notices for notifications, which the caller removes."""
        self.was_reached = False
        """True if a coordinator has ever been reached."""
        self.followed_host: int | None = 0
        """Number of the host whose orders are followed; None while there is none. During a search,
        ``_search.target`` is the candidate, which is not followed yet."""
        self._number = number
        self._options = options
        self._member = member
        self._connections = connections
        self._create_coordinator = create_coordinator
        self._output = output
        self._search: CoordinatorSearch | None = None
        self._candidacy: Candidacy | None = None
        if options.addresses:
            # Other hosts could coordinate the job. No orders are followed before the first state:
            # only then this host knows who coordinates, and can vote.
            self._search = CoordinatorSearch(number, len(options.names))
            self.followed_host = None
        self._silent_since = now
        self._joined_without_contact = False
        self._loss = host_failure(options.master_name, "", output)
        self._losses: dict[int, Failure] = {}  # of coordinators and candidates, by number
        self._candidate_has_responded = False
        self._target_was_reached = False

    def start_coordinator(self, now: float) -> None:
        """Create the coordinator of a new job."""
        self.coordinator = self._create_coordinator(now, None)
        self.followed_host = self._number

    def excuse_pause(self, seconds: float, now: float) -> None:
        """Extend the timeouts by a time in which this process itself did not run."""
        self._silent_since += seconds
        if self._candidacy is not None:
            self._candidacy.extend(seconds, now)

    # -- messages ---------------------------------------------------------------------------

    def receive_message(self, host: int, message: HostMessage, now: float) -> None:
        """Process a message of a host that has connected to this one."""
        receiver = self.coordinator or self._candidacy
        if receiver is not None:
            receiver.receive(host, message, now)

    def send_messages(self, messages: Sequence[HostMessage], now: float) -> None:
        """Send this host's messages, also to a coordinator in this process."""
        for message in messages:
            if self.coordinator is not None:
                self.coordinator.receive(self._number, message, now)
            for number in self._connections.numbers:
                self._connections.send_message(number, message)

    def send_hello(self, number: int, now: float) -> None:
        """Send the first message on a new connection to a host."""
        is_target = self._search is None or number == self._search.target
        if is_target and not self._target_was_reached:
            # An authenticated coordinator or candidate has to respond from now on, even if it has
            # not sent an order yet. A later connection alone is no sign of life.
            self._silent_since, self.was_reached, self._target_was_reached = now, True, True
        job_state = self._search.state if self._search is not None else None
        self._connections.send_message(number, self._member.hello(job_state))

    def receive_order(self, number: int, order: Order, now: float) -> Order | None:
        """Process an order of a host that is the coordinator, or was it, or wants to be.

        Returns:
            The order, if this host has to follow it.
        """
        if number not in self._connections.numbers:  # left over from a host no longer followed
            return None
        if isinstance(order, ShareJobState):
            if self._search is not None and self._search.accept(order.job_state, number):
                self._silent_since, self.was_reached = now, True
                self._follow(number)
                for candidate in self._search.list_candidates():
                    self._connections.resolve(candidate)
                message = self._member.confirm_state(order.job_state)
                self._connections.send_message(number, message)
        elif number == self.followed_host and isinstance(order, HandOver):
            # From a coordinator that is sick and leaves the job.
            self._loss = order.loss
            self._losses[number] = order.loss
            self._begin_search(now)
        elif number == self.followed_host:
            self._silent_since, self.was_reached = now, True
            return order
        elif self._search is not None and number == self._search.target:
            self._silent_since = now
            self._candidate_has_responded = True
        return None

    def _follow(self, number: int) -> None:
        """Follow the orders of a host from now on, and of no other one."""
        if self._candidacy is not None:
            self._end_candidacy()
        self.followed_host = number
        self._disconnect_others(number)

    def _disconnect_others(self, number: int | None = None) -> None:
        for other in self._connections.numbers - {number}:
            self._connections.disconnect(other)

    # -- loss -------------------------------------------------------------------------------

    def check(self, now: float) -> bool:
        """Perform the actions that are due without a coordinator.

        Returns:
            True if this host has just noticed that the coordinator is lost: a hardware check has to
            end. A coordinator that hands over has ended it before.
        """
        member, options = self._member, self._options
        if self.coordinator is not None or member.has_given_up or member.job_finished:
            return False
        if self._search is not None and self._search.is_searching:
            self._continue_search(self._search, now)
            return False
        if not self.was_reached and not self._joined_without_contact and member.ranks_joined:
            # Ranks have joined, so the coordinator has been running: it has to respond from now on.
            self._joined_without_contact, self._silent_since = True, now
        response_required = self.was_reached or self._joined_without_contact
        limit_seconds = options.lost_host_timeout if response_required else options.start_timeout
        if now - self._silent_since <= limit_seconds:
            return False
        self._loss = self._describe_loss(limit_seconds, was_reached=response_required)
        if response_required:
            self._losses[self._target] = self._loss
            self._begin_search(now)
        else:
            self._end_job("", notifies=self._number == 1)
        return True

    @property
    def _target(self) -> int:
        return 0 if self._search is None else self._search.target

    def _begin_search(self, now: float) -> None:
        """Look for a successor of the coordinator, and end this host's ranks until there is one."""
        if self._search is None:
            # Host 0, which sends notifications otherwise, cannot.
            self._end_job("", notifies=self._number == 1)
        elif self._search.begin_search():
            log_line(
                f"{self._loss.headline()}; the ranks of this host end until another one coordinates"
            )
            self._member.end_ranks_until_successor(self._loss)
            self.followed_host = None
            self._candidate_has_responded = False
            self._turn_to_candidate(self._search, now)
        else:
            # Every remaining host comes to this conclusion.
            obstacle = self._search.find_obstacle() or "no host could take over"
            self._end_job(obstacle, notifies=self._search.is_first_remaining)

    def _describe_loss(self, seconds: float, *, was_reached: bool) -> Failure:
        options = self._options
        if was_reached:
            reason = f"was lost: no word from its agent for {seconds:g} s"
        else:
            reason = f"was not reached within {seconds:g} s of the start"
            reason += explain_missing_agents(options.liveness_port)
        if self._target == 0:  # meshes have no succession
            reason += describe_mesh_position(options.master_place)
        name = options.master_name if self._search is None else options.names[self._target]
        return host_failure(name, reason, self._output)

    def _find_loss(self, number: int) -> Failure:
        """Return the loss of a coordinator, which this host may have heard of by others only."""
        reason = "was lost: the agents that are left have no contact to it"
        name = self._options.names[number]
        return self._losses.get(number) or host_failure(name, reason, self._output)

    def _end_job(self, obstacle: str, *, notifies: bool) -> None:
        """End this host's part of the job for good, because there is no coordinator.

        Args:
            obstacle: Reason why this host follows no successor.
            notifies: True if this host sends the notification of the end. It cannot know that the
                job has not gone on elsewhere.
        """
        remark = f"; this host does not follow a successor: {obstacle}" if obstacle else ""
        failure = replace(self._loss, reason=self._loss.reason + remark)
        log_line(f"{failure.headline()}; the job of this host ends")
        self._member.end_job_without_coordinator(failure)
        if notifies:
            self.notices.append(Notice("failed", self._member.attempt_number, failure))

    # -- succession -------------------------------------------------------------------------

    def _turn_to_candidate(self, search: CoordinatorSearch, now: float) -> None:
        """Connect to the host that may become the coordinator, or stand as it."""
        assert search.state is not None  # otherwise there is no candidate
        self._silent_since, self._target_was_reached = now, False
        previous = search.state.coordinator
        has_left = any(departure.host == previous for departure in search.state.departures)
        # Keep the connection to the previous coordinator: it may come back, and is followed again.
        self._disconnect_others(None if has_left else previous)
        if not search.is_candidate:
            self._connections.connect(search.target)
            return
        try:
            self._connections.listen()
        except OSError as error:
            # Not `error.strerror`, which includes the address.
            reason = os.strerror(error.errno) if error.errno else str(error)
            port = self._options.liveness_port
            log_line(f"this host cannot coordinate the run: port {port}: {reason}")
            # So that the next check turns to the next candidate.
            self._silent_since -= self._options.lost_host_timeout
            return
        self._candidacy = Candidacy(
            self._number,
            search.state,
            self._member.attempt_number,
            self._find_loss,
            now,
            self._options.lost_host_timeout,
            self._options.beat_seconds,
        )

    def _continue_search(self, search: CoordinatorSearch, now: float) -> None:
        if self._candidacy is not None:
            self._continue_candidacy(self._candidacy, search, now)
        elif now - self._silent_since <= self._options.lost_host_timeout:
            return
        elif search.turn_to_next_candidate():
            self._turn_to_candidate(search, now)
        else:
            self._end_job("no candidate has taken over", notifies=False)

    def _continue_candidacy(
        self, candidacy: Candidacy, search: CoordinatorSearch, now: float
    ) -> None:
        candidacy.tick(now)
        if candidacy.obstacle:
            # A host without contact to any other is more likely cut off than the only one left.
            # Hosts that have turned to an earlier candidate leave the notification to it.
            notifies = candidacy.has_contacts and not self._candidate_has_responded
            self._end_candidacy()
            self._end_job(candidacy.obstacle, notifies=notifies)
            return
        orders, candidacy.orders = candidacy.orders, []
        for host, order in orders:
            if isinstance(order, ShareJobState):
                # This host has voted: it does not go back to the previous coordinator.
                search.vote_for_own(order.job_state)
                self._disconnect_others()
            self._connections.send_order(host, order)
        if candidacy.is_elected and candidacy.proposal is not None:
            search.accept(candidacy.proposal, self._number)
            self._candidacy, self.followed_host = None, self._number
            self.coordinator = self._create_coordinator(now, candidacy.proposal)
            # The coordinator sends its first state to all. It learns from the heartbeats of the
            # hosts what the candidacy has dropped.
            for host, message in candidacy.stop_signals:
                self.coordinator.receive(host, message, now)
            # This may add a stop signal that this host has got in the meantime.
            self.coordinator.receive(self._number, self._member.hello(), now)

    def _end_candidacy(self) -> None:
        self._candidacy = None
        self._connections.stop_listening()
