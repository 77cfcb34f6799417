"""What one host does: its attempt at the job, what it reports, the orders that it follows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flagscale import files
from flagscale.hosts.kernel import out_of_memory_kills
from flagscale.launcher.layout import HostFiles, status_directory
from flagscale.launcher.liveness import messages
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.diagnosis import End, Failure, Report, Severity, host_report
from flagscale.launcher.liveness.messages import FromHost, HostStatus, Order, Position
from flagscale.launcher.liveness.watch import RankWatch, StackCall, size_of
from flagscale.status import ATTEMPT_VARIABLE, STATUS_DIR_VARIABLE

LOOK_SECONDS = 0.25
# How long a program that reports nothing has to run for its end to count as no false start.
LIVED_SECONDS = 30.0
_STACK_SECONDS = 4.0
_MAX_TRACEBACK_CHARACTERS = 20_000


class Member:
    """One host's part of the job. What it has to say collects in ``out``."""

    def __init__(
        self,
        number: int,
        host: HostFiles,
        run_id: str,
        grace: float,
        command: Sequence[str],
        earlier_starts: int = 0,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.host = host
        self.attempt_number = 0
        self.attempt = Attempt(run_id, grace)
        self.signal: int | None = None
        """What the job was stopped by, if it was."""
        self.cause: Failure | None = None
        """Why it was stopped, where nobody had asked for that."""
        self.failure: Failure | None = None
        """The job's first failure, as far as this host has been told."""
        self.finished = False
        """Whether nothing will be started any more."""
        self.lost = False
        """Whether the link to the coordinator was lost for good."""
        self.out: list[FromHost] = []
        self._run_id = run_id
        self._grace = grace
        self._command = list(command)
        self._earlier_starts = earlier_starts
        self._secrets = dict(secrets or {})
        self._watch = RankWatch(host.run_dir / status_directory(0))
        self._looked = 0.0
        self._kills_before: int | None = None
        self._output_start = 0
        self._reported: Report | None = None
        self._told_ended = False
        self._call: StackCall | None = None
        self._called_at = 0.0
        self._ended_by_order = 0.0

    # -- life -------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Start attempt ``number``."""
        self.attempt_number = number
        self.attempt = Attempt(self._run_id, self._grace)
        directory = self.host.run_dir / status_directory(number)
        self._watch = RankWatch(directory)
        self._kills_before = out_of_memory_kills()
        self._output_start = size_of(self.host.output)
        self._reported, self._told_ended, self._call = None, False, None
        self.failure = None
        environment = {
            **os.environ,
            **self._secrets,
            STATUS_DIR_VARIABLE: str(directory),
            ATTEMPT_VARIABLE: str(number + self._earlier_starts),
        }
        try:
            files.make_private_directory(directory)
            self.attempt.start(self._command, environment)
        except OSError as error:
            say(f"cannot start {self._command[0]}: {error.strerror}")
            self.attempt.code, self.attempt.stage = 127, Stage.OVER
            self.attempt.ended_at = time.time()

    @property
    def over(self) -> bool:
        """Whether this host has done its part and waits for nobody."""
        ended = self.attempt.stage is Stage.OVER
        return ended and (self.finished or self.lost or self.signal is not None)

    @property
    def met(self) -> bool:
        """Whether the ranks of all hosts have met, or will not meet any more."""
        return bool(self._watch.joined) or self.attempt.stage is not Stage.RUNNING

    def step(self, now: float) -> None:
        """Look at the ranks and go on with what is to be done."""
        self.attempt.step(now)
        if now - self._looked >= LOOK_SECONDS or self.attempt.stage is Stage.OVER:
            self._looked = now
            if not self._told_ended:
                self._watch.look()
                self._report_early()
        if self._call is not None and (
            self._call.complete(now) or now - self._called_at > _STACK_SECONDS
        ):
            self.out.append(messages.Stacks(*self._head(), self._call.ranks()))
            self._call = None
        if self.attempt.stage is Stage.OVER and not self._told_ended:
            self._told_ended = True
            self._reported = self._final_report() or self._reported
            self.out.append(messages.Ended(*self._head(), self._position()))

    # -- what it says -----------------------------------------------------------------------

    def hello(self) -> messages.Hello:
        """Everything that the coordinator has to know of a host that it doesn't know."""
        if self.signal is not None:
            self._say_stopping(self.signal)
        return messages.Hello(*self._head(), self._position())

    def beat(self) -> messages.Beat:
        return messages.Beat(*self._head(), self._position())

    def _head(self) -> tuple[int, int, float]:
        """What every message begins with."""
        return self.number, self.attempt_number, time.time()

    def _position(self) -> Position:
        watch, attempt = self._watch, self.attempt
        lived = not watch.events and time.monotonic() - attempt.began >= LIVED_SECONDS
        return Position(
            status=self.status,
            joined=len(watch.joined),
            nproc=self.host.nproc,
            moves=watch.moves,
            busy=watch.busy,
            lived=lived,
            ended=attempt.code if self._told_ended else None,
            report=self._reported,
        )

    @property
    def status(self) -> HostStatus:
        if self.attempt.stage is Stage.OVER:
            return HostStatus.FINISHED if self.attempt.code == 0 else HostStatus.FAILED
        if self.attempt.ending:
            return HostStatus.ENDING
        joined = len(self._watch.joined) >= self.host.nproc
        return HostStatus.RUNNING if joined else HostStatus.STARTING

    def _report_early(self) -> None:
        """Name a rank as soon as it says that it failed; its exit code comes later."""
        if self._watch.failed and self._reported is None and not self.attempt.ending:
            self._reported = _short(host_report(self.host, self._watch.events, None))
            if self._reported is not None:
                self.out.append(messages.Reported(*self._head(), self._reported))

    def _final_report(self) -> Report | None:
        """What failed here, now that torchrun has ended; None for what others brought about."""
        attempt = self.attempt
        if self.signal is not None or not attempt.code:
            return None
        counted = out_of_memory_kills(self._kills_before)
        late = self._failed_late()
        events = {
            rank: [row for row in rows if row.event != "failed" or rank not in late]
            for rank, rows in self._watch.events.items()
        }
        end = End(attempt.code, attempt.ended_at, counted, attempt.killed, late)
        report = host_report(self.host, events, end, output_start=self._output_start)
        ours = attempt.killed_command and report is not None and report.failure.rank is None
        if report is not None and attempt.ending and (ours or report.severity >= Severity.UNNAMED):
            return None
        return _short(report)

    def _failed_late(self) -> set[int]:
        """The ranks that failed once this host had been told to end its part: they lost a peer."""
        if not self.attempt.ending:
            return set()
        # Events tell their time in milliseconds.
        limit = self._ended_by_order + 0.001
        rows = ((rank, row) for rank, rows in self._watch.events.items() for row in rows)
        return {rank for rank, row in rows if row.event == "failed" and row.time > limit}

    # -- what it is told --------------------------------------------------------------------

    def obey(self, order: Order, now: float) -> None:
        """Follow an order of the coordinator."""
        match order:
            case messages.StopJob():
                self.stop(order.signal, tell=False, cause=order.failure)
            case messages.FinishJob():
                self.failure = order.failure or self.failure
                self.finished = True
                self._end_failed()
            case messages.StartAttempt() if order.attempt == self.attempt_number + 1:
                if self.attempt.stage is Stage.OVER and self.signal is None:
                    say(f"attempt {order.attempt + 1} starts")
                    self.begin(order.attempt)
            case messages.EndAttempt() if order.attempt == self.attempt_number:
                self.failure = order.failure or self.failure
                self._end_failed()
            case messages.DumpStacks() if order.attempt == self.attempt_number:
                if self._call is None and self.attempt.stage is Stage.RUNNING:
                    self._called_at = now
                    self._call = StackCall(self.host, self._watch, self.attempt.ranks())

    def stop(self, number: int, *, tell: bool = True, cause: Failure | None = None) -> None:
        """End the job in order, with the whole grace period, and start it no more. ``cause``: what
        failed, where that is why."""
        if self.signal is None:
            self.signal, self.cause = number, cause
            self.attempt.end(failed=False)
            if tell:
                self._say_stopping(number)

    def _say_stopping(self, number: int) -> None:
        self.out.append(messages.Stopping(*self._head(), number, self.cause))

    def lose(self, failure: Failure) -> None:
        """The coordinator, or the way to it, is gone: end everything here."""
        if not self.lost:
            self.lost = True
            self.failure = failure
            self._end_failed()

    def _end_failed(self) -> None:
        if self.attempt.stage is Stage.RUNNING and not self.attempt.ending:
            self._ended_by_order = time.time()
            self._watch.look()
            failed = {r for r, rows in self._watch.events.items() if rows[-1].event == "failed"}
            self.attempt.end(failed=True, dying=failed)

    def code(self) -> int:
        """The exit code of this host: the job's own, 128+n where it was stopped."""
        code = self.attempt.code or 0
        if self.cause is not None:
            return code or 1
        if self.signal is not None:
            return 128 + self.signal if code else 0
        if self.attempt.ending and code:
            return 1
        return 1 if self.lost or (code == 0 and self.attempt.ending) else code


def _short(report: Report | None) -> Report | None:
    """A report that fits into a message, whatever a program wrote."""
    if report is None or len(report.failure.traceback) + len(report.failure.reason) < 8000:
        return report
    failure = report.failure
    trace = failure.traceback[-_MAX_TRACEBACK_CHARACTERS:]
    shortened = replace(failure, reason=failure.reason[:4000], traceback=trace)
    return replace(report, failure=shortened)
