"""Status events that a run's ranks wrote, by attempt, with progress as columns of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.launcher.layout import (
    EARLIER_STATUS_PREFIX,
    STATUS_DIRECTORY,
    latest_status_directory,
)
from flagscale.launcher.state import RunState
from flagscale.status import Event, list_status_files, read_events

_NON_METRIC_FIELDS = {"step", "train_steps", "samples"}
# Such as "status" and "status.1" (attempts 0 and 1 of the latest start of the scripts), and
# "status-before-1-status" and "status-before-1-status.1" (of an earlier start).
_DIRECTORY_PATTERN = re.compile(
    rf"(?:{re.escape(EARLIER_STATUS_PREFIX)}(?P<start>\d+)-)?{STATUS_DIRECTORY}(?:[.-](?P<attempt>\d+))?"
)
_MAX_STEP = 2**53


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run's job.

    The scripts of a run are started once, or several times, for example when Slurm requeues the
    job. Within one start of the scripts, the agents may restart the ranks: each time is an attempt.

    ``steps`` ascend, ``times`` are Unix seconds, and ``metrics`` has the values of progress events
    by name, one per step, NaN where an event has none. ``number`` counts all attempts of the run
    from 1; ``number_in_start`` counts those within one start of the scripts, from 1.
    """

    number: int
    number_in_start: int
    steps: Sequence[int]
    times: Sequence[float]
    metrics: Mapping[str, Sequence[float]]
    events: Sequence[Event] = ()
    """All other events, ordered by time."""
    is_current: bool = True
    """True if it belongs to the latest start of the scripts, which the run's other files describe.
    """
    train_steps: int | None = None
    run_number: int | None = None
    """Number of its run among those of the directory, from 1, in the story of a directory."""

    @property
    def label(self) -> str:
        """Name of the attempt among those of the run, or of the directory."""
        if self.run_number is None:
            return f"attempt {self.number}"
        return f"run {self.run_number}" + (f", attempt {self.number}" if self.number > 1 else "")

    def events_of_kind(self, *kinds: str) -> Iterator[Event]:
        """Return the events of these kinds."""
        return (event for event in self.events if event.event in kinds)

    @property
    def start_time(self) -> float | None:
        """Time at which the first of its ranks was up, in Unix seconds."""
        return min((event.time for event in self.events_of_kind("started", "joined")), default=None)

    def last_step(self, end_time: float = math.inf) -> int | None:
        """Return the last step reported until ``end_time`` (Unix seconds); None if there is
        none.
        """
        steps = [s for s, time in zip(self.steps, self.times, strict=True) if time <= end_time]
        return steps[-1] if steps else None


@dataclass
class _AttemptDirectories:
    """Status directories of one attempt, one per host."""

    start: int | None
    """Number of the start of the scripts; None for the latest one."""
    attempt: int
    """Number of the attempt within that start, from 0."""
    directories: list[Path] = field(default_factory=list)


def read_attempts(
    state: RunState, latest_events: Mapping[int, Sequence[Event]]
) -> tuple[Attempt, ...]:
    """Return every attempt that has reported anything, first one first.

    ``latest_events`` has the events of the last attempt by rank, so that they are not read again.
    """
    directories = sorted(
        _find_status_directories(state),
        key=lambda directory: (directory.start is None, directory.start, directory.attempt),
    )
    latest_directories = {latest_status_directory(host.run_dir) for host in state.hosts}
    attempts: list[Attempt] = []
    for attempt_directories in directories:
        events = (
            latest_events
            if latest_directories == {*attempt_directories.directories}
            else _read_all_events(attempt_directories.directories)
        )
        if any(events.values()):
            number, number_in_start = len(attempts) + 1, attempt_directories.attempt + 1
            attempts.append(
                _make_attempt(
                    number, number_in_start, events, is_current=attempt_directories.start is None
                )
            )
    return tuple(attempts)


def _find_status_directories(state: RunState) -> list[_AttemptDirectories]:
    attempts: dict[tuple[int | None, int], _AttemptDirectories] = {}
    for host in state.hosts:
        for path in host.run_dir.glob(f"{STATUS_DIRECTORY}*"):
            match = _DIRECTORY_PATTERN.fullmatch(path.name)
            if match is not None:
                start = int(match["start"]) if match["start"] else None
                key = start, int(match["attempt"] or 0)
                attempts.setdefault(key, _AttemptDirectories(*key)).directories.append(path)
    return list(attempts.values())


def _read_all_events(directories: Sequence[Path]) -> dict[int, list[Event]]:
    events_by_rank: dict[int, list[Event]] = {}
    for path in (path for directory in directories for path in list_status_files(directory)):
        events, _ = read_events(path)
        if events:
            events_by_rank.setdefault(events[0].rank, []).extend(events)
    return events_by_rank


def _make_attempt(
    number: int, number_in_start: int, events: Mapping[int, Sequence[Event]], *, is_current: bool
) -> Attempt:
    progress: list[tuple[int, float, Mapping[str, Any]]] = []
    other_events: list[Event] = []
    for event in (event for rows in events.values() for event in rows):
        if event.event != "progress":
            other_events.append(event)
            continue
        # Inlined :func:`step_of`, because a long run has hundreds of thousands of events.
        step = event.fields.get("step")
        if type(step) is int and -_MAX_STEP < step < _MAX_STEP:
            progress.append((step, event.time, event.fields))
    progress.sort(key=lambda row: row[0])
    rows = [fields for _, _, fields in progress]
    names = dict.fromkeys([*rows[0], *sorted(set[str]().union(*rows))]) if rows else {}
    columns = {name: _number_column(name, rows) for name in names if name not in _NON_METRIC_FIELDS}
    train_steps = rows[-1].get("train_steps") if rows else None
    return Attempt(
        number,
        number_in_start,
        [step for step, _, _ in progress],
        [time for _, time, _ in progress],
        {name: column for name, column in columns.items() if column},
        sorted(other_events, key=lambda event: event.time),
        is_current,
        train_steps if type(train_steps) is int else None,
    )


def _number_column(name: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return one metric of all rows; empty if no row has a number."""
    values = [row.get(name) for row in rows]
    kinds = set(map(type, values))
    if kinds == {float}:
        return values  # type: ignore[return-value]
    if kinds.isdisjoint((int, float)):
        return []
    return [_to_float(value) for value in values]


def step_of(event: Event) -> int | None:
    """Return the step of an event, or None."""
    step = event.get("step")
    return step if type(step) is int and abs(step) < _MAX_STEP else None


def _to_float(value: object) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _MAX_STEP else math.nan
