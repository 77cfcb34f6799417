"""One agent's link to the job's coordinator, and the succession when it is lost. No I/O.

The agent passes what its connections receive, and calls :meth:`CoordinatorLink.check` periodically.
The link decides whose orders are followed, ends this host's ranks without a coordinator, and
creates the coordinator if this host becomes it.
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

_NO_SUCCESSOR = (
    "; no other host takes over the run, because this one has no contact to more than half of the "
    "agents"
)


class Connections(Protocol):
    """Connections of this host to others, by their numbers."""

    @property
    def numbers(self) -> AbstractSet[int]:
        """Hosts that this one connects to, or tries to."""

    def resolve(self, number: int) -> None:
        """Look up the address of a host, which may be impossible when it is needed."""

    def connect(self, number: int) -> None:
        """Connect to a host, until :meth:`disconnect` is called."""

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
        """Close the connections of the other hosts."""

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
    """Part of :class:`.member.Member` that the link uses."""

    attempt_number: int
    coordinator_lost: bool
    job_finished: bool

    @property
    def ranks_joined(self) -> bool: ...

    def hello(self, job_state: JobState | None = None) -> Hello: ...

    def confirm_state(self, state: JobState) -> JobStateAccepted: ...

    def heartbeat(self) -> HostMessage: ...

    def end_without_coordinator(self, failure: Failure) -> None: ...

    def lose_coordinator(self, failure: Failure) -> None: ...


class CoordinatorLink:
    """Link of one agent, from its start until the end of the job.

    Args:
        number: Number of this host.
        options: Options of this host's agent.
        member: This host's part of the job.
        connections: Its connections.
        create_coordinator: Creates the coordinator on this host, from a time and a state.
        output: Output file of this host.
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
        self.is_reached = False
        """True if a coordinator has ever been reached."""
        self.leader: int | None = 0
        """Number of the host whose orders are followed; None while there is none."""
        self._number = number
        self._options = options
        self._member = member
        self._connections = connections
        self._create_coordinator = create_coordinator
        self._output = output
        self._search: CoordinatorSearch | None = None
        self._candidacy: Candidacy | None = None
        if options.addresses:
            self._search = CoordinatorSearch(number, len(options.names))
            self.leader = None
        self._last_order_at = now
        self._ranks_joined = False
        self._loss = host_failure(options.master_name, "", output)

    def coordinate(self, now: float) -> None:
        """Create the coordinator of a new job."""
        self.coordinator, self.leader = self._create_coordinator(now, None), self._number

    def extend(self, seconds: float) -> None:
        """Extend the timeout by a time in which this process itself did not run."""
        self._last_order_at += seconds

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

    def greet(self, number: int, now: float) -> None:
        """Send the first message on a new connection to a host."""
        if self._search is None or number == self._search.target:
            # An authenticated coordinator has to respond from now on, even if it has not sent an
            # order yet.
            self._last_order_at, self.is_reached = now, True
        job_state = self._search.state if self._search is not None else None
        self._connections.send_message(number, self._member.hello(job_state))

    def receive_order(self, number: int, order: Order, now: float) -> Order | None:
        """Process an order of a host that is the coordinator, or was it, or wants to be.

        Returns:
            The order, if this host has to follow it.
        """
        if number not in self._connections.numbers:  # another one is followed since
            return None
        if isinstance(order, ShareJobState):
            if self._search is not None and self._search.accept(order.job_state, number):
                self._last_order_at, self.is_reached = now, True
                self._follow(number)
                for candidate in self._search.list_candidates():
                    self._connections.resolve(candidate)
                message = self._member.confirm_state(order.job_state)
                self._connections.send_message(number, message)
        elif number == self.leader and isinstance(order, HandOver):
            self._loss = order.loss
            self._begin_search(now)
        elif number == self.leader:
            self._last_order_at, self.is_reached = now, True
            return order
        elif self._search is not None and number == self._search.target:
            self._last_order_at = now
        return None

    def _follow(self, number: int) -> None:
        """Follow the orders of a host from now on, and of no other one."""
        if self._candidacy is not None:
            self._end_candidacy()
        self.leader = number
        self._disconnect_others(number)

    def _disconnect_others(self, number: int | None = None) -> None:
        for other in self._connections.numbers - {number}:
            self._connections.disconnect(other)

    # -- loss -------------------------------------------------------------------------------

    def check(self, now: float) -> bool:
        """Perform the actions that are due without a coordinator.

        Returns:
            True if the coordinator was lost just now.
        """
        member, options = self._member, self._options
        if self.coordinator is not None or member.coordinator_lost or member.job_finished:
            return False
        if self._search is not None and self._search.is_searching:
            self._continue_search(self._search, now)
            return False
        if not self.is_reached and not self._ranks_joined and member.ranks_joined:
            # Ranks have joined, so the coordinator has been running: it has to respond from now on.
            self._ranks_joined, self._last_order_at = True, now
        response_required = self.is_reached or self._ranks_joined
        limit_seconds = options.lost_host_timeout if response_required else options.start_timeout
        if now - self._last_order_at <= limit_seconds:
            return False
        self._loss = self._describe_loss(limit_seconds, was_reached=response_required)
        if response_required:
            self._begin_search(now)
        else:
            self._end_job()
        return True

    def _begin_search(self, now: float) -> None:
        """Look for a successor of the coordinator, and end this host's ranks until there is one."""
        if self._search is None:
            self._end_job()
        elif self._search.begin():
            log_line(
                f"{self._loss.headline()}; the ranks of this host end until another one coordinates"
            )
            self._member.end_without_coordinator(self._loss)
            self.leader = None
            self._turn_to_candidate(self._search, now)
        else:
            self._end_job(_NO_SUCCESSOR)

    def _describe_loss(self, seconds: float, *, was_reached: bool) -> Failure:
        options = self._options
        number = 0 if self._search is None else self._search.target
        if was_reached:
            reason = f"was lost: no word from its agent for {seconds:g} s"
        else:
            reason = f"was not reached within {seconds:g} s of the start"
            reason += explain_missing_agents(options.liveness_port)
        if number == 0:
            reason += describe_mesh_position(options.master_place)
        name = options.names[number] if self._search is not None else options.master_name
        return host_failure(name, reason, self._output)

    def _end_job(self, remark: str = "") -> None:
        """End this host's part of the job for good, because there is no coordinator."""
        failure = replace(self._loss, reason=self._loss.reason + remark)
        log_line(f"{failure.headline()}; the job of this host ends")
        self._member.lose_coordinator(failure)
        if self._number == 1:
            # Host 0, which sends notifications otherwise, cannot.
            self.notices.append(Notice("failed", self._member.attempt_number, failure))

    # -- succession -------------------------------------------------------------------------

    def _turn_to_candidate(self, search: CoordinatorSearch, now: float) -> None:
        """Connect to the host that may become the coordinator, or stand as it."""
        if search.state is None:
            return
        self._last_order_at = now
        previous = search.state.coordinator
        has_left = any(departure.host == previous for departure in search.state.departures)
        # A previous coordinator that was lost may be there again.
        self._disconnect_others(None if has_left else previous)
        if not search.is_candidate:
            self._connections.connect(search.target)
            return
        try:
            self._connections.listen()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            port = self._options.liveness_port
            log_line(f"this host cannot coordinate the run: port {port}: {reason}")
            self._last_order_at -= self._options.lost_host_timeout
            return
        self._candidacy = Candidacy(
            self._number,
            search.state,
            self._member.attempt_number,
            self._loss,
            now,
            self._options.lost_host_timeout,
            self._options.beat_seconds,
        )

    def _continue_search(self, search: CoordinatorSearch, now: float) -> None:
        if self._candidacy is not None:
            self._continue_candidacy(self._candidacy, search, now)
        elif now - self._last_order_at <= self._options.lost_host_timeout:
            return
        elif search.turn():
            self._turn_to_candidate(search, now)
        else:
            self._end_job(_NO_SUCCESSOR)

    def _continue_candidacy(
        self, candidacy: Candidacy, search: CoordinatorSearch, now: float
    ) -> None:
        candidacy.tick(now)
        orders, candidacy.orders = candidacy.orders, []
        for host, order in orders:
            if isinstance(order, ShareJobState):
                # This host has voted: it does not go back to the previous coordinator.
                search.state = order.job_state
                self._disconnect_others()
            self._connections.send_order(host, order)
        if candidacy.is_elected and candidacy.proposal is not None:
            search.accept(candidacy.proposal, self._number)
            self._candidacy, self.leader = None, self._number
            self.coordinator = self._create_coordinator(now, candidacy.proposal)
            for host, message in candidacy.messages:
                self.coordinator.receive(host, message, now)
            self.coordinator.receive(self._number, self._member.heartbeat(), now)
        elif candidacy.has_failed:
            self._end_candidacy()
            self._end_job(_NO_SUCCESSOR)

    def _end_candidacy(self) -> None:
        self._candidacy = None
        self._connections.stop_listening()
