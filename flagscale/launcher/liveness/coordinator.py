"""Coordinator: decisions about the job as a whole, from the reports of every host.

Pure: messages and the time come in, orders and notices come out, and nothing here waits. A message
costs time proportional to its contents and a tick next to nothing, regardless of the number of
hosts; all of them are checked a few times a second.

An attempt runs until its first failure. Then every host is ordered to end it (or, with
``on_failure: leave``, continues). When each has ended, or is lost, the cause is selected from all
reports, and the job either starts once more on all hosts, or is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from flagscale.files import to_plain
from flagscale.launcher.liveness import messages
from flagscale.launcher.liveness.diagnosis import Failure, FailureReport, Severity, find_cause
from flagscale.launcher.liveness.job import (
    JobHost,
    Notice,
    describe_place,
    explain_unreached,
    stalled_report,
)
from flagscale.launcher.liveness.messages import (
    HostMessage,
    HostProgress,
    HostStatus,
    JobPhase,
    Order,
)
from flagscale.launcher.liveness.options import Policy

BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 60.0
# Interval at which all hosts are checked.
CHECK_SECONDS = 0.25
# Time for ranks to write their stacks before the slowest one is reported without them.
STACK_SECONDS = 6.0


class Coordinator:
    """State of a job.

    ``orders`` (for one host each, or for all if None) and ``notices`` are removed by the caller.

    Args:
        output: Output file of host 0, for failures that have no log of their own.
        port: Port at which hosts report.
        places: Positions of the hosts in heterogeneous meshes.
    """

    def __init__(
        self,
        policy: Policy,
        names: Sequence[str],
        now: float,
        output: Path,
        port: int | None = None,
        places: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self._output = output
        self._port = port
        host_places = chain(places, repeat(""))
        self.hosts = [JobHost(name, next(host_places)) for name in names]
        self.phase = JobPhase.RUNNING
        self.attempt = 0
        self.orders: list[tuple[int | None, Order]] = []
        self.notices: list[Notice] = []
        self.news = True
        """True if :meth:`summary` has changed since this was last set to False."""
        self.restarts: list[dict[str, Any]] = []
        self._active = set(range(len(names)))  # hosts whose part of the attempt is not over
        self._cause: Failure | None = None  # of a stop that no user requested
        self._reports: dict[tuple[str, int | None], FailureReport] = {}
        self._detected_failures: list[
            FailureReport
        ] = []  # failures detected here, such as lost hosts and stalls
        self._first: Failure | None = None
        self._first_outdated = False
        self._began = now
        self._expected: float | None = None
        self._ticked = now
        self._checked_at = now - CHECK_SECONDS
        self._progress_at = now
        self._beat_at = now
        self._restart_at = 0.0
        self._dumped_at: float | None = None
        self._progressed = False
        self._reports_status = False
        self._never_joined = 0

    @property
    def failure(self) -> Failure | None:
        """First failure of this attempt, as far as it is known."""
        if self._first_outdated:
            self._first_outdated = False
            first = find_cause([*self._reports.values(), *self._detected_failures])
            self._first = first.failure if first is not None else None
        return self._cause or self._first

    # -- messages ---------------------------------------------------------------------------

    def receive(self, number: int, message: HostMessage, now: float) -> None:
        """Process a message of a host."""
        if not 0 <= number < len(self.hosts):
            return
        host = self.hosts[number]
        if host.lost:
            # Too late: the job has been ended without this host.
            self._send_order(messages.FinishJob(self.failure), number)
            return
        host.last_message_at = now
        offset = now - message.sent
        host.offset = offset if host.offset is None else min(host.offset, offset)
        if isinstance(message, messages.StopSignalled):
            self._stop_job(message.signal, message.failure)
        elif message.attempt == self.attempt:
            self._process_report(number, message, now)
        if isinstance(message, messages.Hello):
            self._catch_up(number)

    def _process_report(self, number: int, message: HostMessage, now: float) -> None:
        host = self.hosts[number]
        match message:
            case messages.Hello() | messages.Heartbeat() | messages.AttemptEnded():
                self._update_host(host, message.position, now)
                self._record_end(number, message.position)
            case messages.RankFailed():
                self._add_report(host, message.report, now)
            case messages.RankStacks():
                host.ranks = message.ranks

    def _update_host(self, host: JobHost, position: HostProgress, now: float) -> None:
        self.news |= host.status is not position.status
        host.status, host.busy = position.status, position.busy
        host.joined, host.nproc = position.joined, position.nproc
        if position.moves != host.moves:
            host.moves, self._progress_at, self._dumped_at = position.moves, now, None
        self._reports_status |= host.joined > 0
        self._progressed |= host.joined > 0 or position.lived
        if position.report is not None:
            self._add_report(host, position.report, now)

    def _record_end(self, number: int, position: HostProgress) -> None:
        if position.ended is None or number not in self._active:
            return
        self._active.discard(number)
        self.hosts[number].ended = position.ended
        if position.ended and position.report is None:
            self._end_attempt()

    def _add_report(self, host: JobHost, report: FailureReport, now: float) -> None:
        if self.phase is JobPhase.STOPPING:
            return
        moment = report.time + host.offset if host.offset is not None else now
        # A later report of the same rank is more complete: it has the exit code, for example.
        key = (report.failure.host, report.failure.rank)
        new = replace(report, time=min(moment, now))
        if self._reports.get(key) != new:
            self._reports[key] = new
            self._first_outdated = self.news = True
        self._end_attempt()

    def _add_detected_failure(self, report: FailureReport) -> None:
        """Add a failure that was detected here."""
        self._detected_failures.append(report)
        self._first_outdated = self.news = True
        self._end_attempt()

    def _catch_up(self, number: int) -> None:
        """Send a host that was disconnected the order that it has missed."""
        if self.phase is JobPhase.STOPPING:
            self._send_order(messages.StopJob(15, self._cause), number)
        elif self.phase is JobPhase.ENDING and not self.hosts[number].over:
            self._send_order(messages.EndAttempt(self.attempt, self.failure), number)
        elif self.phase is JobPhase.RUNNING and self.attempt:
            self._send_order(messages.StartAttempt(self.attempt), number)
        elif self.phase is JobPhase.OVER:
            self._send_order(messages.FinishJob(self.failure), number)

    def _send_order(self, order: Order, host: int | None = None) -> None:
        self.orders.append((host, order))

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Perform the actions that are due. Must be called several times a second."""
        self._extend_timeouts(now)
        if now - self._beat_at >= self.policy.beat_seconds:
            self._beat_at = now
            self._send_order(messages.KeepAlive())
        if self.phase is JobPhase.OVER:
            return
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._detect_lost_hosts(now)
            if self.phase is JobPhase.RUNNING:
                self._detect_stall(now)
        if self.phase is JobPhase.WAITING:
            if now >= self._restart_at:
                self._start_attempt(now)
        elif not self._active:
            self._conclude(now)

    def _extend_timeouts(self, now: float) -> None:
        """Extend all timeouts by the time in which this process itself did not run."""
        gap = now - self._ticked
        self._ticked = now
        if gap > self.policy.beat_seconds * 2:
            self._progress_at += gap
            for host in self.hosts:
                if host.last_message_at is not None:
                    host.last_message_at += gap

    def _detect_lost_hosts(self, now: float) -> None:
        # Once ranks have joined, the agents of all hosts have been running; and once the job ends,
        # no host is given more time to start.
        if self._expected is None and (self._reports_status or self.phase is not JobPhase.RUNNING):
            self._expected = now
        for number in sorted(self._active - {0}):
            host = self.hosts[number]
            if host.last_message_at is None:
                self._detect_absent_host(number, now)
            elif now - host.last_message_at > self.policy.lost_host_timeout:
                seconds = self.policy.lost_host_timeout
                reason = f"was lost: no word from its agent for {seconds:g} s"
                self._mark_lost(number, reason, host.last_message_at)

    def _detect_absent_host(self, number: int, now: float) -> None:
        start, silence = self.policy.start_timeout, self.policy.lost_host_timeout
        if now - self._began > start:
            reason = (
                f"did not report within {start:g} s of the start{explain_unreached(self._port)}"
            )
            self._mark_lost(number, reason, now)
        elif self._expected is not None and now - self._expected > silence:
            reason = f"was lost: no word from its agent for {silence:g} s"
            self._mark_lost(number, reason, self._expected)

    def _mark_lost(self, number: int, reason: str, moment: float) -> None:
        host = self.hosts[number]
        host.lost, host.status, self.news = True, HostStatus.LOST, True
        self._active.discard(number)
        if self.phase is not JobPhase.STOPPING:
            reason += describe_place(host.place)
            failure = Failure(host.name, None, None, reason, "", self._output)
            self._add_detected_failure(FailureReport(failure, moment, Severity.LOST))

    def _detect_stall(self, now: float) -> None:
        alive = [self.hosts[number] for number in sorted(self._active)]
        if not alive or any(not host.nproc or host.joined < host.nproc for host in alive):
            self._detect_late_start(alive, now)
            return
        limit = self.policy.stall_limit(busy=any(host.busy for host in alive))
        if limit is None or now - self._progress_at <= limit:
            return
        if self._dumped_at is None:
            self._dumped_at = now
            for host in alive:
                host.ranks = None
            self._send_order(messages.DumpStacks(self.attempt))
        elif all(host.ranks is not None for host in alive) or (
            now - self._dumped_at > STACK_SECONDS
        ):
            ranks = [rank for host in alive for rank in host.ranks or ()]
            report = stalled_report(ranks, now - self._progress_at, alive[0].name, self._output)
            self._dumped_at = None
            self.notices.append(Notice("stalled", self.attempt, report.failure))
            self._add_detected_failure(replace(report, time=now))

    def _detect_late_start(self, alive: Sequence[JobHost], now: float) -> None:
        """Detect a restart whose ranks do not join: no launcher waits for it."""
        late = now - self._progress_at > self.policy.start_timeout
        if not self.attempt or not self._reports_status or not late:
            return
        host = min(alive, key=lambda host: host.joined - host.nproc)
        reason = f"has ranks that did not join within {self.policy.start_timeout:g} s of a restart"
        failure = Failure(host.name, None, None, reason, "", self._output)
        self._add_detected_failure(FailureReport(failure, now, Severity.UNNAMED))

    # -- decisions --------------------------------------------------------------------------

    def _enter_phase(self, phase: JobPhase) -> None:
        self.phase, self.news = phase, True

    def _end_attempt(self) -> None:
        if self.phase is JobPhase.RUNNING and self.policy.on_failure == "stop":
            self._enter_phase(JobPhase.ENDING)
            self._send_order(messages.EndAttempt(self.attempt, self.failure))

    def _stop_job(self, number: int, cause: Failure | None) -> None:
        """Stop the whole job, without a restart, because a signal stopped it on one host.

        ``cause`` is the failure on that host, if no user requested the stop.
        """
        if self.phase in (JobPhase.STOPPING, JobPhase.OVER):
            return
        self._enter_phase(JobPhase.STOPPING)
        self._cause = cause
        self._send_order(messages.StopJob(number, cause))

    def abandon_stop(self, now: float) -> None:
        """Conclude a stop without further reports, because this host ends."""
        if self.phase is JobPhase.STOPPING:
            self._conclude(now)

    def _conclude(self, now: float) -> None:
        """Finish or restart the job after every host has ended this attempt, or is lost."""
        failed = any(host.lost or host.ended for host in self.hosts)
        if self.phase is JobPhase.STOPPING:
            event = "stopped" if self._cause is None else "failed"
            self._finish_job(Notice(event, self.attempt, self.failure))
        elif not failed and not self._reports and not self._detected_failures:
            self._finish_job(Notice("finished", self.attempt))
        elif self._may_restart():
            self._enter_phase(JobPhase.WAITING)
            wait = min(BACK_OFF_SECONDS * 2 ** len(self.restarts), MAX_BACK_OFF_SECONDS)
            self._restart_at = now + wait
            self.restarts.append({"attempt": self.attempt, "failure": to_plain(self.failure)})
            self.notices.append(Notice("restarted", self.attempt + 1, self.failure))
        else:
            self._finish_job(Notice("failed", self.attempt, self.failure))

    def _may_restart(self) -> bool:
        """Return True if another attempt is left and makes sense.

        It does not if a host is lost, if the ranks never joined since the first attempt, or if they
        did not join twice in a row.
        """
        self._never_joined = 0 if self._progressed else self._never_joined + 1
        first_never_joined = self._never_joined > 0 and self._never_joined == self.attempt + 1
        return (
            self.attempt + 1 < self.policy.attempts
            and not any(host.lost for host in self.hosts)
            and not first_never_joined
            and self._never_joined < 2
        )

    def _start_attempt(self, now: float) -> None:
        self.attempt += 1
        self._enter_phase(JobPhase.RUNNING)
        self._reports, self._detected_failures, self._first_outdated, self._progressed = (
            {},
            [],
            True,
            False,
        )
        self._dumped_at, self._progress_at = None, now
        self._active = set(range(len(self.hosts)))
        for host in self.hosts:
            host.ended, host.joined, host.busy, host.moves = None, 0, False, -1
            host.status = HostStatus.STARTING
        self._send_order(messages.StartAttempt(self.attempt))

    def _finish_job(self, notice: Notice) -> None:
        self._enter_phase(JobPhase.OVER)
        self.notices.append(notice)
        self._send_order(messages.FinishJob(self.failure))

    def summary(self) -> dict[str, Any]:
        """Return the state of the job, as shown by ``query``."""
        return {
            "phase": self.phase.value,
            "attempt": self.attempt + 1,
            "attempts": self.policy.attempts,
            "failure": to_plain(self.failure),
            "hosts": {str(n): host.status.value for n, host in enumerate(self.hosts)},
            "restarts": list(self.restarts),
        }
