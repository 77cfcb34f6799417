"""What the job as a whole does: the one place that sees every host.

Pure: messages and the time come in, orders and notices come out, and nothing here waits. A message
costs what it says and a tick next to nothing, however many hosts there are; all of them are looked
at a few times a second.

An attempt runs until its first failure. Then every host is told to end it (or, with
``on_failure: leave``, is left alone), and when each has ended, or is lost, the cause is chosen from
all reports and the job starts once more, everywhere, or is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from flagscale.files import plain
from flagscale.launcher.liveness import messages
from flagscale.launcher.liveness.diagnosis import Failure, Report, Severity, first_of
from flagscale.launcher.liveness.job import JobHost, Notice, held, stalled_report, unreached
from flagscale.launcher.liveness.messages import FromHost, HostStatus, JobPhase, Order, Position
from flagscale.launcher.liveness.options import Policy

BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 60.0
# How often all hosts are looked at.
SWEEP_SECONDS = 0.25
# How long ranks have to write their stacks before the one that is behind is named without them.
STACK_SECONDS = 6.0


class Coordinator:
    """The state of a job. ``orders`` are for one host each, or for all (None); they and
    ``notices`` are for the caller to take away. ``port`` is where hosts report;
    ``output`` is host 0's, for failures that have no log of their own; ``places`` are what hosts
    hold, where ranks are unlike."""

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
        told = chain(places, repeat(""))
        self.hosts = [JobHost(name, next(told)) for name in names]
        self.phase = JobPhase.RUNNING
        self.attempt = 0
        self.orders: list[tuple[int | None, Order]] = []
        self.notices: list[Notice] = []
        self.news = True
        """Whether :meth:`summary` says something else than when this was last set to False."""
        self.restarts: list[dict[str, Any]] = []
        self._active = set(range(len(names)))  # hosts whose part of the attempt is not over
        self._cause: Failure | None = None  # of a stop that nobody asked for
        self._reports: dict[tuple[str, int | None], Report] = {}
        self._judged: list[Report] = []  # what no host has said of itself
        self._first: Failure | None = None
        self._to_choose = False
        self._began = now
        self._expected: float | None = None
        self._ticked = now
        self._swept = now - SWEEP_SECONDS
        self._moved = now
        self._beat_at = now
        self._restart_at = 0.0
        self._dumped_at: float | None = None
        self._fruitful = False
        self._reports_status = False
        self._never_joined = 0

    @property
    def failure(self) -> Failure | None:
        """The first failure of this attempt, as far as it is known."""
        if self._to_choose:
            self._to_choose = False
            first = first_of([*self._reports.values(), *self._judged])
            self._first = first.failure if first is not None else None
        return self._cause or self._first

    # -- messages ---------------------------------------------------------------------------

    def receive(self, number: int, message: FromHost, now: float) -> None:
        """A message of a host."""
        if not 0 <= number < len(self.hosts):
            return
        host = self.hosts[number]
        if host.lost:
            # Back too late: the job has been ended without it.
            self._order(messages.FinishJob(self.failure), number)
            return
        host.heard = now
        offset = now - message.sent
        host.offset = offset if host.offset is None else min(host.offset, offset)
        if isinstance(message, messages.Stopping):
            self._stop(message.signal, message.failure)
        elif message.attempt == self.attempt:
            self._take(number, message, now)
        if isinstance(message, messages.Hello):
            self._catch_up(number)

    def _take(self, number: int, message: FromHost, now: float) -> None:
        host = self.hosts[number]
        match message:
            case messages.Hello() | messages.Beat() | messages.Ended():
                self._update(host, message.position, now)
                self._look_for_end(number, message.position)
            case messages.Reported():
                self._add(host, message.report, now)
            case messages.Stacks():
                host.ranks = message.ranks

    def _update(self, host: JobHost, position: Position, now: float) -> None:
        self.news |= host.status is not position.status
        host.status, host.busy = position.status, position.busy
        host.joined, host.nproc = position.joined, position.nproc
        if position.moves != host.moves:
            host.moves, self._moved, self._dumped_at = position.moves, now, None
        self._reports_status |= host.joined > 0
        self._fruitful |= host.joined > 0 or position.lived
        if position.report is not None:
            self._add(host, position.report, now)

    def _look_for_end(self, number: int, position: Position) -> None:
        if position.ended is None or number not in self._active:
            return
        self._active.discard(number)
        self.hosts[number].ended = position.ended
        if position.ended and position.report is None:
            self._fail()

    def _add(self, host: JobHost, report: Report, now: float) -> None:
        if self.phase is JobPhase.STOPPING:
            return
        moment = report.time + host.offset if host.offset is not None else now
        # What a host reports later of the same rank knows more: the exit code, say.
        key = (report.failure.host, report.failure.rank)
        new = replace(report, time=min(moment, now))
        if self._reports.get(key) != new:
            self._reports[key] = new
            self._to_choose = self.news = True
        self._fail()

    def _judge(self, report: Report) -> None:
        """Add what no host has said of itself."""
        self._judged.append(report)
        self._to_choose = self.news = True
        self._fail()

    def _catch_up(self, number: int) -> None:
        """Tell a host that was away what it has missed."""
        if self.phase is JobPhase.STOPPING:
            self._order(messages.StopJob(15, self._cause), number)
        elif self.phase is JobPhase.ENDING and not self.hosts[number].over:
            self._order(messages.EndAttempt(self.attempt, self.failure), number)
        elif self.phase is JobPhase.RUNNING and self.attempt:
            self._order(messages.StartAttempt(self.attempt), number)
        elif self.phase is JobPhase.OVER:
            self._order(messages.FinishJob(self.failure), number)

    def _order(self, order: Order, host: int | None = None) -> None:
        self.orders.append((host, order))

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at the clock. To be called several times a second."""
        self._forgive(now)
        if now - self._beat_at >= self.policy.beat_seconds:
            self._beat_at = now
            self._order(messages.KeepAlive())
        if self.phase is JobPhase.OVER:
            return
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            self._look_for_lost(now)
            if self.phase is JobPhase.RUNNING:
                self._look_for_stall(now)
        if self.phase is JobPhase.WAITING:
            if now >= self._restart_at:
                self._start(now)
        elif not self._active:
            self._conclude(now)

    def _forgive(self, now: float) -> None:
        """Time in which this process itself did not run counts against nobody."""
        gap = now - self._ticked
        self._ticked = now
        if gap > self.policy.beat_seconds * 2:
            self._moved += gap
            for host in self.hosts:
                if host.heard is not None:
                    host.heard += gap

    def _look_for_lost(self, now: float) -> None:
        # Once ranks have joined, the agents of all hosts have been there; and an end waits for
        # nobody who takes his time to start.
        if self._expected is None and (self._reports_status or self.phase is not JobPhase.RUNNING):
            self._expected = now
        for number in sorted(self._active - {0}):
            host = self.hosts[number]
            if host.heard is None:
                self._look_for_absent(number, now)
            elif now - host.heard > self.policy.lost_host_timeout:
                seconds = self.policy.lost_host_timeout
                reason = f"was lost: no word from its agent for {seconds:g} s"
                self._lose(number, reason, host.heard)

    def _look_for_absent(self, number: int, now: float) -> None:
        start, silence = self.policy.start_timeout, self.policy.lost_host_timeout
        if now - self._began > start:
            reason = f"did not report within {start:g} s of the start{unreached(self._port)}"
            self._lose(number, reason, now)
        elif self._expected is not None and now - self._expected > silence:
            reason = f"was lost: no word from its agent for {silence:g} s"
            self._lose(number, reason, self._expected)

    def _lose(self, number: int, reason: str, moment: float) -> None:
        host = self.hosts[number]
        host.lost, host.status, self.news = True, HostStatus.LOST, True
        self._active.discard(number)
        if self.phase is not JobPhase.STOPPING:
            reason += held(host.place)
            failure = Failure(host.name, None, None, reason, "", self._output)
            self._judge(Report(failure, moment, Severity.LOST))

    def _look_for_stall(self, now: float) -> None:
        alive = [self.hosts[number] for number in sorted(self._active)]
        if not alive or any(not host.nproc or host.joined < host.nproc for host in alive):
            self._look_for_late_start(alive, now)
            return
        limit = self.policy.stall_limit(busy=any(host.busy for host in alive))
        if limit is None or now - self._moved <= limit:
            return
        if self._dumped_at is None:
            self._dumped_at = now
            for host in alive:
                host.ranks = None
            self._order(messages.DumpStacks(self.attempt))
        elif all(host.ranks is not None for host in alive) or (
            now - self._dumped_at > STACK_SECONDS
        ):
            ranks = [rank for host in alive for rank in host.ranks or ()]
            report = stalled_report(ranks, now - self._moved, alive[0].name, self._output)
            self._dumped_at = None
            self.notices.append(Notice("stalled", self.attempt, report.failure))
            self._judge(replace(report, time=now))

    def _look_for_late_start(self, alive: Sequence[JobHost], now: float) -> None:
        """Nobody waits at a launcher for the ranks of a restart to join."""
        late = now - self._moved > self.policy.start_timeout
        if not self.attempt or not self._reports_status or not late:
            return
        host = min(alive, key=lambda host: host.joined - host.nproc)
        reason = f"has ranks that did not join within {self.policy.start_timeout:g} s of a restart"
        failure = Failure(host.name, None, None, reason, "", self._output)
        self._judge(Report(failure, now, Severity.UNNAMED))

    # -- decisions --------------------------------------------------------------------------

    def _go(self, phase: JobPhase) -> None:
        self.phase, self.news = phase, True

    def _fail(self) -> None:
        if self.phase is JobPhase.RUNNING and self.policy.on_failure == "stop":
            self._go(JobPhase.ENDING)
            self._order(messages.EndAttempt(self.attempt, self.failure))

    def _stop(self, number: int, cause: Failure | None) -> None:
        """A host was told to stop: the whole job stops, and is not started again. ``cause``: what
        failed there, where nobody asked for the stop."""
        if self.phase in (JobPhase.STOPPING, JobPhase.OVER):
            return
        self._go(JobPhase.STOPPING)
        self._cause = cause
        self._order(messages.StopJob(number, cause))

    def leave(self, now: float) -> None:
        """This host goes, and a stop waits for nobody: what is known has to do."""
        if self.phase is JobPhase.STOPPING:
            self._conclude(now)

    def _conclude(self, now: float) -> None:
        """Every host has ended this attempt, or is lost."""
        failed = any(host.lost or host.ended for host in self.hosts)
        if self.phase is JobPhase.STOPPING:
            event = "stopped" if self._cause is None else "failed"
            self._finish(Notice(event, self.attempt, self.failure))
        elif not failed and not self._reports and not self._judged:
            self._finish(Notice("finished", self.attempt))
        elif self._may_restart():
            self._go(JobPhase.WAITING)
            wait = min(BACK_OFF_SECONDS * 2 ** len(self.restarts), MAX_BACK_OFF_SECONDS)
            self._restart_at = now + wait
            self.restarts.append({"attempt": self.attempt, "failure": plain(self.failure)})
            self.notices.append(Notice("restarted", self.attempt + 1, self.failure))
        else:
            self._finish(Notice("failed", self.attempt, self.failure))

    def _may_restart(self) -> bool:
        """Whether another attempt is left and makes sense: not where a host is lost, and not
        where the job has never got as far as joining, or twice in a row not."""
        self._never_joined = 0 if self._fruitful else self._never_joined + 1
        first_never_joined = self._never_joined > 0 and self._never_joined == self.attempt + 1
        return (
            self.attempt + 1 < self.policy.attempts
            and not any(host.lost for host in self.hosts)
            and not first_never_joined
            and self._never_joined < 2
        )

    def _start(self, now: float) -> None:
        self.attempt += 1
        self._go(JobPhase.RUNNING)
        self._reports, self._judged, self._to_choose, self._fruitful = {}, [], True, False
        self._dumped_at, self._moved = None, now
        self._active = set(range(len(self.hosts)))
        for host in self.hosts:
            host.ended, host.joined, host.busy, host.moves = None, 0, False, -1
            host.status = HostStatus.STARTING
        self._order(messages.StartAttempt(self.attempt))

    def _finish(self, notice: Notice) -> None:
        self._go(JobPhase.OVER)
        self.notices.append(notice)
        self._order(messages.FinishJob(self.failure))

    def summary(self) -> dict[str, Any]:
        """What ``query`` shows of the job."""
        return {
            "phase": self.phase.value,
            "attempt": self.attempt + 1,
            "attempts": self.policy.attempts,
            "failure": plain(self.failure),
            "hosts": {str(n): host.status.value for n, host in enumerate(self.hosts)},
            "restarts": list(self.restarts),
        }
