"""Status reports, progress and stacks of the ranks of one host in one attempt."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flagscale.flight_records import (
    FAILURE_REQUEST,
    RAW_REQUEST,
    FlightRecord,
    RecordedOperation,
    raw_path,
    read_digest,
    send_request,
)
from flagscale.hosts import kernel, processes
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import HostFiles
from flagscale.launcher.liveness.diagnosis import rank_log
from flagscale.launcher.liveness.hang import find_user_frame
from flagscale.launcher.liveness.messages import RankProgress
from flagscale.status import (
    BUSY_ACTIVITIES,
    Event,
    Progress,
    list_status_files,
    read_events,
    read_progress,
)

STACK_SIGNAL = signal.SIGUSR2
"""Signal on which the training program writes its stacks to stderr."""
MAX_STACK_CHARACTERS = 4000
_QUIET_SECONDS = 0.5
# Intervals between requests for flight records: the first one, and a part of the time after which
# an operation is overdue, within these limits.
_FIRST_POLL_SECONDS = 5.0
_MIN_POLL_SECONDS = 1.0
_MAX_POLL_SECONDS = 30.0
_PROGRESS_EVENTS = frozenset(
    {"joined", "ready", "progress", "evaluation", "tasks", "checkpoint", "finished"}
)


@dataclass
class RankWatch:
    """Incremental reader of the status files of an attempt.

    ``events`` has the events by rank, without progress; ``progress`` the last progress by rank.
    """

    directory: Path
    events: dict[int, list[Event]] = field(default_factory=dict)
    progress_count: int = 0
    """Counter of progress: grows whenever any rank advances."""
    progress: dict[int, Progress] = field(default_factory=dict)
    joined_ranks: set[int] = field(default_factory=set)
    finished_ranks: set[int] = field(default_factory=set)
    has_failure: bool = False
    _offsets: dict[Path, int] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)
    """Steps of programs that report events only, without progress files."""

    def refresh(self) -> None:
        """Read the new contents of the status files."""
        for path in list_status_files(self.directory):
            new_events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            for event in new_events:
                self._process_event(event)
            rank = int(path.stem.removeprefix("rank_"))
            progress = read_progress(self.directory, rank)
            if progress is not None and self.progress.get(rank) != progress:
                self.progress[rank] = progress
                self.progress_count += 1

    def _process_event(self, event: Event) -> None:
        self.progress_count += event.event in _PROGRESS_EVENTS
        self.has_failure |= event.event == "failed"
        step = event.get("step")
        if event.event == "joined":
            self.joined_ranks.add(event.rank)
        elif event.event == "finished":
            self.finished_ranks.add(event.rank)
        elif event.event == "progress" and isinstance(step, int):
            self._steps[event.rank] = step
        # Progress events are not stored: a job of months has many, and failure diagnosis needs
        # none.
        if event.event in ("started", "joined", "failed", "finished"):
            self.events.setdefault(event.rank, []).append(event)

    def in_busy_activity(self, ended_ranks: Collection[int] = ()) -> bool:
        """Return True if a rank other than the ended ones is in one of :data:`BUSY_ACTIVITIES`."""
        return any(
            progress.doing in BUSY_ACTIVITIES
            for rank, progress in self.progress.items()
            if rank not in ended_ranks
        )

    def step_of(self, rank: int) -> int | None:
        """Return the step that a rank is at, if it reports steps."""
        progress = self.progress.get(rank)
        return progress.step if progress is not None else self._steps.get(rank)

    def activity_of(self, rank: int) -> str:
        progress = self.progress.get(rank)
        return progress.doing if progress is not None else ""


class RecordPoll:
    """Periodic requests for the flight records of a host's ranks, to notice calls that do not end.

    A record takes a rank some milliseconds. Ranks that report their steps are only asked while no
    rank of the host advances.

    Attributes:
        overdue_since: Unix seconds at which the oldest overdue operation was called; None if none
            is. It is overdue after half its timeout, or the limit if that is shorter.
    """

    def __init__(
        self, host: HostFiles, watch: RankWatch, limit_seconds: float, *, reports_status: bool
    ) -> None:
        self.overdue_since: float | None = None
        self._host = host
        self._watch = watch
        self._limit_seconds = limit_seconds
        self._reports_status = reports_status
        self._interval = _FIRST_POLL_SECONDS
        self._progress_count = -1
        self._polled_at = 0.0
        self._request = ""
        self._awaited_ranks: set[int] = set()
        self._records: dict[int, FlightRecord] = {}

    def tick(self, now: float) -> None:
        """Send the requests that are due, and read the replies. Must be called periodically."""
        if self._reports_status and self._watch.progress_count != self._progress_count:
            self._progress_count, self._polled_at = self._watch.progress_count, now
            self._awaited_ranks, self._records, self.overdue_since = set(), {}, None
        elif self._awaited_ranks:
            self._read_replies()
        if self._limit_seconds and now - self._polled_at >= self._interval:
            self._polled_at, self._request = now, f"poll-{time.time_ns()}"
            directory = self._watch.directory
            self._awaited_ranks = {
                rank for rank in self._host.ranks if send_request(directory, rank, self._request)
            }

    def _read_replies(self) -> None:
        replies = {
            rank: record
            for rank in self._awaited_ranks
            if (record := read_digest(self._watch.directory, rank, self._request)) is not None
        }
        if not replies:
            return
        self._awaited_ranks -= replies.keys()
        self._records |= replies
        operations = [o for record in self._records.values() for o in record.operations]
        min_timeout = min((o.timeout for o in operations if o.timeout), default=math.inf)
        interval = min(min_timeout / 8, self._limit_seconds / 2, _MAX_POLL_SECONDS)
        self._interval = max(interval, _MIN_POLL_SECONDS)
        self.overdue_since = min(
            (o.time for o in operations if not o.ended and self._is_overdue(o)), default=None
        )

    def _is_overdue(self, operation: RecordedOperation) -> bool:
        limit = min(self._limit_seconds, operation.timeout / 2 or math.inf)
        return time.time() - operation.time >= limit


class StackDump:
    """Request to every rank of a host for its stacks, which are then read from its log, and for its
    flight record.
    """

    def __init__(
        self,
        host: HostFiles,
        watch: RankWatch,
        ranks: Mapping[int, Process],
        *,
        sends_signals: bool = True,
    ) -> None:
        """Send the requests.

        Args:
            sends_signals: False for a program that reports no status: its handler of the signal may
                have another purpose. Its flight record contains the stack.
        """
        self._host = host
        self._watch = watch
        self._ranks = dict(ranks)
        self._stopped_by_rank = {rank: kernel.is_stopped(p.pid) for rank, p in self._ranks.items()}
        self._logs = {rank: rank_log(host, rank) for rank in self._ranks}
        self._log_offsets = {rank: file_size(log) for rank, log in self._logs.items()}
        self._signalled_ranks: set[int] = set()
        self._last_stacks: dict[int, str] = {}
        self._changed_at = 0.0  # when the stacks were last seen to change
        self._request = f"{RAW_REQUEST}-{time.time_ns()}"
        self._asked_ranks = {rank for rank in self._ranks if self._request_record(rank)}
        for rank, process in self._ranks.items():
            # The signal would end a process without a handler for it.
            if (
                sends_signals
                and not self._stopped_by_rank[rank]
                and kernel.catches_signal(process.pid, STACK_SIGNAL)
                and processes.send_signal(process, STACK_SIGNAL)
            ):
                self._signalled_ranks.add(rank)

    def _request_record(self, rank: int) -> bool:
        directory = self._watch.directory
        if self._stopped_by_rank[rank]:
            return False
        with suppress(OSError):
            raw_path(directory, rank).unlink()
        return send_request(directory, rank, self._request)

    def read_stacks(self) -> dict[int, str]:
        """Return the stacks written so far, by rank."""
        texts = {rank: self._read_stack(rank) for rank in self._signalled_ranks}
        return {rank: text for rank, text in texts.items() if text}

    def _read_record(self, rank: int) -> FlightRecord | None:
        if rank not in self._asked_ranks:
            return None
        return read_digest(self._watch.directory, rank, self._request)

    @property
    def asks_for_records(self) -> bool:
        """True if ranks write their raw entries, or have written them."""
        return bool(self._asked_ranks)

    def _has_all_records(self) -> bool:
        return all(
            raw_path(self._watch.directory, rank).exists() and self._read_record(rank)
            for rank in self._asked_ranks
        )

    def is_complete(self, now: float) -> bool:
        """Return True if all ranks have written their records and stacks, and nothing more for a
        moment.

        A rank writes its stacks in small pieces, and may be delayed between two of them.

        Args:
            now: Current ``time.monotonic()``; the method is called periodically.
        """
        stacks = self.read_stacks()
        if stacks != self._last_stacks:
            self._last_stacks, self._changed_at = stacks, now
        return (
            len(stacks) == len(self._signalled_ranks)
            and now - self._changed_at >= _QUIET_SECONDS
            and self._has_all_records()
        )

    def rank_progress(self) -> tuple[RankProgress, ...]:
        """Return the progress of every rank of the host."""
        stacks = self.read_stacks()
        return tuple(self._progress_of(rank, stacks.get(rank, "")) for rank in sorted(self._ranks))

    def _progress_of(self, rank: int, stack: str) -> RankProgress:
        record = self._read_record(rank)
        is_stopped = self._stopped_by_rank[rank]
        text = stack or (record.stack if record is not None else "")
        return RankProgress(
            host=self._host.name,
            rank=rank,
            step=self._watch.step_of(rank),
            doing=self._watch.activity_of(rank),
            stopped=is_stopped,
            # A rank that cannot handle the signal is not counted as unresponsive.
            answered=bool(text) or (rank not in self._signalled_ranks and not is_stopped),
            stack=text,
            log=self._logs[rank],
            place=find_user_frame(text),
            # Its stack is in this message already.
            record=replace(record, stack="") if record is not None else None,
        )

    def _read_stack(self, rank: int) -> str:
        """Return the main thread's part of faulthandler's output."""
        try:
            with self._logs[rank].open("rb") as file:
                file.seek(self._log_offsets[rank])
                text = file.read(1 << 18).decode("utf-8", "replace")
        except OSError:
            return ""
        start = text.rfind("Current thread ")
        return text[start:].rstrip()[:MAX_STACK_CHARACTERS] if start >= 0 else ""


def read_last_records(host: HostFiles, watch: RankWatch) -> tuple[RankProgress, ...]:
    """Return the ranks of a host that wrote their flight record when they failed."""
    records = (read_digest(watch.directory, rank, FAILURE_REQUEST) for rank in host.ranks)
    return tuple(
        RankProgress(
            host=host.name,
            rank=record.rank,
            step=watch.step_of(record.rank),
            doing=watch.activity_of(record.rank),
            stopped=False,
            answered=True,
            stack="",
            log=rank_log(host, record.rank),
            record=replace(record, stack=""),
        )
        for record in records
        if record is not None
    )


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - once a rank
    except OSError:
        return 0
