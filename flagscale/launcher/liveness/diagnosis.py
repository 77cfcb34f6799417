"""Selection of the rank that failed first: on one host from its files, across hosts from reports.

Exit codes and the ranks' own events decide, never words in a log. torchrun's table at the end of
the host's output contains the exit code of each failed rank; it is only read after a failure. A
rank that is killed from outside (for example by the kernel for its memory) makes the others fail
with errors of their own, such as a reset connection. These may even be written first, but the kill
is the cause.

The launcher's agent (:mod:`flagscale.launcher.agent`) starts torchrun on each host and supervises
it. That of one host has the coordinator (:mod:`.coordinator`), which collects the reports of all
hosts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum
from pathlib import Path

from flagscale.files import stored_as
from flagscale.launcher.layout import RANKS_DIRECTORY, HostFiles
from flagscale.output_streams import escape_controls
from flagscale.records import printable
from flagscale.status import Event

TAIL_BYTES = 256 * 1024
# torch puts the prefix in front of every line of an exception once a process group exists.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_MAX_TRACEBACK_LINES = 60
# Signals that are never sent to a rank because another one failed. SIGABRT is not among them: a
# collective's watchdog aborts its process when a peer is gone.
_CAUSE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
)
# torchrun kills the ranks that survive its TERM only after its grace period, some seconds.
SAME_MOMENT_SECONDS = 3.0
_TABLE_ENTRY_PATTERN = re.compile(
    r"\[\d+\]:\n"
    r"  time      : (?P<time>\S+)\n"
    r"  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"  exitcode  : (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# Errors of Python, torch, gloo and NCCL when a peer is gone.
_PEER_LOSS_EXCEPTIONS = frozenset(
    {
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "DistNetworkError",
        "DistStoreError",
        "DistBackendError",
    }
)
_PEER_LOSS_PATTERN = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)"
    r"|timed out waiting \d+ms for (recv|send)|remote process exited|application timeout",
    re.IGNORECASE,
)


class FailureKind(IntEnum):
    """Kind of a failure. Of failures at the same moment, the lowest value is taken as the cause."""

    PROCESS_KILLED = 0
    """A process was killed from outside, or by a memory fault."""
    HOST_LOST = 1
    """A host stopped reporting."""
    RANK_FAILED = 2
    """A rank raised, or exited with a code."""
    UNEXPLAINED = 3
    """torchrun ended, and no rank reported a reason."""
    CONSEQUENCE = 4
    """A peer was gone, or the agent or torchrun ended the rank."""


@dataclass(frozen=True)
class Failure:
    """First failure of a run.

    Attributes:
        host: Name of the host; empty if it is not known.
        rank: None if the host's script, its agent or torchrun itself failed.
        exit_code: Negative for a signal.
        reason: Text for the user; the first line is a summary.
        traceback: Python traceback, or the last lines of the log; may be empty.
        log: File with the output of the process that failed.
    """

    host: str
    rank: int | None
    exit_code: int | None
    reason: str
    traceback: str
    log: Path

    @property
    def is_lost_host(self) -> bool:
        """True if the other hosts have lost the contact to the host."""
        return self.rank is None and self.exit_code is None and self.reason.startswith("was lost: ")

    def describe(self) -> str:
        """Return a description of several lines: rank, reason, traceback and log."""
        lines = [self.headline(), *self.reason.splitlines()[1:]]
        if self.traceback:
            lines += ["    " + line for line in self.traceback.splitlines()]
        return escape_controls("\n".join([*lines, f"  log: {self.log}"]))

    def headline(self) -> str:
        """Return a description of one line: rank and reason."""
        parts = [f"{self.host}:"] if self.host else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        return escape_controls(" ".join([*parts, self.reason]).partition("\n")[0])


def host_failure(host: str, reason: str, log: Path) -> Failure:
    """Return the failure of a host of which no rank is known as the cause."""
    return Failure(host, rank=None, exit_code=None, reason=reason, traceback="", log=log)


@dataclass(frozen=True)
class FailureReport:
    """A failure as reported by one host.

    ``time`` is in Unix seconds of that host's clock, until the coordinator converts it to its own
    clock.
    """

    failure: Failure
    time: float
    kind: FailureKind = field(metadata=stored_as("severity"))


def find_cause(reports: Iterable[FailureReport]) -> FailureReport | None:
    """Return the report of the cause; None without reports.

    Consequences are ignored if there is any other report. Among the reports within
    :data:`SAME_MOMENT_SECONDS` of the first one, the one with the lowest kind is selected.
    """
    candidates = list(reports)
    causes = [report for report in candidates if report.kind < FailureKind.CONSEQUENCE]
    candidates = causes or candidates
    if not candidates:
        return None
    first_time = min(report.time for report in candidates)
    same_moment = [
        report for report in candidates if report.time - first_time <= SAME_MOMENT_SECONDS
    ]
    return min(same_moment, key=lambda report: (report.kind, report.time))


@dataclass(frozen=True)
class TableEntry:
    """A rank in torchrun's table of failures; ``exit_code`` is negative for a signal, ``time`` is
    in Unix seconds.
    """

    rank: int
    exit_code: int
    time: float


@dataclass(frozen=True)
class TorchrunExit:
    """End of a torchrun.

    Attributes:
        exit_code: Exit code of torchrun.
        time: Unix seconds.
        oom_kills: Number of kills by the kernel's OOM killer; None if unknown.
        killed_pids: Processes that the host's agent killed.
        late_ranks: Ranks that reported a failure when the job was already being ended.
    """

    exit_code: int
    time: float
    oom_kills: int | None = None
    killed_pids: Collection[int] = ()
    late_ranks: Collection[int] = ()


def parse_failure_table(output: str, killed_pids: Collection[int] = ()) -> list[TableEntry]:
    """Parse the last table of failures that torchrun printed, ignoring processes in
    ``killed_pids``.
    """
    start = output.rfind("\nFailures:\n")
    if start < 0:
        return []
    entries = [
        TableEntry(
            int(match["rank"]),
            int(match["code"]),
            datetime.fromisoformat(match["time"]).timestamp(),
        )
        for match in _TABLE_ENTRY_PATTERN.finditer(output, start)
        if int(match["pid"]) not in killed_pids
    ]
    return sorted(entries, key=lambda entry: entry.time)


def diagnose_host(
    host: HostFiles,
    events: Mapping[int, Sequence[Event]],
    torchrun_exit: TorchrunExit | None,
    *,
    output_start: int = 0,
) -> FailureReport | None:
    """Return the report of the first failure on a host; None if nothing has failed.

    Args:
        events: Status events of the ranks, by rank.
        torchrun_exit: None while torchrun is running.
        output_start: Offset in bytes at which the attempt's output begins in the host's output.
    """
    failed_events = {
        rank: event
        for rank, rank_events in events.items()
        for event in rank_events
        if event.event == "failed" and rank in host.ranks
    }
    table: list[TableEntry] = []
    if torchrun_exit is not None:
        table = parse_failure_table(
            read_tail(host.output, start=output_start), torchrun_exit.killed_pids
        )
        table = [entry for entry in table if entry.rank not in torchrun_exit.late_ranks]
    rank = find_first_failed_rank(table, failed_events)
    if rank is not None:
        entry = next((entry for entry in table if entry.rank == rank), None)
        report = _rank_report(host, rank, entry, failed_events.get(rank), torchrun_exit)
        return _add_mesh_position(report, events.get(rank, ()))
    if torchrun_exit is None or torchrun_exit.exit_code == 0:
        return None
    has_started = any(events.get(rank) for rank in host.ranks)
    process = "the job" if has_started else "torchrun"
    reason = (
        f"{process} ended with {describe_code(torchrun_exit.exit_code)}; no rank reported a reason"
    )
    lines = last_lines(host.output, start=output_start)
    was_killed = torchrun_exit.exit_code == 128 + signal.SIGKILL
    kind = FailureKind.PROCESS_KILLED if was_killed else FailureKind.UNEXPLAINED
    failure = Failure(
        host.name,
        rank=None,
        exit_code=torchrun_exit.exit_code,
        reason=reason,
        traceback=lines,
        log=host.output,
    )
    return FailureReport(failure, torchrun_exit.time, kind)


def find_first_failed_rank(
    table: Sequence[TableEntry], failed_events: Mapping[int, Event]
) -> int | None:
    """Return the rank that failed first; ``failed_events`` are the ``failed`` events by rank.

    1. A rank that was ended by a signal in ``_CAUSE_SIGNALS``, among the first in torchrun's table;
    2. else the rank that was first to report an exception, considering ranks that lost a peer last;
    3. else the earliest in torchrun's table that torchrun itself did not end.
    """
    if table:
        first_time = table[0].time
        for entry in table:
            is_same_moment = entry.time - first_time <= SAME_MOMENT_SECONDS
            if (
                is_same_moment
                and -entry.exit_code in _CAUSE_SIGNALS
                and entry.rank not in failed_events
            ):
                return entry.rank
    if failed_events:
        return min(
            failed_events,
            key=lambda rank: (lost_a_peer(failed_events[rank]), failed_events[rank].time),
        )
    not_terminated = [entry for entry in table if entry.exit_code != -signal.SIGTERM]
    return (not_terminated or list(table))[0].rank if table else None


def lost_a_peer(event: Event) -> bool:
    """Return True if a rank's exception only shows that another rank was gone."""
    kind, message = str(event.get("kind", "")), str(event.get("message", ""))
    return kind in _PEER_LOSS_EXCEPTIONS or _PEER_LOSS_PATTERN.search(message) is not None


