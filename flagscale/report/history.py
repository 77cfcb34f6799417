"""Reports of a run's ranks, attempt by attempt, as columns of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.launcher.layout import EARLIER_STATUS, STATUS_DIRECTORY, latest_status_directory
from flagscale.launcher.state import RunState
from flagscale.status import Event, list_status_files, read_events

_NOT_FIGURES = {"step", "train_steps", "samples"}
_DIRECTORY = re.compile(
    rf"(?:{re.escape(EARLIER_STATUS)}(?P<start>\d+)-)?{STATUS_DIRECTORY}(?:[.-](?P<attempt>\d+))?"
)
_LARGEST_STEP = 2**53


@dataclass(frozen=True)
class Attempt:
    """One start of a run's job.

    ``steps`` ascend, and ``figures`` has the values of progress lines by name, one per step, NaN
    where a line has none. ``number`` counts all starts of the run from 1; ``again`` counts the
    attempts within one start of its scripts.
    """

    number: int
    again: int
    steps: Sequence[int]
    times: Sequence[float]
    figures: Mapping[str, Sequence[float]]
    events: Sequence[Event] = ()
    """All other events, ordered by time."""
    current: bool = True
    """True if it belongs to the latest start of the scripts, which the run's other files describe.
    """
    train_steps: int | None = None

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.event in kinds)

    @property
    def started(self) -> float | None:
        """Time at which the first of its ranks was up, in Unix seconds."""
        return min((event.time for event in self.of("started", "joined")), default=None)

    def last_step(self, moment: float = math.inf) -> int | None:
        """Return the last step reported until ``moment``."""
        steps = [s for s, time in zip(self.steps, self.times, strict=True) if time <= moment]
        return steps[-1] if steps else None


@dataclass
class _AttemptDirectories:
    """Status directories of one attempt, one per host."""

    start: int | None
    attempt: int
    directories: list[Path] = field(default_factory=list)


def read_attempts(state: RunState, latest: Mapping[int, Sequence[Event]]) -> tuple[Attempt, ...]:
    """Return every attempt that has reported anything, first one first.

    ``latest`` has the events of the last attempt by rank, which need not be read again.
    """
    directories = sorted(
        _find_status_directories(state),
        key=lambda directory: (directory.start is None, directory.start, directory.attempt),
    )
    names = {latest_status_directory(host.run_dir) for host in state.hosts}
    attempts: list[Attempt] = []
    for reports in directories:
        events = (
            latest if names == {*reports.directories} else _read_all_events(reports.directories)
        )
        if any(events.values()):
            number, again = len(attempts) + 1, reports.attempt + 1
            attempts.append(_make_attempt(number, again, events, current=reports.start is None))
    return tuple(attempts)


def _find_status_directories(state: RunState) -> list[_AttemptDirectories]:
    attempts: dict[tuple[int | None, int], _AttemptDirectories] = {}
    for host in state.hosts:
        for path in host.run_dir.glob(f"{STATUS_DIRECTORY}*"):
            match = _DIRECTORY.fullmatch(path.name)
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
    number: int, again: int, events: Mapping[int, Sequence[Event]], *, current: bool
) -> Attempt:
    progress: list[tuple[int, float, Mapping[str, Any]]] = []
    other_events: list[Event] = []
    for event in (event for rows in events.values() for event in rows):
        if event.event != "progress":
            other_events.append(event)
            continue
        # Inlined :func:`step_of`, because a long run has hundreds of thousands of events.
        step = event.fields.get("step")
        if type(step) is int and -_LARGEST_STEP < step < _LARGEST_STEP:
            progress.append((step, event.time, event.fields))
    progress.sort(key=lambda row: row[0])
    rows = [fields for _, _, fields in progress]
    names = dict.fromkeys([*rows[0], *sorted(set[str]().union(*rows))]) if rows else {}
    columns = {name: _number_column(name, rows) for name in names if name not in _NOT_FIGURES}
    total = rows[-1].get("train_steps") if rows else None
    return Attempt(
        number,
        again,
        [step for step, _, _ in progress],
        [time for _, time, _ in progress],
        {name: column for name, column in columns.items() if column},
        sorted(other_events, key=lambda event: event.time),
        current,
        total if type(total) is int else None,
    )


def _number_column(name: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return one figure of all rows; empty if no row has a number."""
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
    return step if type(step) is int and abs(step) < _LARGEST_STEP else None


def _to_float(value: object) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _LARGEST_STEP else math.nan
