"""Parts of a page about the runs of one directory, and the format of times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

from flagscale.report.html import Cell, Html, details, element, join_parts, table
from flagscale.report.run import RunReport
from flagscale.report.story import (
    Change,
    describe_changes,
    first_step,
    last_step,
    list_changes,
    list_code_changes,
    list_record_changes,
)

_CODE_COLUMN = 6
_NOT_RECORDED = "its configuration was not recorded"


def render_run_table(run: RunReport) -> Html:
    """Return the table of a directory's runs, and of what changed from run to run; empty for a
    single run.
    """
    if not run.runs:
        return Html()
    rows = [_row(run, number) for number in range(1, len(run.runs) + 1)]
    if len({row[_CODE_COLUMN] for row in rows}) == 1:
        rows = [[*row[:_CODE_COLUMN], "", *row[_CODE_COLUMN + 1 :]] for row in rows]
    headings = ("", "run", "state", "started", "lasted", "steps", "code", "changed")
    columns = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    run_table = table([headings[i] for i in columns], [[row[i] for i in columns] for row in rows])
    changes = [
        [str(number), Cell(change.key, "key"), *map(_value_cell, (change.before, change.after))]
        for number, (previous, later) in enumerate(pairwise(run.runs), start=2)
        for change in list_changes(previous, later)
    ]
    change_table = (
        details("what changed from run to run", table(("run", "key", "before", "after"), changes))
        if changes
        else ""
    )
    note = element("p", "`flagscale report RUN`, with an id, shows one of them alone.")
    return join_parts((run_table, change_table, note))


def _row(story: RunReport, number: int) -> list[object]:
    run = story.runs[number - 1]
    first, last = first_step(run), last_step(run)
    end = run.end_time or run.collected_at
    return [
        str(number),
        Cell(run.state.run_id, "time"),
        run.snapshot.phase.value,
        Cell(format_time(run.state.started).rpartition(" ")[0], "time"),
        format_duration(end - run.state.started),
        "" if first is None or last is None else Cell(f"{first:,} to {last:,}", "time"),
        describe_code(run),
        "" if number == 1 else _describe_changes(story.runs[number - 2], run),
    ]


def _describe_changes(previous: RunReport, run: RunReport) -> str:
    if not (previous.settings.options and run.settings.options):
        return _NOT_RECORDED if run.settings.missing_reason else ""
    changes: list[Change] = list_changes(previous, run)
    texts = [*describe_changes(changes), *list_code_changes(previous, run)]
    texts += list_record_changes(previous, run)
    return "; ".join(texts).removeprefix("changed: ") or "nothing"


def _value_cell(value: str | None) -> str:
    return "(not set)" if value is None else value


def describe_code(run: RunReport) -> str:
    """Return version and commits of the code of a run; empty if they were not recorded."""
    if run.launch is None:
        return ""
    return ", ".join((f"flagscale {run.launch.version}", *map(str, run.launch.code)))


def list_earlier_configurations(story: RunReport) -> Iterator[tuple[int, str]]:
    """Yield number and configuration of each run whose configuration the next one changed."""
    for number, (run, later) in enumerate(pairwise(story.runs), start=1):
        if run.settings.text and list_changes(run, later):
            yield number, run.settings.text


def format_end(run: RunReport) -> str:
    """Return when a run ended and how long it lasted."""
    start_time = run.state.started
    if not start_time:
        return format_time(run.end_time) if run.end_time else ""
    duration = format_duration((run.end_time or run.collected_at) - start_time)
    return f"{format_time(run.end_time)}, after {duration}" if run.end_time else duration


def format_duration(seconds: float) -> str:
    """Format a duration as ``0:01:11``. It comes from ranks and may be anything."""
    try:
        return str(timedelta(seconds=max(0, round(seconds))))
    except (ValueError, OverflowError):
        return f"{seconds:g} s"


def format_time(moment: float) -> str:
    """Format a time of the local time zone. It comes from ranks and may be anything."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return f"{moment:g}"
