"""Which rank failed first: on one host from its files, and across hosts from their reports.

Exit codes and the ranks' own events decide; no word in a log ever does. torchrun's table at the
end of the host's output tells each failed rank's exit code; it is read only after a failure.
A rank killed from outside (by the kernel for its memory, say) brings the others down with errors
of their own, such as a reset connection, which may even be written first: the kill is the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from pathlib import Path

from flagscale.launcher.layout import RANKS_DIRECTORY, HostFiles
from flagscale.records import printable
from flagscale.status import Event

TAIL_BYTES = 256 * 1024
_MAX_TRACEBACK_LINES = 60
# Nobody sends these to a rank because another one failed. SIGABRT is left out: a collective's
# watchdog aborts its process when a peer is gone.
_CAUSES = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
)
# torchrun kills the ranks that survive its TERM only after its grace period, some seconds.
SAME_MOMENT_SECONDS = 3.0
_ENTRY = re.compile(
    r"\[\d+\]:\n"
    r"  time      : (?P<time>\S+)\n"
    r"  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"  exitcode  : (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# How Python, torch, gloo and NCCL tell a rank that a peer is gone.
_PEER_KINDS = frozenset(
    {"ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError"}
    | {"DistNetworkError", "DistStoreError", "DistBackendError"}
)
_PEER_WORDS = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)"
    r"|timed out waiting \d+ms for (recv|send)|remote process exited|application timeout",
    re.IGNORECASE,
)


class Severity(IntEnum):
    """How much a report says about the cause; the least is believed."""

    KILLED = 0
    """A process was ended from outside, or by a fault of its own memory."""
    LOST = 1
    """Nothing was heard of a host any more."""
    FAILED = 2
    """A rank raised, or exited with a code."""
    UNNAMED = 3
    """torchrun ended, and no rank said why."""
    CONSEQUENCE = 4
    """A peer was gone, or the supervisor ended it."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a run. ``rank`` is None when no rank but the host's script, its
    agent or torchrun itself failed. ``exit_code`` is negative for a signal."""

    host: str
    rank: int | None
    exit_code: int | None
    reason: str
    traceback: str
    log: Path

    def describe(self) -> str:
        """Several lines for people: who, why, where to read on."""
        lines = [self.headline(), *self.reason.splitlines()[1:]]
        if self.traceback:
            lines += ["    " + line for line in self.traceback.splitlines()]
        return "\n".join([*lines, f"  log: {self.log}"])

    def headline(self) -> str:
        """One line: who and why."""
        who = f"{self.host}: rank {self.rank}" if self.rank is not None else f"{self.host}:"
        return f"{who} {self.reason}".partition("\n")[0]


@dataclass(frozen=True)
class Report:
    """A failure as one host sees it. ``time`` is in Unix seconds of that host's clock, until the
    coordinator turns it into its own."""

    failure: Failure
    time: float
    severity: Severity


def first_of(reports: Iterable[Report]) -> Report | None:
    """The report of the cause: no consequence if there is anything else, and of those of about
    the same moment the one that says most."""
    known = list(reports)
    named = [report for report in known if report.severity < Severity.CONSEQUENCE] or known
    if not named:
        return None
    first = min(report.time for report in named)
    same_moment = [report for report in named if report.time - first <= SAME_MOMENT_SECONDS]
    return min(same_moment, key=lambda report: (report.severity, report.time))


@dataclass(frozen=True)
class TableEntry:
    """A rank in torchrun's table of failures. ``code`` is negative for a signal."""

    rank: int
    code: int
    time: float


@dataclass(frozen=True)
class End:
    """How torchrun ended: its code, and when; ``out_of_memory_kills`` as the kernel counted them,
    ``killed`` are the processes that the agent itself killed, ``late`` the ranks that said that
    they failed when the job was being ended already."""

    code: int
    time: float
    out_of_memory_kills: int | None = None
    killed: Collection[int] = ()
    late: Collection[int] = ()


def parse_table(output: str, killed: Collection[int] = ()) -> list[TableEntry]:
    """The ranks in the last table of failures that torchrun printed, without those that the
    agent killed."""
    start = output.rfind("\nFailures:\n")
    if start < 0:
        return []
    entries = [
        TableEntry(
            int(match["rank"]),
            int(match["code"]),
            datetime.fromisoformat(match["time"]).timestamp(),
        )
        for match in _ENTRY.finditer(output, start)
        if int(match["pid"]) not in killed
    ]
    return sorted(entries, key=lambda entry: entry.time)


def host_report(
    host: HostFiles,
    events: Mapping[int, Sequence[Event]],
    end: End | None,
    *,
    output_start: int = 0,
) -> Report | None:
    """What failed first on a host; None while nothing has.

    ``events`` are the ranks' status events, ``end`` is None while torchrun lives, and
    ``output_start`` is where the attempt begins in the host's output.
    """
    failed = {
        rank: event
        for rank, rows in events.items()
        for event in rows
        if event.event == "failed" and rank in host.ranks
    }
    table: list[TableEntry] = []
    if end is not None:
        table = parse_table(read_tail(host.output, start=output_start), end.killed)
        table = [entry for entry in table if entry.rank not in end.late]
    rank = choose_rank(table, failed)
    if rank is not None:
        entry = next((entry for entry in table if entry.rank == rank), None)
        report = _rank_report(host, rank, entry, failed.get(rank), end)
        return _with_place(report, events.get(rank, ()))
    if end is None or end.code == 0:
        return None
    started = any(events.get(rank) for rank in host.ranks)
    what = "the job" if started else "torchrun"
    reason = f"{what} ended with {describe_code(end.code)}; no rank said why"
    shown = last_lines(host.output, start=output_start)
    severity = Severity.KILLED if end.code == 128 + signal.SIGKILL else Severity.UNNAMED
    failure = Failure(host.name, None, end.code, reason, shown, host.output)
    return Report(failure, end.time, severity)


