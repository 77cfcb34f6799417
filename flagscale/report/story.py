"""Story of a directory: all runs that were started in it, as one report.

A run that is started in the directory of an earlier one continues from its checkpoint, so the runs
of a directory are one training with one curve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from flagscale.config.schema import Options
from flagscale.launcher.code_version import CodeVersion
from flagscale.launcher.state import RunState
from flagscale.report.record import describe_record_changes
from flagscale.report.run import RunReport, collect_run
from flagscale.report.timeline import TimelineEvent

_MAX_NAMED_CHANGES = 6
_MAX_VALUE_CHARACTERS = 80


class Change(NamedTuple):
    """Value of the configuration that differs from that of the run before; None if it is not
    set.
    """

    key: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{self.key} {_format_value(self.before)} → {_format_value(self.after)}"


def _format_value(value: str | None) -> str:
    if value is None:
        return "(not set)"
    if len(value) > _MAX_VALUE_CHARACTERS:
        return f"{value[:_MAX_VALUE_CHARACTERS]}…"
    return value


def collect_story(states: Sequence[RunState]) -> RunReport:
    """Collect the runs of a directory, oldest first, as one report.

    It describes the last run, and has the attempts and events of all.
    """
    run_reports = [collect_run(state) for state in states]
    return run_reports[0] if len(run_reports) == 1 else merge_runs(run_reports)


def merge_runs(run_reports: Sequence[RunReport]) -> RunReport:
    """Return the story of runs of one directory, oldest first."""
    attempts = [
        replace(attempt, run_number=number)
        for number, run in enumerate(run_reports, start=1)
        for attempt in run.attempts
    ]
    timeline = [
        event for number in range(1, len(run_reports) + 1) for event in _events(run_reports, number)
    ]
    return replace(
        run_reports[-1],
        attempts=attempts,
        timeline=sorted(timeline, key=lambda event: event.time or 0.0),
        runs=run_reports,
    )


def _events(run_reports: Sequence[RunReport], number: int) -> Iterator[TimelineEvent]:
    """Yield the events of a run, whose start describes how it continues the runs before."""
    for event in run_reports[number - 1].timeline:
        if event.kind == "start" and number > 1:
            yield _start_event(run_reports, number, event)
        else:
            yield replace(event, run_number=number)


def _start_event(
    run_reports: Sequence[RunReport], number: int, event: TimelineEvent
) -> TimelineEvent:
    run, previous = run_reports[number - 1], run_reports[number - 2]
    earlier_step = next(
        (step for step in map(last_step, reversed(run_reports[: number - 1])) if step is not None),
        None,
    )
    step = first_step(run)
    if step is None:
        progress = "it reported no step"
    elif run.state.external:
        progress = f"the first step that it reported is {step}"  # It need not report every step.
    elif step == 1:
        progress = "it began at step 1"
    else:
        progress = f"it continued at step {step}"
    changes = list_changes(previous, run)
    code_changes = [*list_code_changes(previous, run), *list_record_changes(previous, run)]
    text = f"run {number} was started, {run.state.run_id}: {progress}"
    return replace(
        event,
        step=earlier_step if step is None else step,
        kind="change" if changes or code_changes else "resume",
        text="; ".join([text, *describe_changes(changes), *code_changes]),
        run_number=number,
    )


def first_step(run: RunReport) -> int | None:
    """Return the first step that a run reported, or None."""
    return next((attempt.steps[0] for attempt in run.attempts if attempt.steps), None)


def last_step(run: RunReport) -> int | None:
    """Return the last step that a run reported, or None."""
    return next((attempt.steps[-1] for attempt in reversed(run.attempts) if attempt.steps), None)


def list_changes(previous: RunReport, run: RunReport) -> list[Change]:
    """Return the values of the configuration in which a run differs from the one before.

    Empty if the configuration of either was not recorded.
    """
    before, after = previous.settings.options, run.settings.options
    if not before or not after:
        return []
    options = {option.name for option in fields(Options)}
    keys = (key for key in {**before, **after} if key not in options)
    changes = (Change(key, before.get(key), after.get(key)) for key in keys)
    return [change for change in changes if change.before != change.after]


def describe_changes(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a text about changes, if there are any."""
    if changes:
        omitted = len(changes) - _MAX_NAMED_CHANGES
        suffix = f" and {omitted} more keys" if omitted > 0 else ""
        yield "changed: " + ", ".join(map(str, changes[:_MAX_NAMED_CHANGES])) + suffix


def list_code_changes(previous: RunReport, run: RunReport) -> Iterator[str]:
    """Yield texts about code that differs from that of the run before, if both are recorded."""
    if previous.launch is None or run.launch is None:
        return
    if previous.launch.version != run.launch.version:
        yield f"flagscale {previous.launch.version} → {run.launch.version}"
    before = _by_checkout(previous.launch.code)
    for checkout, version in _by_checkout(run.launch.code).items():
        earlier_version = before.get(checkout)
        if earlier_version is not None and earlier_version != version:
            name = Path(checkout).name
            if earlier_version.commit != version.commit:
                yield f"code of {name} {earlier_version} → {version}"
            else:
                yield f"code of {name}: other uncommitted changes"


def list_record_changes(previous: RunReport, run: RunReport) -> Iterator[str]:
    """Yield texts about software and data that differ from those of the run before."""
    return describe_record_changes(previous.record, run.record)


def _by_checkout(code: Sequence[CodeVersion]) -> Mapping[str, CodeVersion]:
    return {version.checkout: version for version in code}
