"""Coordinator: decisions about the job as a whole, from the messages of every host.

A state machine without I/O: messages and the time come in, orders and notices come out, and
nothing here waits. The cost of a message is proportional to its length, and that of most ticks is
constant; all hosts are checked once in :data:`CHECK_SECONDS`. Times named ``now`` are seconds of
the monotonic clock.

An attempt runs until its first failure. Then every host is ordered to end it (or, with
``on_failure: leave``, continues). When each has ended, or is lost, the cause is selected from all
failure reports, and the job either starts once more on all hosts, or is over. In between, the
hardware of the hosts may be measured, if a spare could replace one (``health``). Each attempt has
detectors of its own for hangs (:mod:`.hang_detector`) and early exits (:mod:`.early_exits`).

If hosts may leave the job (``on_bad_host``), the coordinator shares the state of the job with all
hosts, so that another one can continue from it (:mod:`.succession`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.files import to_plain
from flagscale.hosts.names import compress_names
from flagscale.launcher.liveness import messages
from flagscale.launcher.liveness.diagnosis import (
    Failure,
    FailureKind,
    FailureReport,
    find_cause,
    host_failure,
)
from flagscale.launcher.liveness.early_exits import EarlyExitDetector
from flagscale.launcher.liveness.hang_detector import HangDetector
from flagscale.launcher.liveness.job import (
    JobHost,
    Notice,
    describe_mesh_position,
    explain_missing_agents,
)
from flagscale.launcher.liveness.messages import (
    Departure,
    HostMessage,
    HostProgress,
    HostStatus,
    JobPhase,
    JobState,
    Order,
)
from flagscale.launcher.liveness.options import Policy
from flagscale.launcher.liveness.places import Places
from flagscale.launcher.liveness.succession import SharedState

if TYPE_CHECKING:
    from flagscale.health.judgement import Judgement
    from flagscale.launcher.liveness.hardware_check import HardwareCheck

FIRST_BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_DOUBLINGS = 6
"""Most times that the wait before a restart is doubled, to about a minute."""
STEADY_SECONDS = 300.0
"""Time after which the failure of an attempt is not taken for a repetition of the last one."""
# Interval at which all hosts are checked.
CHECK_SECONDS = 0.25
# Limits of the failures of earlier attempts in the state that is shared.
_MAX_SHARED_RESTARTS = 50
_MAX_SHARED_REASON_CHARACTERS = 500


class Coordinator:
    """State of a job.

    The caller sends and removes ``orders`` (pairs of a host's node rank, or None for all, and the
    order) and ``notices``.

    Args:
        policy: Timeouts and number of restarts.
        names: Names of the hosts by node rank.
        output: Output file of this host, for failures that have no log of their own.
        port: Port to which the agents of hosts connect.
        mesh_positions: Positions of the hosts in heterogeneous meshes, for messages.
        saves_when_stopped: True if ranks save a checkpoint when they are stopped. Then the job is
            restarted for a host that has come back; otherwise the host waits for the next failure.
        has_successors: True if another host could coordinate the job: hosts may leave it, and know
            each other's addresses.
        job_state: State from which this host, its ``coordinator``, continues as the successor of
            another one; None on host 0 at the start of the job.
    """

    def __init__(  # noqa: PLR0913 - facts about the job
        self,
        policy: Policy,
        names: Sequence[str],
        now: float,
        output: Path,
        port: int | None = None,
        mesh_positions: Sequence[str] = (),
        *,
        saves_when_stopped: bool = False,
        has_successors: bool = True,
        job_state: JobState | None = None,
    ) -> None:
        self._number = 0 if job_state is None else job_state.coordinator
        self.policy = policy
        self._output_path = output
        self._port = port
        padded_positions = chain(mesh_positions, repeat(""))
        self.hosts = [JobHost(name, next(padded_positions)) for name in names]
        self.phase = JobPhase.RUNNING
        self.attempt = 0 if job_state is None else job_state.attempt
        self.orders: list[tuple[int | None, Order]] = []
        self.notices: list[Notice] = []
        self.has_handed_over = False
        """True if another host coordinates the job because this one is sick."""
        self.summary_changed = True
        """True if :meth:`summary` has changed since this was last set to False."""
        # Number and failure of each attempt that another one followed.
        self._restarts: list[tuple[int, Failure | None]] = []
        self._places = Places(policy, self.hosts)
        self._saves_when_stopped = saves_when_stopped
        self._is_paused = False  # the attempt is being ended for a host that has come back
        self._replacements = 0  # attempts that started because a host has left
        self._early_failures_in_a_row = 0  # of attempts shorter than STEADY_SECONDS
        self._hardware_check: HardwareCheck | None = None
        self._next_check_step = 1
        # Hosts whose part of the attempt is not over.
        self._active_hosts = set(self._places.host_by_rank)
        self._stop_cause: Failure | None = None  # of a stop that no user requested
        # Failures that hosts have sent, by host and rank.
        self._failure_reports: dict[tuple[str, int | None], FailureReport] = {}
        # Failures detected here, such as lost hosts and stalls.
        self._detected_failures: list[FailureReport] = []
        self._first_failure: Failure | None = None
        self._first_failure_outdated = False
        self._started_at = self._attempt_started_at = now
        # Time since which the agents of all hosts must be running; None while they may be starting.
        self._agents_required_since: float | None = None
        self._last_tick_at = self._last_keepalive_at = now
        self._last_check_at = now - CHECK_SECONDS
        self._restart_at = 0.0
        self._start_succeeded = False  # of this attempt
        self._ranks_have_joined = False  # in any attempt
        self._failed_starts_in_a_row = 0
        self._create_detectors(now)
        self._is_taking_over = False  # until the first attempt of this coordinator starts
        # Hosts of which a successor expects a first message, until a time: spares among them.
        self._expected_hosts, self._expected_until = set[int](), now
        first_state = JobState(0, 0, 0, ((0,),), 0, tuple(self._places.host_by_rank))
        has_successors &= policy.on_bad_host != "stop" and len(names) > 1
        self._shared_state = SharedState(job_state or first_state) if has_successors else None
        if job_state is not None:
            self._take_over(job_state, now)

    @property
    def failure(self) -> Failure | None:
        """First failure of this attempt, as far as it is known."""
        if self._first_failure_outdated:
            self._first_failure_outdated = False
            first_report = find_cause([*self._failure_reports.values(), *self._detected_failures])
            self._first_failure = first_report.failure if first_report is not None else None
            early_exit = self._early_exit_detector.description
            if self._first_failure is not None and early_exit:
                # On a line of its own: the first one is compared with the ranks' own reports.
                reason = f"{self._first_failure.reason}\nbefore that, {early_exit}"
                self._first_failure = replace(self._first_failure, reason=reason)
            failure_remark = self._hang_detector.failure_remark
            if self._first_failure is not None and failure_remark:
                reason = f"{self._first_failure.reason}\n{failure_remark}"
                self._first_failure = replace(self._first_failure, reason=reason)
        return self._stop_cause or self._first_failure

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """Number and failure of each attempt that another one followed, as in :meth:`summary`."""
        return [{"attempt": n, "failure": to_plain(failure)} for n, failure in self._restarts]

    # -- messages ---------------------------------------------------------------------------

    def receive(self, node_rank: int, message: HostMessage, now: float) -> None:
        """Process a message of a host."""
        if self.has_handed_over or not 0 <= node_rank < len(self.hosts):
            return
        host = self.hosts[node_rank]
        if host.has_left and self._has_new_agent(host, message):
            # While the attempt ends, its place is still to be filled.
            if node_rank in self._places.host_by_rank:
                return
            self._take_back(node_rank, now)
        elif host.has_left:
            # Too late: the job has been ended without this host, or continues without it.
            if isinstance(message, messages.Hello):
                self._share_state_with(node_rank)
            if not isinstance(message, messages.JobStateAccepted):
                self._send_order(messages.FinishJob(self.failure or host.loss), node_rank)
            return
        self._detect_new_agent(node_rank, message, now)
        host.last_message_at = now
        self._expected_hosts.discard(node_rank)
        if host.has_left:
            return
        clock_offset = now - message.sent
        host.clock_offset = (
            clock_offset if host.clock_offset is None else min(host.clock_offset, clock_offset)
        )
        self._process_message(node_rank, message, now)
        if isinstance(message, messages.Hello):
            self._catch_up(node_rank)

    def _process_message(self, node_rank: int, message: HostMessage, now: float) -> None:
        if isinstance(message, messages.StopSignalled):
            self._stop_job(message.signal, message.failure)
        elif isinstance(message, messages.HealthReply):
            # Its number is that of an order: a spare takes part that is in no attempt yet.
            if self._hardware_check is not None:
                self._hardware_check.receive(node_rank, message)
        elif isinstance(message, messages.JobStateAccepted):
            if self._shared_state is not None:
                self._shared_state.record_acceptance(node_rank, message)
        elif message.attempt == self.attempt:
            self._process_attempt_message(node_rank, message, now)
        if self._is_taking_over and isinstance(message, (messages.Hello, messages.Heartbeat)):
            self._record_end_without_coordinator(node_rank, message.progress)

    def _process_attempt_message(self, node_rank: int, message: HostMessage, now: float) -> None:
        host = self.hosts[node_rank]
        match message:
            case messages.Hello() | messages.Heartbeat() | messages.AttemptEnded():
                self._update_host(host, message.progress, now)
                self._record_end(node_rank, message.progress)
            case messages.RankFailed():
                self._add_failure_report(host, message.failure_report, now)
            case messages.RankStacks() | messages.LastRecords():
                self._hang_detector.receive(node_rank, message)

    def _update_host(self, host: JobHost, progress: HostProgress, now: float) -> None:
        ended_ranks = progress.ended_ranks, progress.early_exits
        self.summary_changed |= host.status is not progress.status
        self.summary_changed |= (host.ended_ranks, host.early_exits) != ended_ranks
        host.status, host.in_busy_activity = progress.status, progress.in_busy_activity
        host.ended_ranks, host.early_exits = ended_ranks
        host.overdue_since = progress.overdue_since
        host.joined, host.nproc = progress.joined, progress.nproc
        if progress.progress_count != host.progress_count:
            host.progress_count = progress.progress_count
            self._hang_detector.record_progress(now)
        self._ranks_have_joined |= host.joined > 0
        self._start_succeeded |= host.joined > 0 or progress.has_run_long
        if progress.failure_report is not None:
            self._add_failure_report(host, progress.failure_report, now)

    def _record_end(self, node_rank: int, progress: HostProgress) -> None:
        if progress.exit_code is None or node_rank not in self._active_hosts:
            return
        self._active_hosts.discard(node_rank)
        self.hosts[node_rank].exit_code = progress.exit_code
        if progress.exit_code != 0 and progress.failure_report is None:
            self._end_attempt()

    def _add_failure_report(self, host: JobHost, report: FailureReport, now: float) -> None:
        if self.phase is JobPhase.STOPPING:
            return
        failure_time = report.time + host.clock_offset if host.clock_offset is not None else now
        # A later failure report of the same rank is more complete: it may have the exit code.
        key = (report.failure.host, report.failure.rank)
        converted_report = replace(report, time=min(failure_time, now))
        if self._failure_reports.get(key) != converted_report:
            self._failure_reports[key] = converted_report
            self._first_failure_outdated = self.summary_changed = True
        self._blame_hang(converted_report)
        self._end_attempt()

    def _blame_hang(self, report: FailureReport) -> None:
        """Add the cause of a hang when another rank fails in it: its collective has timed out. The
        cause may become known after the failure, so repeated reports count, too.
        """
        cause = self._hang_detector.find_cause_of(report)
        if cause is not None and cause not in self._detected_failures:
            self._detected_failures.append(cause)
            self._first_failure_outdated = self.summary_changed = True

    def _add_detected_failure(self, report: FailureReport) -> None:
        """Add a failure that was detected here."""
        self._detected_failures.append(report)
        self._first_failure_outdated = self.summary_changed = True
        self._end_attempt()

    def _catch_up(self, node_rank: int) -> None:
        """Send a host that was disconnected the order that it has missed."""
        self._share_state_with(node_rank)
        if self.phase is JobPhase.STOPPING:
            self._send_order(messages.StopJob(signal.SIGTERM, self._stop_cause), node_rank)
        elif self.phase is JobPhase.ENDING and node_rank in self._active_hosts:
            order: Order = messages.EndAttempt(self.attempt, self.failure)
            if self._is_paused:
                order = messages.PauseAttempt(self.attempt)
            self._send_order(order, node_rank)
        elif self.phase is JobPhase.RUNNING and self.attempt:
            self._send_order(self._start_order(), node_rank)
        elif self.phase is JobPhase.OVER:
            self._send_order(messages.FinishJob(self.failure), node_rank)

    def _send_order(self, order: Order, host: int | None = None) -> None:
        self.orders.append((host, order))

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Perform the actions that are due. Must be called several times a second."""
        self._extend_timeouts(now)
        if now - self._last_keepalive_at >= self.policy.beat_seconds:
            self._last_keepalive_at = now
            self._send_order(messages.KeepAlive())
        if self.phase is JobPhase.OVER:
            return
        if now - self._last_check_at >= CHECK_SECONDS:
            self._last_check_at = now
            self._detect_lost_hosts(now)
            self._share_state(now)
            self._check_quorum(now)
            if self.phase is JobPhase.RUNNING:
                self._detect_early_exit(now)
                self._detect_hang(now)
                self._pause_for_returned_host(now)
        if self.phase is JobPhase.WAITING:
            if now >= self._restart_at and self._is_confirmed():
                self._start_attempt(now)
        elif self.phase is JobPhase.CHECKING:
            self._continue_hardware_check(now)
        elif not self._active_hosts and (
            self.phase is JobPhase.STOPPING or self._can_conclude(now)
        ):
            self._conclude(now)

    def _extend_timeouts(self, now: float) -> None:
        """Extend all timeouts by the time in which this process itself did not run.

        Messages could not arrive meanwhile. The next restart, check and keepalive are no timeouts:
        they become due.
        """
        pause_seconds = now - self._last_tick_at
        self._last_tick_at = now
        if pause_seconds <= self.policy.beat_seconds * 2:
            return
        if self._shared_state is not None and pause_seconds > self.policy.lost_host_timeout / 2:
            # There may be a successor, and received messages may be old.
            self._shared_state.require_acceptance_again()
            self._send_order(messages.ShareJobState(self._shared_state.state))

        def shift(start: float) -> float:
            # Messages that arrived between the pause and this tick are not from the future.
            return min(start + pause_seconds, now)

        self._started_at = shift(self._started_at)
        self._attempt_started_at = shift(self._attempt_started_at)
        if self._hardware_check is not None:
            self._hardware_check.extend(pause_seconds)
        self._hang_detector.extend_timeouts(shift)
        if self._agents_required_since is not None:
            self._agents_required_since = shift(self._agents_required_since)
        for host in self.hosts:
            if host.last_message_at is not None:
                host.last_message_at = shift(host.last_message_at)

    def _detect_lost_hosts(self, now: float) -> None:
        # Once ranks have joined, the agents of all hosts have been running; and once the job ends,
        # no host is given more time to start.
        if self._agents_required_since is None and (
            self._ranks_have_joined or self.phase is not JobPhase.RUNNING
        ):
            self._agents_required_since = now
        # The agent of this host cannot be lost: it is this process.
        for node_rank in sorted(self._active_hosts - {self._number}):
            host = self.hosts[node_rank]
            if host.last_message_at is None:
                self._detect_absent_host(node_rank, now)
            elif self._is_silent(host, now):
                seconds = self.policy.lost_host_timeout
                reason = f"was lost: no word from its agent for {seconds:g} s"
                self._mark_lost(node_rank, reason, host.last_message_at)

    def _detect_absent_host(self, node_rank: int, now: float) -> None:
        start_timeout, lost_host_timeout = self.policy.start_timeout, self.policy.lost_host_timeout
        if now - self._started_at > start_timeout:
            reason = f"did not report within {start_timeout:g} s of the start"
            reason += explain_missing_agents(self._port)
            self._mark_lost(node_rank, reason, now)
        elif (
            self._agents_required_since is not None
            and now - self._agents_required_since > lost_host_timeout
        ):
            reason = f"was lost: no word from its agent for {lost_host_timeout:g} s"
            self._mark_lost(node_rank, reason, self._agents_required_since)

    def _mark_lost(self, node_rank: int, reason: str, last_seen: float) -> None:
        host = self.hosts[node_rank]
        host.is_lost, host.status, self.summary_changed = True, HostStatus.LOST, True
        self._active_hosts.discard(node_rank)
        reason += describe_mesh_position(host.mesh_position)
        host.loss = host_failure(host.name, reason, self._output_path)
        if self.phase is not JobPhase.STOPPING:
            self._add_detected_failure(FailureReport(host.loss, last_seen, FailureKind.HOST_LOST))

    def _create_detectors(self, now: float) -> None:
        """Create the detectors of the attempt, without the state of the last one."""
        self._early_exit_detector = EarlyExitDetector(self._places, self.attempt)
        self._hang_detector = HangDetector(
            self.policy, self._places, self.attempt, self._output_path, now
        )

    def _detect_early_exit(self, now: float) -> None:
        """Log once that ranks have ended early. Exits after a failure do not explain it."""
        if self._early_exit_detector.description or self.failure is not None:
            return
        active_hosts = [self.hosts[node_rank] for node_rank in self._active_hosts]
        notice = self._early_exit_detector.tick(active_hosts, now)
        if notice is not None:
            self.notices.append(notice)
            self.summary_changed = True

    def _detect_hang(self, now: float) -> None:
        """Perform the actions that are due because ranks make no progress or wait for long."""
        active_hosts = {number: self.hosts[number] for number in sorted(self._active_hosts)}
        for action in self._hang_detector.tick(
            active_hosts, now, ranks_have_joined=self._ranks_have_joined
        ):
            if isinstance(action, FailureReport):
                self._add_detected_failure(action)
            elif isinstance(action, Notice):
                self.notices.append(action)
                self.summary_changed = True
            else:
                self._send_order(action)

    # -- succession -------------------------------------------------------------------------

    def _take_over(self, state: JobState, now: float) -> None:
        """Continue from the state of a job whose coordinator is lost. Every host ends its part of
        the attempt by itself.
        """
        self._places.host_by_rank, self._replacements = list(state.places), state.replacements
        self._places.replaced_by = dict(state.successors)
        self._restarts = list(state.restarts)
        self._failed_starts_in_a_row = state.failed_starts_in_a_row
        self._ranks_have_joined = state.ranks_have_joined
        self._start_succeeded = state.start_succeeded
        self._is_taking_over, self._agents_required_since = True, now
        voters = {*state.electorates[-1]} - {departure.host for departure in state.departures}
        self._expected_hosts = voters - {self._number}
        self._expected_until = now + self._places.spare_timeout
        for number in voters.union(state.places):
            self.hosts[number].last_message_at = now
        for departure in state.departures:
            host = self.hosts[departure.host]
            host.loss, host.sickness = departure.loss, departure.sickness
            host.is_lost = not departure.sickness
            host.status = HostStatus.LOST if host.is_lost else HostStatus.SICK
        self._active_hosts = {n for n in self._places.host_by_rank if not self.hosts[n].has_left}
        self._enter_phase(JobPhase.ENDING)
        predecessor = state.departures[-1]
        failure, seconds = state.failure or predecessor.loss, self.policy.lost_host_timeout
        self._add_detected_failure(FailureReport(failure, now - seconds, FailureKind.HOST_LOST))
        name, earlier_name = self.hosts[self._number].name, self.hosts[predecessor.host].name
        reason = "is sick" if predecessor.sickness else "was lost"
        remark = f"{name} coordinates the run from now on, because {earlier_name} {reason}"
        self.notices.append(Notice("succession", self.attempt, remark=remark))

    def _record_end_without_coordinator(self, number: int, progress: HostProgress) -> None:
        """Record that no rank is left on a host, whichever attempt it has taken part in."""
        if progress.status is HostStatus.SPARE:
            self.hosts[number].status = HostStatus.SPARE
        if progress.exit_code is not None or progress.status is HostStatus.SPARE:
            self._active_hosts.discard(number)

    def _list_contacts(self, now: float) -> set[int]:
        """Return the numbers of the hosts with an agent that this one has contact to."""
        return {
            number
            for number, host in enumerate(self.hosts)
            if number == self._number
            or (
                host.last_message_at is not None
                and not host.has_left
                and not self._is_silent(host, now)
            )
        }

    def _share_state_with(self, number: int) -> None:
        if self._shared_state is not None:
            self._send_order(messages.ShareJobState(self._shared_state.state), number)

    def _share_state(self, now: float) -> None:
        """Share the state of the job with all hosts, if it has changed."""
        shared = self._shared_state
        if shared is None:
            return
        departures = tuple(
            Departure(number, host.loss, host.sickness)
            for number, host in enumerate(self.hosts)
            if host.has_left and host.loss is not None
        )
        state = replace(
            shared.state,
            attempt=self.attempt,
            places=tuple(self._places.host_by_rank),
            departures=departures,
            successors=tuple(self._places.replaced_by.items()),
            restarts=tuple(
                (attempt, _shorten_failure(failure))
                for attempt, failure in self._restarts[-_MAX_SHARED_RESTARTS:]
            ),
            replacements=self._replacements,
            failed_starts_in_a_row=self._failed_starts_in_a_row,
            ranks_have_joined=self._ranks_have_joined,
            start_succeeded=self._start_succeeded,
            failure=_shorten_failure(self.failure) if self.has_handed_over else None,
        )
        if shared.update(self._list_contacts(now), state):
            self._send_order(messages.ShareJobState(shared.state))

    def _has_possible_successor(self, now: float) -> bool:
        """Return True if the other hosts could go on with another coordinator."""
        others = self._list_contacts(now) - {self._number}
        return self._shared_state is not None and self._shared_state.could_elect(others)

    def _hand_over(self, now: float) -> None:
        """Let another host coordinate the job, because this one leaves it."""
        loss = self.hosts[self._number].loss
        if loss is None:
            return
        self.has_handed_over = True
        self._share_state(now)
        self._send_order(messages.HandOver(loss))
        self._send_order(messages.FinishJob(loss), self._number)
        self._enter_phase(JobPhase.OVER)

    def _check_quorum(self, now: float) -> None:
        """End the job here without the contact to half of the hosts, because the others may go on
        with another coordinator.
        """
        shared = self._shared_state
        if shared is None or self.phase is JobPhase.STOPPING:
            return
        if shared.has_quorum(self._list_contacts(now)):
            return
        reason = (
            "has lost the contact to most of the run's hosts: if they are there, they go on "
            "without it"
        )
        self._stop_cause = host_failure(self.hosts[self._number].name, reason, self._output_path)
        self._finish_job(Notice("failed", self.attempt, self._stop_cause))

    def _is_confirmed(self) -> bool:
        """Return True if enough hosts have confirmed that this host coordinates the job."""
        return self._shared_state is None or self._shared_state.is_accepted

    def _can_conclude(self, now: float) -> bool:
        """Return True if this host coordinates the job and knows which hosts are there."""
        return self._is_confirmed() and (not self._expected_hosts or now > self._expected_until)

    # -- decisions --------------------------------------------------------------------------

    def _enter_phase(self, phase: JobPhase) -> None:
        self.phase, self.summary_changed = phase, True

    def _end_attempt(self) -> None:
        if self.phase is JobPhase.RUNNING and self.policy.on_failure == "stop":
            self._enter_phase(JobPhase.ENDING)
            self._send_order(messages.EndAttempt(self.attempt, self.failure))

    def _stop_job(self, signal_number: int, cause: Failure | None) -> None:
        """Stop the whole job, without a restart, because a signal stopped it on one host.

        ``cause`` is the failure on that host, if no user requested the stop.
        """
        if self.phase in (JobPhase.STOPPING, JobPhase.OVER):
            return
        self._enter_phase(JobPhase.STOPPING)
        self._stop_cause = cause
        self._send_order(messages.StopJob(signal_number, cause))

    def complete_stop(self, now: float) -> None:
        """Complete a stop without waiting for the other hosts, because this host ends."""
        if self.phase is JobPhase.STOPPING:
            self._conclude(now)

    def _conclude(self, now: float) -> None:
        """Finish or restart the job after every host has ended this attempt, or is lost."""
        failed = any(host.is_lost or host.exit_code for host in self._places.job_hosts)
        is_paused, self._is_paused = self._is_paused, False
        if self.phase is JobPhase.STOPPING:
            event = "stopped" if self._stop_cause is None else "failed"
            self._finish_job(Notice(event, self.attempt, self.failure))
        elif is_paused and not any(host.is_lost for host in self._places.job_hosts):
            self._failed_starts_in_a_row = 0
            self._restart(now, None)
        elif not failed and not self._failure_reports and not self._detected_failures:
            self._finish_job(Notice("finished", self.attempt))
        else:
            self._explain_failed_collective()
            self._failed_starts_in_a_row = (
                0 if self._start_succeeded else self._failed_starts_in_a_row + 1
            )
            if self._needs_hardware_check(now):
                self._start_hardware_check(now)
            else:
                self._restart_or_fail(now)

    def _explain_failed_collective(self) -> None:
        """Add to the failure which ranks disagreed about the collective that it happened in."""
        notice = self._hang_detector.explain_failed_collective()
        if notice is not None:
            self.notices.append(notice)
            self._first_failure_outdated = True

    # -- hosts that come back -------------------------------------------------------------

    def _has_new_agent(self, host: JobHost, message: HostMessage) -> bool:
        """Return True if a lost host has a new agent, which waits for a place."""
        return (
            self.policy.on_bad_host == "shrink"
            and not host.sickness
            and self.phase not in (JobPhase.STOPPING, JobPhase.OVER)
            and isinstance(message, (messages.Hello, messages.Heartbeat))
            and message.progress.status is HostStatus.SPARE
        )

    def _take_back(self, number: int, now: float) -> None:
        """Let a host that has come back wait as a spare."""
        host = self.hosts[number]
        host.is_lost, host.loss, host.returned_at, host.clock_offset = False, None, now, None
        host.status, self.summary_changed = HostStatus.SPARE, True
        self._places.take_back(number)
        when = "saves a checkpoint and starts again" if self._saves_when_stopped else "fails"
        self._log_health(f"{host.name} is back, and joins the job when it {when}")

    def _detect_new_agent(self, number: int, message: HostMessage, now: float) -> None:
        """Detect that the agent of a host in the job was started again: its ranks have ended. If
        none has joined, as in a run whose scripts were all started again, it starts them by order.
        """
        is_first_message = isinstance(message, messages.Hello) and number in self._active_hosts
        if self._is_taking_over or not is_first_message:
            return
        if not self._has_new_agent(self.hosts[number], message):
            return
        if self.hosts[number].joined or self.phase is not JobPhase.RUNNING:
            self._mark_lost(number, "was lost: its agent has started again", now)
        elif not self.attempt:
            self._send_order(messages.StartAttempt(0, tuple(self._places.host_by_rank)), number)

    def _pause_for_returned_host(self, now: float) -> None:
        """End the attempt in order if a host that has come back can join the job.

        It has to stay for as long as it would take to lose it again.
        """
        if (
            self._saves_when_stopped
            and self._places.has_free_place
            and all(0 < self.hosts[n].nproc <= self.hosts[n].joined for n in self._active_hosts)
            and self._active_hosts == {*self._places.host_by_rank}
            and any(
                host.returned_at is not None
                and not host.has_left
                and now - host.returned_at > self.policy.lost_host_timeout
                and not self._is_silent(host, now)
                for host in self.hosts
            )
        ):
            self._is_paused = True
            self._enter_phase(JobPhase.ENDING)
            self._send_order(messages.PauseAttempt(self.attempt))

    # -- hardware check ---------------------------------------------------------------------

    def _needs_hardware_check(self, now: float) -> bool:
        """Return True if hosts are measured before the next attempt.

        A lost host explains the failure, and its replacement should not wait. If no host can be
        spared, no finding would have an effect.
        """
        return (
            self.policy.health != "off"
            and not self._is_taking_over
            and not any(host.is_lost for host in self._places.job_hosts)
            and not self._find_start_obstacle()
            and self._places.count_tolerable_losses(now) > 0
        )

    def _start_hardware_check(self, now: float) -> None:
        """Measure the hosts of the job, and the spares, which one of them may be replaced by."""
        # Only these jobs pay for the import.
        from flagscale.launcher.liveness.hardware_check import HardwareCheck

        hosts = sorted((*self._places.host_by_rank, *self._places.list_live_spares(now)))
        names = compress_names([self.hosts[number].name for number in hosts])
        self._enter_phase(JobPhase.CHECKING)
        self._hardware_check = HardwareCheck(hosts, self._next_check_step, str(self.attempt), now)
        self._log_health(f"measuring the hardware of {names} before the next attempt")

    def _log_health(self, remark: str) -> None:
        self.notices.append(Notice("health", self.attempt, remark=remark))

    def _continue_hardware_check(self, now: float) -> None:
        check = self._hardware_check
        if check is None:
            return
        check.tick(now, lambda number: self._is_silent(self.hosts[number], now))
        orders, check.orders = check.orders, []
        for number, order in orders:
            self._send_order(order, number)
        if check.judgement is not None:
            self._hardware_check, self._next_check_step = None, check.step + 1
            self._send_order(messages.EndHealthCheck())
            self._give_up_sick_hosts(check.judgement, now)
            if self.hosts[self._number].has_left:
                self._hand_over(now)
            else:
                self._restart_or_fail(now)

    def _is_silent(self, host: JobHost, now: float) -> bool:
        last = host.last_message_at
        return last is not None and now - last > self.policy.lost_host_timeout

    def _give_up_sick_hosts(self, judgement: Judgement, now: float) -> None:
        """Remove the hosts that two measurements found sick from the job, as far as it can go on
        without them.
        """
        from flagscale.health.judgement import Severity
        from flagscale.launcher.liveness.hardware_check import describe_sick_hosts

        sick = describe_sick_hosts(judgement)
        for number in sorted(sick.keys() - {*self._places.host_by_rank}):
            if number == self._number and not self._has_possible_successor(now):
                continue
            self._mark_sick(number, sick[number])
            self._log_health(f"the spare {self.hosts[number].name} is sick: {sick[number]}")
        tolerable_losses = self._places.count_tolerable_losses(now)
        for number in sorted(sick.keys() & {*self._places.host_by_rank}):
            name, reason = self.hosts[number].name, sick[number]
            if not tolerable_losses:
                remark = "; it stays in the job: no spare is left"
            elif number == self._number and not self._has_possible_successor(now):
                remark = "; it stays in the job: no other host can coordinate the run"
            else:
                tolerable_losses -= 1
                self._mark_sick(number, reason)
                remark = ""
            self._log_health(f"{name} is sick: {reason}{remark}")
        if not sick:
            self._log_health("the hardware check found no sick host")
        for finding in judgement.findings:
            if finding.severity is Severity.UNCLEAR:
                self._log_health(f"{self.hosts[finding.host].name}: {finding.text}")

    def _mark_sick(self, number: int, reason: str) -> None:
        """Remove a host from the job, which ends its agent."""
        host = self.hosts[number]
        host.sickness, host.status, self.summary_changed = f"sick: {reason}", HostStatus.SICK, True
        host.loss = host_failure(
            host.name, f"has left the job, because it is {host.sickness}", self._output_path
        )
        if number != self._number:
            self._send_order(messages.FinishJob(host.loss), number)

    # -- restart ----------------------------------------------------------------------------

    def _restart_or_fail(self, now: float) -> None:
        obstacle = self._find_restart_obstacle(now)
        if obstacle:
            attempts_left = self.attempt + 1 < self._max_attempts
            lost_places = any(host.has_left for host in self._places.job_hosts)
            explained = attempts_left or (lost_places and self.policy.on_bad_host != "stop")
            remark = f"the job does not start again: {obstacle}" if explained else ""
            self._finish_job(Notice("failed", self.attempt, self.failure, remark))
            return
        self._restart(now, self.failure)

    def _restart(self, now: float, failure: Failure | None) -> None:
        """Start the next attempt, after a failure or to let a host join."""
        # Waits grow with failures that may repeat. A host that has left cannot fail again.
        remark = self._places.fill(now)
        is_replacement = bool(remark) or failure is None or self._is_taking_over
        if is_replacement or now - self._attempt_started_at >= STEADY_SECONDS:
            self._early_failures_in_a_row = 0
        doublings = min(self._early_failures_in_a_row, MAX_BACK_OFF_DOUBLINGS)
        if is_replacement:
            self._replacements += 1
        else:
            self._early_failures_in_a_row += 1
        self._enter_phase(JobPhase.WAITING)
        self._restart_at = now + FIRST_BACK_OFF_SECONDS * 2**doublings
        self._restarts.append((self.attempt, failure))
        self.notices.append(Notice("restarted", self.attempt + 1, failure, remark))

    @property
    def _max_attempts(self) -> int:
        return self.policy.attempts + self._replacements

    def _start_order(self) -> messages.StartAttempt:
        places = tuple(self._places.host_by_rank) if self._replacements else ()
        return messages.StartAttempt(self.attempt, places)

    def _find_restart_obstacle(self, now: float) -> str:
        """Return the reason why there is no other attempt, or an empty string.

        The job is not restarted if a host has left that no spare can replace, if the ranks have not
        joined in any attempt, or if they did not join in two attempts in a row.
        """
        lost = any(host.has_left for host in self._places.job_hosts)
        has_attempts_left = self.attempt + 1 < self._max_attempts
        if lost and self.policy.on_bad_host == "stop" and not has_attempts_left:
            return "no attempt is left"
        if shortage := self._places.describe_shortage(now):
            return shortage
        if not (lost or self._is_taking_over or has_attempts_left):
            return "no attempt is left"
        return self._find_start_obstacle()

    def _find_start_obstacle(self) -> str:
        """Return the reason why another attempt would not start either, or an empty string."""
        if 0 < self._failed_starts_in_a_row == self.attempt + 1:
            return "its ranks never joined"
        return "its ranks did not join twice in a row" if self._failed_starts_in_a_row > 1 else ""

    def _start_attempt(self, now: float) -> None:
        self.attempt += 1
        self._attempt_started_at = now
        self._is_taking_over = False
        self._share_state(now)
        self._enter_phase(JobPhase.RUNNING)
        self._failure_reports, self._detected_failures = {}, []
        self._first_failure_outdated, self._start_succeeded = True, False
        self._create_detectors(now)
        self._active_hosts = set(self._places.host_by_rank)
        for host in self._places.job_hosts:
            host.begin_attempt()
        self._send_order(self._start_order())

    def _finish_job(self, notice: Notice) -> None:
        self._enter_phase(JobPhase.OVER)
        self.notices.append(notice)
        self._send_order(messages.FinishJob(self.failure))

    def summary(self) -> dict[str, Any]:
        """Return the state of the job, as shown by ``query``."""
        replaced = {str(number): spare for number, spare in self._places.replaced_by.items()}
        sick = {str(n): host.sickness for n, host in enumerate(self.hosts) if host.sickness}
        is_running = self.phase is JobPhase.RUNNING
        return {
            "phase": self.phase.value,
            "attempt": self.attempt + 1,
            "attempts": self._max_attempts,
            "failure": to_plain(self.failure),
            "early_exit": self._early_exit_detector.remark if is_running else "",
            "hang": self._hang_detector.hang_remark if is_running else "",
            "hosts": {str(n): host.status.value for n, host in enumerate(self.hosts)},
            "restarts": self.restarts,
            **(
                {"places": list(self._places.host_by_rank)}
                if self.policy.on_bad_host != "stop"
                else {}
            ),
            **({} if self._shared_state is None else self._shared_state.summary()),
            **({"replaced": replaced} if replaced else {}),
            **({"sick": sick} if sick else {}),
        }


def _shorten_failure(failure: Failure | None) -> Failure | None:
    """Return a failure without its traceback, for the shared state."""
    if failure is None:
        return None
    return replace(failure, reason=failure.reason[:_MAX_SHARED_REASON_CHARACTERS], traceback="")
