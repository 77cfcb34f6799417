"""Simulated agents of a run, whose links to each other can be cut, without processes or sockets."""

from __future__ import annotations

import errno
import signal
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagscale.launcher.liveness.coordinator import Coordinator
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.link import CoordinatorLink
from flagscale.launcher.liveness.messages import (
    AttemptEnded,
    EndAttempt,
    FinishJob,
    Heartbeat,
    Hello,
    HostMessage,
    HostProgress,
    JobPhase,
    JobState,
    JobStateAccepted,
    Order,
    ShareJobState,
    StartAttempt,
    StopJob,
    StopSignalled,
)
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.liveness.succession import SharedState
from support.liveness_job import PROGRESS, SPARE

TIMEOUT_SECONDS = 10.0
TICK_SECONDS = 0.25
END_SECONDS = 2.0
"""Time that ranks take to end."""


@dataclass
class SimulatedMember:
    """Ranks of a host: they run until they are ended, and start by order."""

    number: int
    is_spare: bool
    attempt_number: int = 0
    has_given_up: bool = False
    job_finished: bool = False
    ranks_joined: bool = True
    is_running: bool = True
    ends_at: float | None = None
    failure: Failure | None = None
    is_stopped: bool = False
    outgoing: list[HostMessage] = field(default_factory=list)
    now: float = 0.0
    steps: int = 0

    @property
    def is_over(self) -> bool:
        is_ending = self.has_given_up or self.job_finished or self.is_stopped
        return not self.is_running and is_ending

    def progress(self) -> HostProgress:
        if self.is_spare:
            return replace(PROGRESS, **SPARE)
        code = None if self.is_running else 1
        return replace(PROGRESS, progress_count=self.steps, exit_code=code)

    def _fields(self) -> tuple[int, int, float]:
        return self.number, self.attempt_number, self.now

    def hello(self, job_state: JobState | None = None) -> Hello:
        if self.is_stopped:
            self.outgoing.append(StopSignalled(*self._fields(), signal.SIGTERM, None))
        return Hello(*self._fields(), self.progress(), job_state)

    def stop(self) -> None:
        """Get a signal that stops the job."""
        self.is_stopped = True
        self.outgoing.append(StopSignalled(*self._fields(), signal.SIGTERM, None))
        self._end()

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(*self._fields(), self.progress())

    def confirm_state(self, state: JobState) -> JobStateAccepted:
        return JobStateAccepted(*self._fields(), *state.version)

    def end_ranks_until_successor(self, failure: Failure) -> None:
        self.failure = failure
        self._end()

    def end_job_without_coordinator(self, failure: Failure) -> None:
        self.has_given_up = True
        self.end_ranks_until_successor(failure)

    def _end(self) -> None:
        if self.is_running and self.ends_at is None:
            self.ends_at = self.now + END_SECONDS

    def follow(self, order: Order) -> None:
        match order:
            case FinishJob() | StopJob():
                self.job_finished = True
                self._end()
            case EndAttempt() if order.attempt == self.attempt_number:
                self._end()
            case StartAttempt() if order.attempt > self.attempt_number and not self.is_running:
                if self.number in order.places:
                    self.is_spare, self.is_running = False, True
                    self.attempt_number = order.attempt

    def tick(self, now: float) -> None:
        self.now = now
        self.steps += self.is_running
        if self.ends_at is not None and now >= self.ends_at:
            self.is_running, self.ends_at = False, None
            self.outgoing.append(AttemptEnded(*self._fields(), self.progress()))


class SharedHistory:
    """States that coordinators have shared, with checks that none is forgotten that enough hosts
    have accepted, and that the job is continued after hosts that have coordinated it.
    """

    def __init__(self) -> None:
        self._coordinators: dict[int, int] = {}
        self._continued: dict[int, tuple[int, int]] = {}
        self._accepted: dict[int, int] = {}

    def record_coordinator(self, number: int, state: JobState | None) -> None:
        """Record a new coordinator, and the state that it continues."""
        term = 0 if state is None else state.term
        assert self._coordinators.setdefault(term, number) == number, "two in one term"
        if state is None:
            return
        self._continued[term] = state.origin
        assert state.departures[-1].host in self._coordinators.values(), "it never coordinated"
        for departure in state.departures:
            assert departure.loss.host == f"h{departure.host}"

    def record_state(self, shared: SharedState | None) -> None:
        """Record the state that a coordinator shares now."""
        if shared is not None and shared.is_accepted:
            term, revision = shared.state.version
            self._accepted[term] = max(self._accepted.get(term, 0), revision)
        for later, origin in self._continued.items():
            for term, revision in self._accepted.items():
                assert term >= later or (term, revision) <= origin, "a state was forgotten"