def choose_rank(table: Sequence[TableEntry], failed: Mapping[int, Event]) -> int | None:
    """The rank that failed first.

    1. A rank that a signal of the causing kind ended, as torchrun noticed first;
    2. else the rank that was the first to report its exception, one that lost a peer last;
    3. else the earliest in torchrun's table that torchrun itself didn't end.
    """
    if table:
        first = table[0].time
        for entry in table:
            same_moment = entry.time - first <= SAME_MOMENT_SECONDS
            if same_moment and -entry.code in _CAUSES and entry.rank not in failed:
                return entry.rank
    if failed:
        return min(failed, key=lambda rank: (lost_a_peer(failed[rank]), failed[rank].time))
    others = [entry for entry in table if entry.code != -signal.SIGTERM]
    return (others or list(table))[0].rank if table else None


def lost_a_peer(event: Event) -> bool:
    """Whether a rank's exception says no more than that another rank was gone."""
    kind, message = str(event.get("kind", "")), str(event.get("message", ""))
    return kind in _PEER_KINDS or _PEER_WORDS.search(message) is not None


def _rank_report(
    host: HostFiles, rank: int, entry: TableEntry | None, event: Event | None, end: End | None
) -> Report:
    log = rank_log(host, rank)
    code = entry.code if entry is not None else None
    if event is not None:
        # Told to end while it was ending by itself: not what it would have ended with.
        code = None if code == -signal.SIGTERM else code
        # Where the message says what to do, the traceback would only hide it.
        trace = "" if event.get("explained") else printable(str(event.get("traceback", "")))
        failure = Failure(host.name, rank, code, _reason(event, code), trace, log)
        severity = Severity.CONSEQUENCE if lost_a_peer(event) else Severity.FAILED
        return Report(failure, event.time, severity)
    reason = f"ended with {describe_code(code)}" if code is not None else "failed"
    if code == -signal.SIGKILL:
        reason += f": {_explain_kill(end.out_of_memory_kills if end else None)}"
    # A program that explains itself without a traceback has done so in its last lines.
    trace = last_traceback(read_tail(log)) or last_lines(log, 5) if (code or 0) >= 0 else ""
    moment = entry.time if entry is not None else 0.0
    return Report(Failure(host.name, rank, code, reason, trace, log), moment, _severity(code))


def _with_place(report: Report, rows: Sequence[Event]) -> Report:
    """The report with what the rank has told of its place in the job, such as its stage."""
    told = next((event.get("place") for event in rows if event.event == "joined"), None)
    if told is None:
        return report
    first, newline, others = report.failure.reason.partition("\n")
    reason = f"{first}; it is of {printable(str(told))}{newline}{others}"
    return replace(report, failure=replace(report.failure, reason=reason))


def _reason(event: Event, code: int | None) -> str:
    """What an exception said, the exit code behind its first line; a hint may follow."""
    kind = event.get("kind", "an exception")
    message = printable(str(event.get("message", ""))).strip()
    first, _, others = message.partition("\n")
    reason = f"failed: {kind}{f': {first}' if first else ''}"
    if code is not None:
        reason += f" ({describe_code(code)})"
    return f"{reason}\n{others}" if others else reason


def _severity(code: int | None) -> Severity:
    if code is not None and -code in _CAUSES:
        return Severity.KILLED
    if code in (-signal.SIGTERM, -signal.SIGABRT):
        return Severity.CONSEQUENCE
    return Severity.FAILED


def _explain_kill(kills: int | None) -> str:
    if kills:
        return f"the kernel killed {kills} process(es) for lack of memory during the run"
    if kills == 0:
        return "killed from outside; the kernel counted no kill for lack of memory here"
    return "killed from outside; often the kernel, for lack of memory"


def describe_code(code: int) -> str:
    """An exit code for people; a signal by its name, given as ``-n`` or as ``128+n``."""
    number = -code if code < 0 else code - 128 if code > 128 else None
    if number is None:
        return f"exit code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"signal {number} ({name})"


def rank_log(host: HostFiles, rank: int) -> Path:
    """The stderr file of a rank's last attempt; the host's output where there is none."""
    found = rank_logs(host, rank, "stderr.log")
    return found[-1] if found else host.output


def rank_logs(host: HostFiles, rank: int, name: str) -> list[Path]:
    """A rank's files of this name, of every attempt, oldest first."""
    pattern = f"*/attempt_*/{rank - host.first_rank}/{name}"
    found = (host.run_dir / RANKS_DIRECTORY).glob(pattern)
    return sorted(found, key=lambda path: path.stat().st_mtime)


def read_tail(path: Path, size: int = TAIL_BYTES, *, start: int = 0) -> str:
    """The end of a text file, not before byte ``start``; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def last_traceback(text: str) -> str:
    """The last Python traceback of a text, without what follows it; empty if there is none."""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), 0)
    kept = lines[: end + 1] if end else lines
    return "\n".join(kept[-_MAX_TRACEBACK_LINES:])


def last_lines(path: Path, count: int = 15, *, start: int = 0) -> str:
    return "\n".join(read_tail(path, 16 * 1024, start=start).splitlines()[-count:])
