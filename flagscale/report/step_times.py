"""Part of a page about the time of a step: its sections on each rank, from the last reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from flagscale.launcher.job_hosts import name_hosts_of_ranks
from flagscale.report.history import step_of
from flagscale.report.html import Html, details, element, join_parts, table
from flagscale.report.run import RunReport
from flagscale.status import SECTIONS, Event

_MAX_RANKS = 1024
_MAX_OPEN_RANKS = 16
_MAX_SECONDS = 1e6
_WAITING = "waiting"


def render_step_times(run: RunReport) -> Html:
    """Return the sections of a step: the median over the ranks, and each rank; empty if no rank of
    the last attempt has reported any.
    """
    latest: dict[int, Event] = {}
    for event in run.attempts[-1].events_of_kind("sections") if run.attempts else ():
        latest[event.rank] = event
    seconds = {rank: _read_seconds(event) for rank, event in sorted(latest.items())}
    if not seconds:
        return Html()
    medians = {
        name: statistics.median(values[name] for values in seconds.values()) for name in SECTIONS
    }
    last_step = max(filter(None, map(step_of, latest.values())), default=None)
    around = "" if last_step is None else f" around step {last_step:,}"
    headings = ("rank", "host", *SECTIONS, "own work")
    host_names = name_hosts_of_ranks(run.state)
    rows = [
        [f"{rank}", host_names.get(rank, ""), *_format_row(values)]
        for rank, values in seconds.items()
    ]
    rows = rows[:_MAX_RANKS]
    omitted = len(seconds) - len(rows)
    return join_parts(
        (
            element(
                "p",
                f"Milliseconds of a step{around}. Waiting is for other ranks; own work is the "
                "rest of the step.",
            ),
            table(("", *headings[2:]), [["median of the ranks", *_format_row(medians)]]),
            details(
                f"{len(seconds):,} rank{'s' if len(seconds) != 1 else ''}",
                table(headings, rows),
                element("p", f"and {omitted:,} more ranks") if omitted else "",
                is_open=len(rows) <= _MAX_OPEN_RANKS,
            ),
        )
    )


def _read_seconds(event: Event) -> Mapping[str, float]:
    values = {name: event.get_number(name) for name in SECTIONS}
    return {
        name: float(value) if value is not None and 0 <= value < _MAX_SECONDS else 0.0
        for name, value in values.items()
    }


def _format_row(seconds: Mapping[str, float]) -> list[str]:
    work = sum(seconds.values()) - seconds[_WAITING]
    return [f"{value * 1e3:,.1f}" for value in (*seconds.values(), work)]