class SimulatedAgent:
    """One agent, and its end of the connections."""

    def __init__(self, run: SimulatedRun, number: int, options: AgentOptions) -> None:
        self.run, self.number, self.options = run, number, options
        self.member = SimulatedMember(number, options.is_spare, is_running=not options.is_spare)
        self.is_listening = False
        self.is_frozen = self.has_power_cut = self.has_used_port = False
        self.clients: dict[int, bool] = {}
        """Hosts that this one connects to; True once it is connected."""
        self.inbox: list[tuple[str, int, Any]] = []
        self.last_beat_at = self.last_run_at = run.now
        self.link = CoordinatorLink(
            number, options, self.member, self, self._create_coordinator, Path("out"), run.now
        )
        if number == 0:
            self.link.start_coordinator(run.now)
            self.listen()
        else:
            self.connect(0)

    def _create_coordinator(self, now: float, job_state: JobState | None) -> Coordinator:
        options = self.options
        self.run.history.record_coordinator(self.number, job_state)
        return Coordinator(options, options.names, now, Path("out"), job_state=job_state)

    # -- connections ------------------------------------------------------------------------

    @property
    def numbers(self) -> AbstractSet[int]:
        return set(self.clients)

    def resolve(self, number: int) -> None: ...

    def connect(self, number: int) -> None:
        self.clients.setdefault(number, False)

    def disconnect(self, number: int) -> None:
        del self.clients[number]

    def send_message(self, number: int, message: HostMessage) -> None:
        if self.clients[number] and self.run.is_linked(self.number, number):
            self.run.agents[number].inbox.append(("message", self.number, message))

    def listen(self) -> None:
        if self.has_used_port:
            raise OSError(errno.EADDRINUSE, "in use")
        self.is_listening = True

    def stop_listening(self) -> None:
        self.is_listening = False
        for agent in self.run.agents:
            if self.number in agent.clients:
                agent.clients[self.number] = False

    def send_order(self, number: int | None, order: Order) -> None:
        for agent in self.run.agents:
            is_receiver = number in (None, agent.number) and agent.clients.get(self.number)
            if is_receiver and self.run.is_linked(self.number, agent.number):
                agent.inbox.append(("order", self.number, order))

    # -- time -------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return not self.has_power_cut and not self.member.is_over

    @property
    def has_ranks(self) -> bool:
        return not self.has_power_cut and self.member.is_running

    def step(self, now: float) -> None:
        """Do what an agent does in one round of its loop."""
        if self.is_frozen or not self.is_alive:
            return
        if now - self.last_run_at > 2 * self.options.beat_seconds:
            self.link.excuse_pause(now - self.last_run_at, now)
        self.last_run_at = now
        self.member.now = now
        for number, is_connected in list(self.clients.items()):
            if not is_connected and self.run.accepts(number, self.number):
                self.clients[number] = True
                self.link.send_hello(number, now)
        inbox, self.inbox = self.inbox, []
        for kind, number, content in inbox:
            if kind == "message":
                self.link.receive_message(number, content, now)
            elif (order := self.link.receive_order(number, content, now)) is not None:
                self.member.follow(order)
        self.link.check(now)
        self.member.tick(now)
        if now - self.last_beat_at >= self.options.beat_seconds:
            self.last_beat_at = now
            self.member.outgoing.append(self.member.heartbeat())
        messages, self.member.outgoing = self.member.outgoing, []
        self.link.send_messages(messages, now)
        self._step_coordinator(now)

    def _step_coordinator(self, now: float) -> None:
        coordinator = self.link.coordinator
        if coordinator is None:
            return
        coordinator.tick(now)
        orders, coordinator.orders = coordinator.orders, []
        for host, order in orders:
            if host in (None, self.number) and not isinstance(order, ShareJobState):
                self.member.follow(order)
            self.send_order(host, order)
        self.run.remarks += [n.remark for n in coordinator.notices if n.remark]
        coordinator.notices.clear()

    @property
    def coordinates(self) -> bool:
        """True if this host coordinates a job that is not over."""
        coordinator = self.link.coordinator
        is_active = coordinator is not None and coordinator.phase is not JobPhase.OVER
        return is_active and self.is_alive and not self.is_frozen


