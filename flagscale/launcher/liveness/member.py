"""One host of a job: its attempt, its messages to the coordinator, and the orders it follows. Part
of the agent of every host, host 0 included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from flagscale import files
from flagscale.flight_records import flight_directory
from flagscale.health.messages import HealthEvent
from flagscale.hosts.kernel import count_oom_kills
from flagscale.launcher.layout import HostFiles, status_directory
from flagscale.launcher.liveness import messages
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.diagnosis import (
    Failure,
    FailureKind,
    FailureReport,
    TorchrunExit,
    diagnose_host,
)
from flagscale.launcher.liveness.messages import HostMessage, HostProgress, HostStatus, Order
from flagscale.launcher.liveness.rank_exits import RankExits
from flagscale.launcher.liveness.watch import (
    RankWatch,
    RecordPoll,
    StackDump,
    file_size,
    read_last_records,
)
from flagscale.status import (
    ATTEMPT_VARIABLE,
    HOST_VARIABLE,
    STATUS_DIR_VARIABLE,
    read_exit_code,
)

REFRESH_SECONDS = 0.25
# Seconds that a training program without status reports has to run so that its end is no failed
# start.
MIN_RUN_SECONDS = 30.0
_STACK_TIMEOUT_SECONDS = 6.0
_MAX_TRACEBACK_CHARACTERS = 20_000


class Member:
    """One host's part of the job. The caller sends and removes the messages in ``outgoing``."""

    def __init__(
        self,
        node_rank: int,
        host: HostFiles,
        run_id: str,
        grace_seconds: float,
        command: Sequence[str],
        earlier_starts: int = 0,
        secrets: Mapping[str, str] | None = None,
        *,
        reports_status: bool = True,
    ) -> None:
        self.node_rank = node_rank
        self.host = host
        self.attempt_number = 0
        self.other_children: Callable[[], Collection[int]] | None = None
        """Returns the pids of children of this process that are no part of the run; if None, those
        that it has when an attempt starts."""
        self._reports_status = reports_status
        self.hang_detection_timeout = 0.0
        """Seconds after which an operation that has not ended is overdue; 0: never."""
        self._min_run_seconds = MIN_RUN_SECONDS if reports_status else 0.0
        self.attempt = Attempt(run_id, grace_seconds)
        self.stop_signal: int | None = None
        """Signal that stopped the job; None if it was not stopped."""
        self.stop_cause: Failure | None = None
        """Failure that caused the stop; None if a user requested it."""
        self.failure: Failure | None = None
        """First failure of the job, as the coordinator sent it."""
        self.job_finished = False
        """True if nothing will be started any more."""
        self.has_given_up = False
        """True if the coordinator was lost, and this host follows no other one."""
        self.outgoing: list[HostMessage] = []
        self._run_id = run_id
        self._grace_seconds = grace_seconds
        self._command = list(command)
        self._earlier_starts = earlier_starts
        self._secrets = dict(secrets or {})
        self._watch = RankWatch(host.run_dir / status_directory(0))
        self._record_poll = self._create_poll()
        self._rank_exits = RankExits(host, self.attempt, self._watch.directory)
        self._last_refresh_at = 0.0
        self._oom_kills_at_start: int | None = None
        self._output_start = 0
        self._failure_report: FailureReport | None = None
        self._end_sent = False
        self._stack_dump: StackDump | None = None
        self._stack_dump_at = 0.0
        self._stack_request = 0
        self._end_ordered_at = 0.0
        self.addresses: Sequence[str] = ()
        """Addresses of all hosts by number, if the ranks of the first one may move to another."""
        self.is_spare = False
        """True while this host waits to take the place of another host."""

    # -- attempt ---------------------------------------------------------------------------

    def start_attempt(self, number: int) -> None:
        """Start attempt ``number``."""
        self.attempt_number = number
        self.attempt = Attempt(self._run_id, self._grace_seconds, self.other_children)
        directory = self.host.run_dir / status_directory(number)
        self._watch = RankWatch(directory)
        self._record_poll = self._create_poll()
        self._rank_exits = RankExits(self.host, self.attempt, directory)
        self._oom_kills_at_start = count_oom_kills()
        self._output_start = file_size(self.host.output)
        self._failure_report, self._end_sent, self._stack_dump = None, False, None
        self.failure = None
        environment = {
            **os.environ,
            **self._secrets,
            STATUS_DIR_VARIABLE: str(directory),
            ATTEMPT_VARIABLE: str(number + self._earlier_starts),
            HOST_VARIABLE: self.host.name,
        }
        try:
            files.make_private_directory(directory)
            self.attempt.start(self._command, environment)
        except OSError as error:
            log_line(f"cannot start {self._command[0]}: {error.strerror}")
            self.attempt.exit_code, self.attempt.stage = 127, Stage.OVER
            self.attempt.end_time = time.time()

    def wait_as_spare(self) -> None:
        """Start nothing until the coordinator orders to take the place of another host."""
        self.is_spare = True
        self.attempt.stage, self._end_sent = Stage.OVER, True

    def _start_ordered(self, order: messages.StartAttempt) -> None:
        """Start the attempt of an order, at the place that this host has in it."""
        has_place = self.node_rank in order.places
        # A host may have missed an attempt that a lost coordinator has ordered.
        is_next = order.attempt > self.attempt_number and self.attempt.stage is Stage.OVER
        can_start = has_place if self.is_spare else is_next and (has_place or not order.places)
        if not can_start or self.stop_signal is not None:
            return
        if has_place:
            self._take_place(order.places)
        log_line(f"attempt {order.attempt + 1} starts")
        self.start_attempt(order.attempt)

    def _take_place(self, places: Sequence[int]) -> None:
        """Take this host's node rank among these hosts from the next attempt on."""
        place, host_count = places.index(self.node_rank), len(places)
        if self.is_spare:
            log_line(f"this host joins the job as node rank {place}")
        self.is_spare = False
        ranks = self.host.nproc
        self.host = replace(self.host, first_rank=place * ranks)
        options: dict[str, object] = {"--node_rank": place, "--nnodes": host_count}
        if self.addresses:
            options["--master_addr"] = self.addresses[places[0]]
        if not self._reports_status:
            # A command, whose ranks are started by a program with two more options.
            options |= {"--first_rank": place * ranks, "--world_size": host_count * ranks}
        values = {name: str(value) for name, value in options.items()}
        self._command = _replace_options(self._command, values)

    def _poll_records(self, now: float) -> None:
        was_overdue = self._record_poll.overdue_since is not None
        self._record_poll.tick(now)
        if was_overdue is not (self._record_poll.overdue_since is not None):
            self.outgoing.append(self.heartbeat())

    def _create_poll(self) -> RecordPoll:
        return RecordPoll(
            self.host,
            self._watch,
            self.hang_detection_timeout,
            reports_status=self._reports_status,
        )

    @property
    def is_over(self) -> bool:
        """True if this host has done its part and waits for no other."""
        ended = self.attempt.stage is Stage.OVER
        return ended and (self.job_finished or self.has_given_up or self.stop_signal is not None)

    @property
    def ranks_joined(self) -> bool:
        """True if the ranks of all hosts have joined, or will not join any more."""
        has_ended = self.attempt.stage is not Stage.RUNNING and not self.is_spare
        return bool(self._watch.joined_ranks) or has_ended

    def tick(self, now: float) -> None:
        """Read the status of the ranks, and perform the actions that are due."""
        self.attempt.tick(now)
        if now - self._last_refresh_at >= REFRESH_SECONDS or self.attempt.stage is Stage.OVER:
            self._last_refresh_at = now
            if not self._end_sent:
                self._watch.refresh()
                self._rank_exits.refresh(now)
                self._send_early_failure()
            if self.attempt.stage is Stage.RUNNING and self._stack_dump is None:
                self._poll_records(now)
        if self._stack_dump is not None and (
            self._stack_dump.is_complete(now) or now - self._stack_dump_at > _STACK_TIMEOUT_SECONDS
        ):
            self.outgoing.append(
                messages.RankStacks(
                    *self._message_fields(),
                    self._stack_dump.rank_progress(),
                    self._stack_request,
                )
            )
            if self._stack_dump.asks_for_records:
                directory = flight_directory(self._watch.directory)
                log_line(f"flight records of this host's ranks, for torchfrtrace: {directory}")
            self._stack_dump = None
        if self.attempt.stage is Stage.OVER and not self._end_sent:
            self._end_sent = True
            self._failure_report = self._diagnose_end() or self._failure_report
            self._send_last_records()
            self.outgoing.append(messages.AttemptEnded(*self._message_fields(), self._progress()))

    def _send_last_records(self) -> None:
        """Send the flight records of ranks that failed, from which their peers' failure follows."""
        if self.attempt.exit_code:
            directory = self._watch.directory
            finished = [r for r in self.host.ranks if read_exit_code(directory, r) == 0]
            records = read_last_records(self.host, self._watch)
            self.outgoing.append(
                messages.LastRecords(*self._message_fields(), records, tuple(finished))
            )

    # -- messages --------------------------------------------------------------------------

    def hello(self, job_state: messages.JobState | None = None) -> messages.Hello:
        """Return the first message on a connection, with the complete status of this host and the
        state of the job that it has accepted.
        """
        if self.stop_signal is not None:
            self._send_stop_signalled(self.stop_signal)
        return messages.Hello(*self._message_fields(), self._progress(), job_state)

    def confirm_state(self, state: messages.JobState) -> messages.JobStateAccepted:
        """Return the reply to a state of the job that this host has accepted."""
        return messages.JobStateAccepted(*self._message_fields(), *state.version)

    def heartbeat(self) -> messages.Heartbeat:
        """Return the periodic message with this host's progress."""
        return messages.Heartbeat(*self._message_fields(), self._progress())

    def _message_fields(self) -> tuple[int, int, float]:
        """Return the fields that every message begins with."""
        return self.node_rank, self.attempt_number, time.time()

    def _progress(self) -> HostProgress:
        watch, attempt, now = self._watch, self.attempt, time.monotonic()
        lifetime_seconds = now - attempt.start_time
        has_run_long = not watch.events and lifetime_seconds >= self._min_run_seconds
        return HostProgress(
            status=self.status,
            joined=len(watch.joined_ranks),
            nproc=0 if self.is_spare else self.host.nproc,
            progress_count=watch.progress_count,
            in_busy_activity=watch.in_busy_activity(self._rank_exits.ended_ranks),
            has_run_long=has_run_long and not self.is_spare,
            exit_code=attempt.exit_code if self._end_sent else None,
            failure_report=self._failure_report,
            ended_ranks=len(self._rank_exits.ended_ranks),
            early_exits=self._rank_exits.find_early_exits(watch.finished_ranks, now),
            overdue_since=self._record_poll.overdue_since,
        )

    @property
    def status(self) -> HostStatus:
        if self.is_spare:
            return HostStatus.SPARE
        if self.attempt.stage is Stage.OVER:
            return HostStatus.FINISHED if self.attempt.exit_code == 0 else HostStatus.FAILED
        if self.attempt.is_ending:
            return HostStatus.ENDING
        joined = len(self._watch.joined_ranks) >= self.host.nproc
        return HostStatus.RUNNING if joined else HostStatus.STARTING

    def _send_early_failure(self) -> None:
        """Send a rank's failure as soon as its status shows it; its exit code follows later."""
        if self._watch.has_failure and self._failure_report is None and not self.attempt.is_ending:
            self._failure_report = _truncate_report(
                diagnose_host(self.host, self._watch.events, None)
            )
            if self._failure_report is not None:
                self.outgoing.append(
                    messages.RankFailed(*self._message_fields(), self._failure_report)
                )

    def _diagnose_end(self) -> FailureReport | None:
        """Return the failure on this host after torchrun has ended; None if another host
        caused it.
        """
        attempt = self.attempt
        if self.stop_signal is not None or not attempt.exit_code:
            return None
        oom_kills = count_oom_kills(self._oom_kills_at_start)
        late_ranks = self._find_late_failures()
        events = {
            rank: [
                event for event in rank_events if event.event != "failed" or rank not in late_ranks
            ]
            for rank, rank_events in self._watch.events.items()
        }
        torchrun_exit = TorchrunExit(
            attempt.exit_code, attempt.end_time, oom_kills, attempt.killed_pids, late_ranks
        )
        report = diagnose_host(self.host, events, torchrun_exit, output_start=self._output_start)
        if report is not None and attempt.is_ending:
            killed_by_agent = attempt.killed_command and report.failure.rank is None
            if killed_by_agent or report.kind >= FailureKind.UNEXPLAINED:
                return None
        return _truncate_report(report)

    def _find_late_failures(self) -> set[int]:
        """Return the ranks that failed after this host was ordered to end its part: they lost a
        peer.
        """
        if not self.attempt.is_ending:
            return set()
        # The times of events have a resolution of 1 ms.
        latest_time = self._end_ordered_at + 0.001
        return {
            rank
            for rank, events in self._watch.events.items()
            for event in events
            if event.event == "failed" and event.time > latest_time
        }

    def reply_health(self, step: int, event: HealthEvent | None, problem: str) -> None:
        """Send the reply to an order of a hardware check."""
        self.outgoing.append(messages.HealthReply(*self._message_fields(), step, event, problem))

    # -- orders ----------------------------------------------------------------------------

    def follow_order(self, order: Order, now: float) -> None:
        """Follow an order of the coordinator."""
        match order:
            case messages.StopJob():
                self.stop(order.signal, send_message=False, cause=order.failure)
            case messages.FinishJob():
                self.failure = order.failure or self.failure
                self.job_finished = True
                self._end_after_failure()
            case messages.StartAttempt():
                self._start_ordered(order)
            case messages.EndAttempt() if order.attempt == self.attempt_number:
                self.failure = order.failure or self.failure
                self._end_after_failure()
            case messages.PauseAttempt() if order.attempt == self.attempt_number:
                self.attempt.end(failed=False)
            case messages.DumpStacks() if order.attempt == self.attempt_number:
                # A dump in progress replies to this request, too.
                self._stack_request = order.request
                if self._stack_dump is None and self.attempt.stage is Stage.RUNNING:
                    self._stack_dump_at = now
                    self._stack_dump = StackDump(
                        self.host,
                        self._watch,
                        self.attempt.find_ranks(),
                        sends_signals=self._reports_status,
                    )

    def stop(
        self, signal_number: int, *, send_message: bool = True, cause: Failure | None = None
    ) -> None:
        """End the job in order, with the whole grace period, and do not start it again.

        Args:
            send_message: Send :class:`~.messages.StopSignalled`. False if the coordinator ordered
                the stop.
            cause: Failure that caused the stop, unless a user requested it.
        """
        if self.stop_signal is None:
            self.stop_signal, self.stop_cause = signal_number, cause
            self.attempt.end(failed=False)
            if send_message:
                self._send_stop_signalled(signal_number)

    def _send_stop_signalled(self, signal_number: int) -> None:
        self.outgoing.append(
            messages.StopSignalled(*self._message_fields(), signal_number, self.stop_cause)
        )

    def end_ranks_until_successor(self, failure: Failure) -> None:
        """End the attempt on this host, because the coordinator or the link to it is lost. A
        successor may start another one.
        """
        self.failure = failure
        self._end_after_failure()

    def end_job_without_coordinator(self, failure: Failure) -> None:
        """End everything on this host, because no coordinator can be reached any more."""
        if not self.has_given_up:
            self.has_given_up = True
            self.end_ranks_until_successor(failure)

    def _end_after_failure(self) -> None:
        if self.attempt.stage is Stage.RUNNING and not self.attempt.is_ending:
            self._end_ordered_at = time.time()
            self._watch.refresh()
            failed_ranks = {
                rank for rank, events in self._watch.events.items() if events[-1].event == "failed"
            }
            self.attempt.end(failed=True, self_ending_ranks=failed_ranks)

    def exit_code(self) -> int:
        """Return the exit code of this host: the job's own, or 128+n if it was stopped."""
        code = self.attempt.exit_code or 0
        if self.stop_cause is not None:
            return code or 1
        if self.stop_signal is not None:
            return 128 + self.stop_signal if code else 0
        if self.attempt.is_ending and code:
            return 1
        return 1 if self.has_given_up or (code == 0 and self.attempt.is_ending) else code


def _replace_options(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command with other values of these options, as far as it has them."""
    words = list(command)
    for name, value in values.items():
        if name in words:
            words[words.index(name) + 1] = value
    return words


def _truncate_report(report: FailureReport | None) -> FailureReport | None:
    """Return a report that fits into a message, whatever the program wrote."""
    if report is None or len(report.failure.traceback) + len(report.failure.reason) < 8000:
        return report
    failure = report.failure
    trace = failure.traceback[-_MAX_TRACEBACK_CHARACTERS:]
    shortened = replace(failure, reason=failure.reason[:4000], traceback=trace)
    return replace(report, failure=shortened)
