"""Which rank failed first, and why.

Exit codes and the ranks' own events decide; no word in a log ever does. torchrun's table at the
end of the host's output tells each failed rank's exit code; it is read only after a failure.
A rank killed from outside (by the kernel for its memory, say) brings the others down with errors
of their own, such as a reset connection, which may even be written first: the kill is the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flagscale.launch.layout import RANKS_DIRECTORY
from flagscale.launch.state import Exit, HostState, RunState
from flagscale.status import Event

TAIL_BYTES = 256 * 1024
_MAX_TRACEBACK_LINES = 60
# Nobody sends these to a rank because another one failed. SIGABRT is left out: a collective's
# watchdog aborts its process when a peer is gone.
_CAUSES = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
)
# torchrun kills the ranks that survive its TERM only after its grace period, some seconds.
_SAME_MOMENT_SECONDS = 3.0
_ENTRY = re.compile(
    r"\[\d+\]:\n"
    r"  time      : (?P<time>\S+)\n"
    r"  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"  exitcode  : (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)


@dataclass(frozen=True)
class TableEntry:
    """A rank in torchrun's table of failures. ``code`` is negative for a signal."""

    rank: int
    code: int
    time: float


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
        who = f"{self.host}: rank {self.rank}" if self.rank is not None else self.host
        lines = [f"{who} {self.reason}"]
        if self.traceback:
            lines += ["    " + line for line in self.traceback.splitlines()]
        return "\n".join([*lines, f"  log: {self.log}"])


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a text file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def parse_table(output: str) -> list[TableEntry]:
    """The ranks in the last table of failures that torchrun printed."""
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
    ]
    return sorted(entries, key=lambda entry: entry.time)


def first_failure(state: RunState, events: Mapping[int, Sequence[Event]]) -> Failure | None:
    """The first failure of a run's hosts; None while there is none.

    ``events`` are the ranks' status events, by rank.
    """
    failed = {
        rank: event for rank, rows in events.items() for event in rows if event.event == "failed"
    }
    # torchrun's failures first name a host's dead; one host that gives a rank suffices.
    candidates = [f for host in state.hosts if (f := _host_failure(host, failed, events))]
    return next((f for f in candidates if f.rank is not None), next(iter(candidates), None))


def _host_failure(
    host: HostState, failed: Mapping[int, Event], events: Mapping[int, Sequence[Event]]
) -> Failure | None:
    ended = host.exit()
    if ended is not None and (ended.code == 0 or (ended.signal is not None and not failed)):
        return None
    if ended is not None and ended.phase == "before_start":
        reason = f"before_start failed with exit code {ended.code}; the job was not started"
        return Failure(host.name, None, ended.code, reason, last_lines(host.output), host.output)
    own = {rank: event for rank, event in failed.items() if rank in host.ranks}
    table = parse_table(read_tail(host.output)) if ended is not None else []
    rank = choose_rank(table, own)
    if rank is not None:
        code = next((entry.code for entry in table if entry.rank == rank), None)
        return _rank_failure(host, rank, code, own.get(rank), ended)
    if ended is None:
        return None
    started = any(events.get(rank) for rank in host.ranks)
    what = "the job" if started else "torchrun"
    reason = f"{what} ended with {describe_code(ended.code)}; no rank said why"
    return Failure(host.name, None, ended.code, reason, last_lines(host.output), host.output)


def choose_rank(table: Sequence[TableEntry], failed: Mapping[int, Event]) -> int | None:
    """The rank that failed first.

    1. A rank that a signal of the causing kind ended, as torchrun noticed first;
    2. else the rank that was the first to report its exception;
    3. else the earliest in torchrun's table that torchrun itself didn't end.
    """
    if table:
        first = table[0].time
        for entry in table:
            same_moment = entry.time - first <= _SAME_MOMENT_SECONDS
            if same_moment and -entry.code in _CAUSES and entry.rank not in failed:
                return entry.rank
    if failed:
        return min(failed, key=lambda rank: failed[rank].time)
    others = [entry for entry in table if entry.code != -signal.SIGTERM]
    return (others or list(table))[0].rank if table else None


def _rank_failure(
    host: HostState, rank: int, code: int | None, event: Event | None, ended: Exit | None
) -> Failure:
    log = rank_log(host, rank)
    if event is not None:
        kind, message = event.get("kind", "an exception"), str(event.get("message", "")).strip()
        reason = f"failed: {kind}{f': {message}' if message else ''}"
        if code is not None:
            reason += f" ({describe_code(code)})"
        return Failure(host.name, rank, code, reason, str(event.get("traceback", "")), log)
    reason = f"ended with {describe_code(code)}" if code is not None else "failed"
    if code == -signal.SIGKILL:
        reason += f": {_explain_kill(ended)}"
    # A program that explains itself without a traceback has done so in its last lines.
    trace = last_traceback(read_tail(log)) or last_lines(log, 5) if (code or 0) >= 0 else ""
    return Failure(host.name, rank, code, reason, trace, log)


def _explain_kill(ended: Exit | None) -> str:
    kills = ended.out_of_memory_kills if ended is not None else None
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


def rank_log(host: HostState, rank: int) -> Path:
    """The stderr file of a rank's last attempt; the host's output where there is none."""
    found = rank_logs(host, rank, "stderr.log")
    return found[-1] if found else host.output


def rank_logs(host: HostState, rank: int, name: str) -> list[Path]:
    """A rank's files of this name, of every attempt, oldest first."""
    local = str(rank - host.first_rank)
    pattern = f"*/attempt_*/{local}/{name}"
    found = (host.run_dir / RANKS_DIRECTORY).glob(pattern)
    return sorted(found, key=lambda path: path.stat().st_mtime)


def last_traceback(text: str) -> str:
    """The last Python traceback of a text, without what follows it; empty if there is none."""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), 0)
    kept = lines[: end + 1] if end else lines
    return "\n".join(kept[-_MAX_TRACEBACK_LINES:])


def last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(read_tail(path, 16 * 1024).splitlines()[-count:])
