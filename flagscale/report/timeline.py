"""What happened to a run, in the order of time: starts, checkpoints, spikes, failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flagscale.config.secrets import without_passwords
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState
from flagscale.report.history import Attempt, step_of
from flagscale.report.scale import number
from flagscale.report.spikes import GRAD_NORM, LOSS, Rule, spikes
from flagscale.status import Event

_WARNED_SPIKE = re.compile(r"loss spike at step (\d{1,15}): ")
_MOST_CHARACTERS = 2000
_RULES = (("loss", "loss", LOSS), ("grad_norm", "gradient norm", GRAD_NORM))


@dataclass(frozen=True)
class Happening:
    """One thing that happened. ``kind`` is one of :data:`flagscale.report.plot.MARKS`, or a word of
    its own for what has no place on an axis; ``step`` is None where that is not known."""

    time: float | None
    attempt: int
    step: int | None
    kind: str
    text: str


def happenings(
    state: RunState, seen: Snapshot, attempts: Sequence[Attempt]
) -> tuple[Happening, ...]:
    """Everything that is known to have happened, the first first."""
    failures = dict(seen.earlier)
    found = [Happening(state.started or None, 1, None, "start", "the run was started")]
    for attempt in attempts:
        found += _begins(attempt, attempts, failures)
        found += _reported(attempt)
        found += _spikes(attempt)
    if seen.failure is not None:
        found.append(_failure(seen.failure, attempts))
    elif seen.phase.ended:
        number_ = attempts[-1].number if attempts else 1
        last = attempts[-1].last_step() if attempts else None
        kind = "failure" if seen.phase in (Phase.FAILED, Phase.LOST) else "end"
        found.append(Happening(seen.since or None, number_, last, kind, f"{seen.phase.value}"))
    return tuple(sorted(found, key=lambda one: (one.time or 0.0, one.attempt)))


def _begins(
    attempt: Attempt, attempts: Sequence[Attempt], failures: Mapping[int, Failure]
) -> Iterator[Happening]:
    if attempt.number == 1:
        return
    before = attempts[attempt.number - 2]
    cause = failures.get(before.again) if before.current else None
    why = f"; before: {without_passwords(cause.headline())}" if cause is not None else ""
    step = attempt.steps[0] if attempt.steps else before.last_step()
    on = f", from step {step}" if attempt.steps else ""
    text = f"the job was started again, attempt {attempt.number}{on}{why}"
    yield Happening(attempt.started, attempt.number, step, "restart", text)


def _reported(attempt: Attempt) -> Iterator[Happening]:
    """What ranks said themselves."""
    told: set[tuple[str, int | None]] = set()
    for event in attempt.of("checkpoint", "evaluation", "warning", "ready", "finished"):
        text = _text(event)[:_MOST_CHARACTERS]
        step, kind = step_of(event), event.event
        # Ranks that say the same say it once.
        if (text, step) in told:
            continue
        told.add((text, step))
        if spike := _WARNED_SPIKE.match(text):
            step, kind = int(spike[1]), "spike"
        yield Happening(event.time, attempt.number, step, kind, text)


def _text(event: Event) -> str:
    if event.event == "checkpoint":
        return f"checkpoint saved in {event.get('seconds', '?')} s: {event.get('path', '?')}"
    if event.event == "evaluation":
        return f"{event.get('data', '')} validation loss {event.get('loss', '?')}".strip()
    if event.event == "ready":
        return "model, data and checkpoint are there, training begins"
    if event.event == "finished":
        return f"training ended: {event.get('reason', '?')}"
    return without_passwords(str(event.get("message", "")))


def _spikes(attempt: Attempt) -> Iterator[Happening]:
    warned = {
        int(match[1])
        for event in attempt.of("warning")
        if (match := _WARNED_SPIKE.match(str(event.get("message", ""))))
    }
    for name, what, rule in _RULES:
        for index, text in _stand_out(attempt.figures.get(name, ()), rule):
            step = attempt.steps[index]
            since = attempt.steps[index - 1] if index else step - 1
            # Training looks at every step, and may have told of one between two that were logged.
            if name == "loss" and any(since < at <= step for at in warned):
                continue
            yield Happening(attempt.times[index], attempt.number, step, "spike", f"{what} {text}")


def _stand_out(values: Sequence[float], rule: Rule) -> Iterator[tuple[int, str]]:
    for spike in spikes(values, rule):
        if spike.usual is None:
            yield spike.index, f"is {number(spike.value)}"
        else:
            times = f"{rule.factor:g} times the usual {number(spike.usual)}"
            yield spike.index, f"spike: {number(spike.value)}, more than {times}"


def _failure(failure: Failure, attempts: Sequence[Attempt]) -> Happening:
    own = attempts[-1] if attempts else None
    moment = step = None
    if own is not None:
        moment = min((e.time for e in own.of("failed") if e.rank == failure.rank), default=None)
        moment = moment or (own.times[-1] if own.times else own.started)
        step = own.last_step()
    text = f"first failure: {without_passwords(failure.headline())}"
    return Happening(moment, own.number if own is not None else 1, step, "failure", text)
