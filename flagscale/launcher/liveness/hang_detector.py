"""Detection of hangs in an attempt, and selection of the rank that is to blame.

Ranks that make no progress for too long are a stall, which ends the attempt. Before that, ranks may
wait in an overdue collective, which is explained while the job continues. To explain either, hosts
send the stacks and the digests of the flight records of their ranks when they are asked. Ranks that
failed in a collective have written their flight records before, which show whether the ranks
disagreed about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport, host_failure
from flagscale.launcher.liveness.hang import (
    HangFinding,
    explain_failed_collective,
    explain_hang,
)
from flagscale.launcher.liveness.job import JobHost, Notice
from flagscale.launcher.liveness.messages import (
    DumpStacks,
    LastRecords,
    Order,
    RankProgress,
    RankStacks,
)
from flagscale.launcher.liveness.options import Policy
from flagscale.launcher.liveness.places import Places

# Longest wait for the replies of hosts to a request.
STACK_TIMEOUT_SECONDS = 8.0
# Largest difference at which two call times are those of the same operation.
_CALL_TIME_TOLERANCE_SECONDS = 1.0

HangAction = Order | Notice | FailureReport
"""Order to all hosts, notice to pass on, or failure that ends the attempt."""


class HangDetector:
    """Detector of hangs in one attempt, without I/O.

    It decides when ranks have made no progress for too long, when hosts have to send the stacks of
    their ranks, which rank is to blame, and whether a failure is the consequence of a hang.

    The caller passes on progress (:meth:`record_progress`) and the replies and last records of
    hosts (:meth:`receive`), calls :meth:`tick` regularly with the last reported progress of each
    host (:class:`~.job.JobHost`), and performs the actions that it returns. Each attempt has a
    detector of its own.

    Attributes:
        hang_remark: Explanation of the collective that ranks wait in now; empty if there is none.
        failure_remark: Explanation of the collective that ranks failed in; empty if there is none,
            or if it was known while they waited.
    """

    def __init__(
        self, policy: Policy, places: Places, attempt: int, output: Path, now: float
    ) -> None:
        """Begin with the start of the attempt.

        Args:
            policy: Timeouts.
            places: Hosts of the job by node rank.
            attempt: Number of the attempt.
            output: Log file to name in failures that have none of their own.
            now: Current time.
        """
        self.hang_remark = self.failure_remark = ""
        self._policy = policy
        self._places = places
        self._attempt = attempt
        self._output_path = output
        self._last_progress_at = now
        self._rank_stacks: dict[int, tuple[RankProgress, ...]] = {}
        """Ranks of each host that has replied to the last request, by host."""
        self._last_records: dict[int, LastRecords] = {}
        """Records that ranks wrote when they failed, by host."""
        self._request_number = 0
        self._request_time = now  # of the last request
        # Start of the timeout of the request for a stall, until that is reported or over.
        self._stacks_requested_at: float | None = None
        # Start of the timeout of the request for an overdue collective, until that is over.
        self._records_requested_at: float | None = None
        self._overdue_since: dict[int, float] = {}
        """Start of the overdue operation whose records were requested, by host that waits in it."""
        self._is_stall_reported = False  # the stall or late start since the last progress
        self._is_explained = False  # the overdue collective, or nothing explains it
        self._cause: FailureReport | None = None  # of the overdue collective, if it is known
        self._is_cause_in_collective = False

    # -- events -----------------------------------------------------------------------------

    def record_progress(self, now: float) -> None:
        """Record that a rank has made progress."""
        self._last_progress_at, self._stacks_requested_at = now, None
        self._is_stall_reported = False

    def receive(self, host: int, message: RankStacks | LastRecords) -> None:
        """Process a message of a host in this attempt."""
        if isinstance(message, RankStacks):
            if message.request == self._request_number:
                self._rank_stacks[host] = message.ranks
        else:
            self._last_records[host] = message

    def extend_timeouts(self, shift: Callable[[float], float]) -> None:
        """Extend all timeouts by the time in which the coordinator itself did not run.

        Args:
            shift: Returns the start of a timeout, moved by that time.
        """
        self._last_progress_at = shift(self._last_progress_at)
        if self._stacks_requested_at is not None:
            self._stacks_requested_at = shift(self._stacks_requested_at)
        if self._records_requested_at is not None:
            self._records_requested_at = shift(self._records_requested_at)

    def tick(
        self, active_hosts: Mapping[int, JobHost], now: float, *, ranks_have_joined: bool
    ) -> list[HangAction]:
        """Return the actions that are due, in order.

        Args:
            active_hosts: Hosts whose part of the attempt is not over, by ascending number.
            now: Current time.
            ranks_have_joined: True if the ranks have joined in any attempt.
        """
        if not active_hosts:
            return []
        return [
            *self._detect_stall(active_hosts, now, ranks_have_joined=ranks_have_joined),
            *self._explain_overdue(active_hosts, now),
        ]

    # -- stall ------------------------------------------------------------------------------

    def _detect_stall(
        self, active_hosts: Mapping[int, JobHost], now: float, *, ranks_have_joined: bool
    ) -> Iterator[HangAction]:
        """Detect that no rank has made progress for too long. Each stall is reported once, because
        the job continues with ``on_failure: leave``.
        """
        if self._is_stall_reported:
            return
        hosts = list(active_hosts.values())
        if any(not host.nproc or host.joined < host.nproc for host in hosts):
            if self._attempt and ranks_have_joined:
                yield from self._detect_late_start(hosts, now)
            return
        limit_seconds = self._policy.stall_limit_seconds(
            in_busy_activity=any(host.in_busy_activity for host in hosts)
        )
        if limit_seconds is None or now - self._last_progress_at <= limit_seconds:
            self._stacks_requested_at = None  # the limit may have changed since the request
            return
        if self._stacks_requested_at is None:
            self._stacks_requested_at, self._records_requested_at = now, None
            yield self._request_stacks(now)
        elif self._is_request_over(active_hosts, now, self._stacks_requested_at):
            ranks = self._list_ranks(active_hosts)
            report = stalled_report(
                ranks,
                now - self._last_progress_at,
                hosts[0].name,
                self._output_path,
                self._find_hang(ranks),
                silent_host=next(
                    (
                        host.name
                        for number, host in active_hosts.items()
                        if number not in self._rank_stacks
                    ),
                    "",
                ),
            )
            self._stacks_requested_at, self._is_stall_reported = None, True
            yield Notice("stalled", self._attempt, report.failure)
            yield replace(report, time=now)

    def _detect_late_start(self, hosts: Sequence[JobHost], now: float) -> Iterator[HangAction]:
        """Detect a restart whose ranks do not join. At the first start, the launcher waits for them
        and times out.
        """
        if now - self._last_progress_at <= self._policy.start_timeout:
            return
        self._is_stall_reported = True
        # A host that has not reported its number of ranks comes first.
        host = min(hosts, key=lambda host: (bool(host.nproc), host.joined - host.nproc))
        seconds = self._policy.start_timeout
        reason = f"has ranks that did not join within {seconds:g} s of a restart"
        failure = host_failure(host.name, reason, self._output_path)
        yield FailureReport(failure, now, FailureKind.UNEXPLAINED)

    # -- stacks and flight records ----------------------------------------------------------

    def _request_stacks(self, now: float) -> DumpStacks:
        self._rank_stacks.clear()
        self._request_number += 1
        self._request_time = now
        return DumpStacks(self._attempt, self._request_number)

    def _is_request_over(
        self, active_hosts: Mapping[int, JobHost], now: float, requested_at: float
    ) -> bool:
        """Return True if all active hosts have replied, or the time for it has passed."""
        return now - requested_at > STACK_TIMEOUT_SECONDS or all(
            number in self._rank_stacks for number in active_hosts
        )

    def _list_ranks(self, active_hosts: Mapping[int, JobHost]) -> list[RankProgress]:
        """Return the replies of all hosts to the last request."""
        return [rank for number in active_hosts for rank in self._rank_stacks.get(number, ())]

    def _find_hang(self, ranks: Sequence[RankProgress]) -> HangFinding | None:
        """Return the cause of a hang. The host of a rank that has ended is derived from the number
        of ranks per host, and empty if a host has not reported its number.
        """
        finding = explain_hang(ranks)
        if finding is None or finding.host:
            return finding
        host = self._places.find_host(finding.rank)
        return finding if host is None else replace(finding, host=host.name)

    # -- overdue collectives ----------------------------------------------------------------

    def _explain_overdue(
        self, active_hosts: Mapping[int, JobHost], now: float
    ) -> Iterator[HangAction]:
        """Explain a collective that ranks have been waiting in for long. The job continues: the
        collective may be slow, and has a timeout of its own.
        """
        overdue_since = {
            number: host.overdue_since
            for number, host in active_hosts.items()
            if host.overdue_since is not None
        }
        if self._is_still_overdue(overdue_since):
            self._overdue_since = {**overdue_since, **self._overdue_since}
        else:
            if self.hang_remark:
                yield Notice("hang", self._attempt, remark="the job goes on")
            self._records_requested_at, self._cause = None, None
            self._is_explained, self.hang_remark = False, ""
        if not overdue_since or self._is_explained or self._stacks_requested_at is not None:
            return
        if self._records_requested_at is None:
            self._records_requested_at = now
            self._overdue_since = overdue_since
            yield self._request_stacks(now)
        elif self._is_request_over(active_hosts, now, self._records_requested_at):
            ranks = self._list_ranks(active_hosts)
            finding = self._find_hang(ranks)
            self._is_explained = True
            if finding is None:
                return
            report = explained_report(finding, ranks, "the others timed out", self._output_path)
            self._cause = replace(report, time=self._request_time)
            self._is_cause_in_collective = finding.in_collective
            self.hang_remark = finding.describe()
            yield Notice("hang", self._attempt, remark=self.hang_remark)

    def _is_still_overdue(self, overdue_since: Mapping[int, float]) -> bool:
        """Return True if a host still waits in an operation whose records were requested."""
        return any(
            abs(since - self._overdue_since[number]) <= _CALL_TIME_TOLERANCE_SECONDS
            for number, since in overdue_since.items()
            if number in self._overdue_since
        )

    def find_cause_of(self, report: FailureReport) -> FailureReport | None:
        """Return the cause of the overdue collective if a rank has failed while it was overdue, as
        ranks do when it times out. None if the rank has failed before, or is itself the cause and
        does not wait in the collective: then it has a reason of its own.

        Args:
            report: Failure of the rank, with the time of the coordinator's clock.
        """
        cause = self._cause
        if cause is None or report.time < cause.time:
            return None
        is_own_failure = report.failure.rank == cause.failure.rank
        return cause if self._is_cause_in_collective or not is_own_failure else None

    def explain_failed_collective(self) -> Notice | None:
        """Explain the collective that the attempt failed in, if ranks disagreed about it.

        Returns:
            The notice of the explanation; None if there is none, or the cause was known before.
        """
        ranks = list[RankProgress]()
        host_by_finished_rank = dict[int, str]()
        for number, host in zip(self._places.host_by_rank, self._places.job_hosts, strict=True):
            if (message := self._last_records.get(number)) is not None:
                ranks += message.ranks
                host_by_finished_rank |= dict.fromkeys(message.finished_ranks, host.name)
        finding = explain_failed_collective(ranks, host_by_finished_rank)
        if self._cause is not None or finding is None:
            return None
        host_name = finding.host or host_by_finished_rank.get(finding.rank, "")
        self.failure_remark = replace(finding, host=host_name).describe()
        return Notice("hang", self._attempt, remark=self.failure_remark)


def find_straggler(ranks: Sequence[RankProgress]) -> RankProgress | None:
    """Return the rank that the others wait for; None without ranks.

    Ranks are compared by the lowest step, then a stopped process, then one that does not answer
    although others do, then one whose stack does not wait for another rank.
    """
    if not ranks:
        return None
    min_step = min((rank.step for rank in ranks if rank.step is not None), default=None)
    slowest = [rank for rank in ranks if min_step is None or rank.step == min_step]
    return min(slowest, key=lambda rank: (not rank.stopped, rank.answered, rank.waits, rank.rank))


def stalled_report(
    ranks: Sequence[RankProgress],
    stalled_seconds: float,
    host: str,
    output: Path,
    finding: HangFinding | None = None,
    silent_host: str = "",
) -> FailureReport:
    """Return the report of a job without progress for ``stalled_seconds``.

    Args:
        host: Host to report if there are no ranks.
        output: Log to report if no rank is to blame.
        finding: Cause of the stall, if it is known.
        silent_host: Host that has not reported the stacks of its ranks; empty if there is none.

    Returns:
        A report whose time the caller has to set.
    """
    stalled = f"stalled: no rank has made progress for {stalled_seconds:.0f} s"
    if finding is not None:
        return explained_report(finding, ranks, stalled, output)
    straggler = find_straggler(ranks)
    if straggler is None:
        return _report_of_host(host, stalled, output)
    if silent_host and not straggler.stopped:
        reason = (
            f"{stalled}, and this host's agent did not report the stacks of its ranks, unlike "
            "those of other hosts"
        )
        return _report_of_host(silent_host, reason, output)
    reason = f"{stalled}, and this one is behind"
    if straggler.doing:
        reason += f" {straggler.doing}"
    if straggler.step is not None:
        reason += f" at step {straggler.step}"
    if straggler.stopped:
        reason += "; its process is stopped (SIGSTOP)"
    elif not straggler.answered:
        reason += "; it did not report its stack"
    elif straggler.place:
        reason += f"; it is in {straggler.place}"
    failure = Failure(
        straggler.host,
        rank=straggler.rank,
        exit_code=None,
        reason=reason,
        traceback=straggler.stack,
        log=straggler.log,
    )
    return FailureReport(failure, 0.0, FailureKind.PROCESS_KILLED)


def _report_of_host(host: str, reason: str, output: Path) -> FailureReport:
    return FailureReport(host_failure(host, reason, output), 0.0, FailureKind.PROCESS_KILLED)


def explained_report(
    finding: HangFinding, ranks: Sequence[RankProgress], remark: str, output: Path
) -> FailureReport:
    """Return the report of a hang whose cause is known from the flight records. The caller has to
    set its time.
    """
    progress = next((rank for rank in ranks if rank.rank == finding.rank), None)
    failure = Failure(
        finding.host,
        rank=finding.rank,
        exit_code=None,
        reason=f"{finding.reason} ({remark})",
        traceback=progress.stack if progress is not None else "",
        log=progress.log if progress is not None else output,
    )
    return FailureReport(failure, 0.0, FailureKind.PROCESS_KILLED)
