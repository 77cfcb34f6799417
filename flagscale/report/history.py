"""What the ranks of a run have reported, attempt by attempt, as columns of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.launcher.layout import EARLIER_STATUS, STATUS_DIRECTORY, latest_status
from flagscale.launcher.state import RunState
from flagscale.status import Event, read_events, status_files

_NOT_FIGURES = {"step", "train_steps", "samples"}
_DIRECTORY = re.compile(
    rf"(?:{re.escape(EARLIER_STATUS)}(?P<start>\d+)-)?{STATUS_DIRECTORY}(?:[.-](?P<attempt>\d+))?"
)
_LARGEST_STEP = 2**53


@dataclass(frozen=True)
class Attempt:
    """One start of a run's job. ``figures`` are those of its progress lines by name, one a step of
    ``steps``, which ascend; NaN where a line has none. ``number`` counts from 1, over every start
    of the run; ``again`` is the number among the attempts of one start of its scripts."""

    number: int
    again: int
    steps: Sequence[int]
    times: Sequence[float]
    figures: Mapping[str, Sequence[float]]
    events: Sequence[Event] = ()
    """All others, in the order of their times."""
    current: bool = True
    """Whether it is of the scripts' latest start, which the run's other files tell of."""
    train_steps: int | None = None

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.event in kinds)

    @property
    def started(self) -> float | None:
        """When the first of its ranks was up, in Unix seconds."""
        return min((event.time for event in self.of("started", "joined")), default=None)

    def last_step(self, moment: float = math.inf) -> int | None:
        """The last step that was reported until a moment."""
        known = [s for s, time in zip(self.steps, self.times, strict=True) if time <= moment]
        return known[-1] if known else None


@dataclass
class _Reports:
    """The directories of one attempt's reports, a host each."""

    start: int | None
    attempt: int
    directories: list[Path] = field(default_factory=list)


def read(state: RunState, latest: Mapping[int, Sequence[Event]]) -> tuple[Attempt, ...]:
    """Every attempt that has reported anything, the first one first. ``latest`` are the events of
    the last one by rank, which need not be read again."""
    found = sorted(_reports(state), key=lambda one: (one.start is None, one.start, one.attempt))
    names = {latest_status(host.run_dir) for host in state.hosts}
    attempts: list[Attempt] = []
    for reports in found:
        events = latest if names == {*reports.directories} else _events(reports.directories)
        if any(events.values()):
            number, again = len(attempts) + 1, reports.attempt + 1
            attempts.append(_attempt(number, again, events, current=reports.start is None))
    return tuple(attempts)


def _reports(state: RunState) -> list[_Reports]:
    found: dict[tuple[int | None, int], _Reports] = {}
    for host in state.hosts:
        for path in host.run_dir.glob(f"{STATUS_DIRECTORY}*"):
            match = _DIRECTORY.fullmatch(path.name)
            if match is not None:
                start = int(match["start"]) if match["start"] else None
                key = start, int(match["attempt"] or 0)
                found.setdefault(key, _Reports(*key)).directories.append(path)
    return list(found.values())


def _events(directories: Sequence[Path]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for path in (path for directory in directories for path in status_files(directory)):
        events, _ = read_events(path)
        if events:
            found.setdefault(events[0].rank, []).extend(events)
    return found


def _attempt(
    number: int, again: int, events: Mapping[int, Sequence[Event]], *, current: bool
) -> Attempt:
    progress: list[tuple[int, float, Mapping[str, Any]]] = []
    others: list[Event] = []
    for event in (event for rows in events.values() for event in rows):
        if event.event != "progress":
            others.append(event)
            continue
        # As step_of, but of a long run there are hundreds of thousands.
        step = event.fields.get("step")
        if type(step) is int and -_LARGEST_STEP < step < _LARGEST_STEP:
            progress.append((step, event.time, event.fields))
    progress.sort(key=lambda row: row[0])
    rows = [fields for _, _, fields in progress]
    names = dict.fromkeys([*rows[0], *sorted(set[str]().union(*rows))]) if rows else {}
    columns = {name: _column(name, rows) for name in names if name not in _NOT_FIGURES}
    total = rows[-1].get("train_steps") if rows else None
    return Attempt(
        number,
        again,
        [step for step, _, _ in progress],
        [time for _, time, _ in progress],
        {name: column for name, column in columns.items() if column},
        sorted(others, key=lambda event: event.time),
        current,
        total if type(total) is int else None,
    )


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """A figure of all rows; nothing of what is no number in any."""
    found = [row.get(name) for row in rows]
    kinds = set(map(type, found))
    if kinds == {float}:
        return found  # type: ignore[return-value]
    if kinds.isdisjoint((int, float)):
        return []
    return [_number(value) for value in found]


def step_of(event: Event) -> int | None:
    """The step that an event names, if it names one."""
    step = event.get("step")
    return step if type(step) is int and abs(step) < _LARGEST_STEP else None


def _number(value: object) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _LARGEST_STEP else math.nan