def _rank_report(
    host: HostFiles,
    rank: int,
    entry: TableEntry | None,
    event: Event | None,
    torchrun_exit: TorchrunExit | None,
) -> FailureReport:
    log = rank_log(host, rank)
    exit_code = entry.exit_code if entry is not None else None
    if event is not None:
        # Terminated while it was already ending by itself: this is not its own exit code.
        exit_code = None if exit_code == -signal.SIGTERM else exit_code
        # If the message explains how to fix the error, a traceback would only distract.
        trace = "" if event.get("explained") else printable(str(event.get("traceback", "")))
        failure = Failure(
            host.name,
            rank=rank,
            exit_code=exit_code,
            reason=_describe_exception(event, exit_code),
            traceback=trace,
            log=log,
        )
        kind = FailureKind.CONSEQUENCE if lost_a_peer(event) else FailureKind.RANK_FAILED
        return FailureReport(failure, event.time, kind)
    reason = f"ended with {describe_code(exit_code)}" if exit_code is not None else "failed"
    if exit_code == -signal.SIGKILL:
        reason += f": {_explain_kill(torchrun_exit.oom_kills if torchrun_exit else None)}"
    trace = ""
    if (exit_code or 0) >= 0:
        # Without a traceback, the last lines may contain the program's error message.
        trace = last_traceback(read_tail(log)) or _RANK_PREFIX.sub("", last_lines(log, 5))
    failure_time = entry.time if entry is not None else 0.0
    return FailureReport(
        Failure(host.name, rank=rank, exit_code=exit_code, reason=reason, traceback=trace, log=log),
        failure_time,
        _classify_code(exit_code),
    )