class SimulatedRun:
    """Agents of a run, the last of which are spares."""

    def __init__(self, hosts: int, spares: int, **policy: Any) -> None:
        self.now = 1000.0
        self.cut_links: set[frozenset[int]] = set()
        self.remarks: list[str] = []
        self.history = SharedHistory()
        self._divided_since: dict[int, float] = {}
        fields: dict[str, Any] = {"max_restarts": 0, "on_failure": "stop", "stop_grace": 3.0}
        fields |= {"lost_host_timeout": TIMEOUT_SECONDS, "start_timeout": 100.0}
        fields |= {"hang_detection_timeout": 0.0, "on_bad_host": "replace", "spares": spares}
        fields |= {"hosts": (f"h[0-{hosts - 1}]",), "addresses": (f"h[1-{hosts - 1}]",)}
        fields |= {"run_name": "r", "run_dir": Path("r"), "nproc": 1, "master_addr": "h0"}
        fields |= {"liveness_port": 1, "master_name": "h0", **policy}
        self.agents: list[SimulatedAgent] = []
        for number in range(hosts):
            options = AgentOptions(
                name=f"h{number}",
                node_rank=number,
                first_rank=number,
                is_spare=number >= hosts - spares,
                **fields,
            )
            self.agents.append(SimulatedAgent(self, number, options))

    def is_linked(self, one: int, other: int) -> bool:
        """Return True if messages between two hosts arrive."""
        ends = self.agents[one], self.agents[other]
        return not any(agent.has_power_cut for agent in ends) and (
            frozenset((one, other)) not in self.cut_links
        )

    def accepts(self, number: int, other: int) -> bool:
        """Return True if a host accepts the connection of another one."""
        agent = self.agents[number]
        is_there = agent.is_listening and agent.is_alive and not agent.is_frozen
        return is_there and self.is_linked(number, other)

    def isolate(self, *numbers: int) -> None:
        """Cut the links between these hosts and the others."""
        others = {agent.number for agent in self.agents} - {*numbers}
        self.cut_links |= {frozenset((n, other)) for n in numbers for other in others}
        for agent in self.agents:
            for number in agent.clients:
                if frozenset((agent.number, number)) in self.cut_links:
                    agent.clients[number] = False

    def heal(self) -> None:
        """Restore all links."""
        self.cut_links.clear()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            for agent in self.agents:
                agent.step(self.now)
                if agent.link.coordinator is not None:
                    self.history.record_state(agent.link.coordinator._shared_state)
            self._check_leaders()

    def _check_leaders(self) -> None:
        """Check that the ranks of an attempt follow two coordinators no longer than one of them
        takes to notice that it has lost the other hosts.
        """
        leaders: dict[int, set[int]] = {}
        for agent in self.agents:
            leader = agent.link.followed_host
            if agent.has_ranks and not agent.is_frozen and leader is not None:
                leaders.setdefault(agent.member.attempt_number, set()).add(leader)
        attempts = {attempt for attempt, numbers in leaders.items() if len(numbers) > 1}
        self._divided_since = {a: self._divided_since.get(a, self.now) for a in attempts}
        for attempt, since in self._divided_since.items():
            divided_seconds = self.now - since
            assert divided_seconds <= TIMEOUT_SECONDS + END_SECONDS + 1, (attempt, leaders)

    @property
    def coordinators(self) -> list[int]:
        return [agent.number for agent in self.agents if agent.coordinates]

    def hosts_with_ranks(self, attempt: int) -> set[int]:
        """Return the hosts whose ranks of an attempt are running."""
        return {
            agent.number
            for agent in self.agents
            if agent.has_ranks and agent.member.attempt_number == attempt
        }
