"""Events of a run in order of time: starts, checkpoints, spikes, failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flagscale.config.secrets import hide_passwords
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState
from flagscale.report.history import Attempt, step_of
from flagscale.report.scale import format_number
from flagscale.report.spikes import GRAD_NORM_RULE, LOSS_RULE, SpikeRule, find_spikes
from flagscale.status import Event

_SPIKE_WARNING_PATTERN = re.compile(r"loss spike at step (\d{1,15}): ")
_MAX_CHARACTERS = 2000
_END_KINDS = {Phase.FAILED: "failure", Phase.LOST: "failure", Phase.STOPPED: "stop"}
_SPIKE_RULES = (("loss", "loss", LOSS_RULE), ("grad_norm", "gradient norm", GRAD_NORM_RULE))


@dataclass(frozen=True)
class TimelineEvent:
    """Event of a run.

    ``kind`` is a key of :data:`flagscale.report.plot.MARKS`, or another word for events that have
    no position on an axis. ``step`` is None if unknown.
    """

    time: float | None
    attempt: int
    step: int | None
    kind: str
    text: str
    run_number: int | None = None
    """Number of its run among those of the directory, from 1, in the story of a directory."""


def list_events(
    state: RunState, snapshot: Snapshot, attempts: Sequence[Attempt]
) -> tuple[TimelineEvent, ...]:
    """Return all known events, in order of time."""
    failures = dict(snapshot.earlier)
    events = [
        TimelineEvent(
            time=state.started or None,
            attempt=1,
            step=None,
            kind="start",
            text="the run was started",
        )
    ]
    for attempt in attempts:
        events += _restart_event(attempt, attempts, failures)
        events += _reported_events(attempt)
        events += _spike_events(attempt)
    if snapshot.failure is not None:
        events.append(_failure_event(snapshot.failure, attempts))
    elif snapshot.phase.ended:
        last_attempt_number = attempts[-1].number if attempts else 1
        last_step = attempts[-1].last_step() if attempts else None
        kind = _END_KINDS.get(snapshot.phase, "end")
        events.append(
            TimelineEvent(
                time=snapshot.since or None,
                attempt=last_attempt_number,
                step=last_step,
                kind=kind,
                text=f"{snapshot.phase.value}",
            )
        )
    return tuple(sorted(events, key=lambda event: (event.time or 0.0, event.attempt)))


def _restart_event(
    attempt: Attempt, attempts: Sequence[Attempt], failures: Mapping[int, Failure]
) -> Iterator[TimelineEvent]:
    if attempt.number == 1:
        return
    previous = attempts[attempt.number - 2]
    cause = failures.get(previous.number_in_start) if previous.is_current else None
    cause_text = f"; before: {hide_passwords(cause.headline())}" if cause is not None else ""
    step = attempt.steps[0] if attempt.steps else previous.last_step()
    step_text = f", from step {step}" if attempt.steps else ""
    text = f"the job was started again, attempt {attempt.number}{step_text}{cause_text}"
    yield TimelineEvent(
        time=attempt.start_time, attempt=attempt.number, step=step, kind="restart", text=text
    )


_REPORTED_KINDS = (
    *("checkpoint", "evaluation", "tasks", "stragglers", "warning", "ready", "finished"),
)


def _reported_events(attempt: Attempt) -> Iterator[TimelineEvent]:
    """Yield events reported by ranks."""
    reported: set[tuple[str, int | None]] = set()
    for event in attempt.events_of_kind(*_REPORTED_KINDS):
        text = _describe_event(event)[:_MAX_CHARACTERS]
        step, kind = step_of(event), event.event
        # Equal reports of several ranks become one event.
        if (text, step) in reported:
            continue
        reported.add((text, step))
        if spike := _SPIKE_WARNING_PATTERN.match(text):
            step, kind = int(spike[1]), "spike"
        yield TimelineEvent(
            time=event.time, attempt=attempt.number, step=step, kind=kind, text=text
        )


def _describe_event(event: Event) -> str:
    if event.event == "checkpoint":
        mark = "best checkpoint" if event.get("best") else "checkpoint"
        return f"{mark} saved in {event.get('seconds', '?')} s: {event.get('path', '?')}"
    if event.event in ("evaluation", "tasks"):
        return _describe_evaluation(event)
    if event.event == "ready":
        return "model, data and checkpoint are there, training begins"
    if event.event == "finished":
        detail = f", {event.get('detail')}" if event.get("detail") else ""
        return f"training ended: {event.get('reason', '?')}{detail}"
    if event.event == "stragglers":
        messages = event.get("messages")
        known = isinstance(messages, list) and messages
        return "; ".join(map(str, messages)) if known else "there are no stragglers any more"
    return hide_passwords(str(event.get("message", "")))


def _describe_evaluation(event: Event) -> str:
    if event.event == "tasks":
        scores = event.get_numbers("scores").items()
        return "tasks: " + ", ".join(f"{name} {value:.4f}" for name, value in scores)
    return f"{event.get('data', '')} validation loss {event.get('loss', '?')}".strip()


def _spike_events(attempt: Attempt) -> Iterator[TimelineEvent]:
    warned_steps = {
        int(match[1])
        for event in attempt.events_of_kind("warning")
        if (match := _SPIKE_WARNING_PATTERN.match(str(event.get("message", ""))))
    }
    for name, metric_title, rule in _SPIKE_RULES:
        for index, text in _describe_spikes(attempt.metrics.get(name, ()), rule):
            step = attempt.steps[index]
            previous_step = attempt.steps[index - 1] if index else step - 1
            # Training checks every step, and may have warned of a spike between two logged steps.
            if name == "loss" and any(
                previous_step < warned_step <= step for warned_step in warned_steps
            ):
                continue
            yield TimelineEvent(
                time=attempt.times[index],
                attempt=attempt.number,
                step=step,
                kind="spike",
                text=f"{metric_title} {text}",
            )


def _describe_spikes(values: Sequence[float], rule: SpikeRule) -> Iterator[tuple[int, str]]:
    for spike in find_spikes(values, rule):
        if spike.median is None:
            yield spike.index, f"is {format_number(spike.value)}"
        else:
            times = f"{rule.factor:g} times the usual {format_number(spike.median)}"
            yield spike.index, f"spike: {format_number(spike.value)}, more than {times}"


def _failure_event(failure: Failure, attempts: Sequence[Attempt]) -> TimelineEvent:
    last_attempt = attempts[-1] if attempts else None
    moment = step = None
    if last_attempt is not None:
        moment = min(
            (e.time for e in last_attempt.events_of_kind("failed") if e.rank == failure.rank),
            default=None,
        )
        moment = moment or (
            last_attempt.times[-1] if last_attempt.times else last_attempt.start_time
        )
        step = last_attempt.last_step()
    text = f"first failure: {hide_passwords(failure.headline())}"
    return TimelineEvent(
        time=moment,
        attempt=last_attempt.number if last_attempt is not None else 1,
        step=step,
        kind="failure",
        text=text,
    )