def _add_mesh_position(report: FailureReport, events: Sequence[Event]) -> FailureReport:
    """Return the report with the rank's position in the heterogeneous meshes, such as ``stage 0 of
    2, mesh 0 (tp2 dp2)``. The rank reports it in the field ``place`` of its ``joined`` event.
    """
    position = next((event.get("place") for event in events if event.event == "joined"), None)
    if position is None:
        return report
    first_line, newline, hint = report.failure.reason.partition("\n")
    reason = f"{first_line}; position: {printable(str(position))}{newline}{hint}"
    return replace(report, failure=replace(report.failure, reason=reason))


def _describe_exception(event: Event, code: int | None) -> str:
    """Return the reason from an exception, with the exit code after its first line; a hint may
    follow.
    """
    kind = event.get("kind", "an exception")
    message = printable(str(event.get("message", ""))).strip()
    first_line, _, hint = message.partition("\n")
    reason = f"failed: {kind}{f': {first_line}' if first_line else ''}"
    if code is not None:
        reason += f" ({describe_code(code)})"
    return f"{reason}\n{hint}" if hint else reason


def _classify_code(code: int | None) -> FailureKind:
    if code is not None and -code in _CAUSE_SIGNALS:
        return FailureKind.PROCESS_KILLED
    if code in (-signal.SIGTERM, -signal.SIGABRT):
        return FailureKind.CONSEQUENCE
    return FailureKind.RANK_FAILED


def _explain_kill(oom_kills: int | None) -> str:
    if oom_kills:
        return f"the kernel killed {oom_kills} process(es) for lack of memory during the run"
    if oom_kills == 0:
        return "killed from outside; the kernel counted no kill for lack of memory here"
    return "killed from outside; often the kernel, for lack of memory"


def describe_code(code: int) -> str:
    """Describe an exit code; a signal, given as ``-n`` or ``128+n``, by its name."""
    number = -code if code < 0 else code - 128 if code > 128 else None
    if number is None:
        return f"exit code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"signal {number} ({name})"


def rank_log(host: HostFiles, rank: int) -> Path:
    """Return the stderr file of a rank's last attempt, or the host's output if there is none."""
    logs = rank_logs(host, rank, "stderr.log")
    return logs[-1] if logs else host.output


def rank_logs(host: HostFiles, rank: int, name: str) -> list[Path]:
    """Return a rank's files of this name in all attempts, oldest first."""
    pattern = f"*/attempt_*/{rank - host.first_rank}/{name}"
    paths = (host.run_dir / RANKS_DIRECTORY).glob(pattern)
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def read_tail(path: Path, size: int = TAIL_BYTES, *, start: int = 0) -> str:
    """Return the last ``size`` bytes of a text file, not before byte ``start``; empty if there is
    no file.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def last_traceback(text: str) -> str:
    """Return the last Python traceback of a text, without torch's prefix ``[rank3]:`` and without
    the text after it; empty if there is none.
    """
    text = _RANK_PREFIX.sub("", text)
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), 0)
    traceback = lines[: end + 1] if end else lines
    return "\n".join(traceback[-_MAX_TRACEBACK_LINES:])


def last_lines(path: Path, count: int = 15, *, start: int = 0) -> str:
    """Return the last lines of a text file, not before byte ``start``."""
    return "\n".join(read_tail(path, 16 * 1024, start=start).splitlines()[-count:])
