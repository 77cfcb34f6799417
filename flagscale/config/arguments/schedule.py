"""What is asked of the schedule of learning rate and weight decay, and of what is planned for a
step or a sample of training. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments import phases
from flagscale.config.arguments.growth import growth_of
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown

_LENGTHS = ("lr_decay", "lr_warmup", "lr_wsd_decay")
_SKIPPED = "iterations_to_skip"
PLANNED = (_SKIPPED, phases.NAME)
"""What a user plans for a step or a sample of training."""


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of the schedule."""
    for name in ("min_lr", "lr_warmup_init"):
        if values[name] > values["lr"]:
            yield name, f"{values[name]} exceeds lr {values['lr']}"
    twice = list(_twice(values))
    yield from twice
    fraction = values["lr_warmup_fraction"]
    if fraction is not None and (values["lr_warmup_iters"] or values["lr_warmup_samples"]):
        yield "lr_warmup_fraction", "excludes lr_warmup_iters and lr_warmup_samples"
    elif not twice:
        yield from _lengths(values)
    yield from _weight_decay(values)
    if values["override_opt_param_scheduler"] and values["use_checkpoint_opt_param_scheduler"]:
        yield "override_opt_param_scheduler", "excludes use_checkpoint_opt_param_scheduler"


def _twice(values: Values) -> Iterator[Broken]:
    """Lengths that are given in both units."""
    for what in _LENGTHS:
        steps, samples = f"{what}_iters", f"{what}_samples"
        if values[steps] and values[samples]:
            found = f"{values[steps]} beside {samples} {values[samples]}"
            yield steps, f"{found}: give the length in steps or in samples"


def _lengths(values: Values) -> Iterator[Broken]:
    """Warm-up, and WSD's last phase, must fit in the decay that they are part of."""
    decay = _steps(values, "lr_decay") or _steps(values, "train")
    warmup = _steps(values, "lr_warmup")
    if warmup and decay is not None and warmup >= decay:
        name = "lr_warmup_samples" if values["lr_warmup_samples"] else "lr_warmup_iters"
        yield name, f"warming up for {warmup:g} steps leaves nothing of the {decay:g} of the decay"
    elif values["lr_decay_style"] == "WSD":
        yield from _last_phase(values, decay, warmup)


def _last_phase(values: Values, decay: float | None, warmup: float | None) -> Iterator[Broken]:
    last = _steps(values, "lr_wsd_decay")
    if (values["lr_wsd_decay_iters"], values["lr_wsd_decay_samples"]) == (None, None):
        yield "lr_wsd_decay_iters", "WSD needs it, or lr_wsd_decay_samples"
    if last is None or decay is None:
        return
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    left = decay - (warmup or 0)
    if last > left + 1e-9 * decay:
        name = "lr_wsd_decay_samples" if values["lr_wsd_decay_samples"] else "lr_wsd_decay_iters"
        there = f"{decay:g} of the decay" + (f" less {warmup:g} of warm-up" if warmup else "")
        yield name, f"{last:g} steps exceed {there}: the rate would jump below lr; take fewer"


def _steps(values: Values, what: str) -> float | None:
    """A length in steps, in whichever unit it is given; None if samples cannot be converted."""
    samples, batch = values[f"{what}_samples"], values["global_batch_size"]
    if samples:
        return samples / batch if batch else None
    steps: float | None = values[f"{what}_iters"]
    return steps


def _weight_decay(values: Values) -> Iterator[Broken]:
    start, end = weight_decays(values)
    style = values["weight_decay_incr_style"]
    given = (values["start_weight_decay"], values["end_weight_decay"])
    if start > end:
        yield "start_weight_decay", f"{start} exceeds end_weight_decay {end}"
    elif start != end and style == "constant":
        message = f"constant does not lead from {start} to {end}; take linear"
        yield "weight_decay_incr_style", message
    elif style != "constant" and given == (None, None):
        message = f"{style} leads from start_weight_decay to end_weight_decay: give one or both"
        yield "weight_decay_incr_style", message


def weight_decays(values: Values) -> tuple[float, float]:
    """Weight decay at the start and at the end of training."""
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    return (
        values["weight_decay"] if start is None else start,
        values["weight_decay"] if end is None else end,
    )


def notes(values: Values, batch: int) -> Iterator[tuple[str, str]]:
    """What is planned for behind the end of training, by name, and why it has no effect. ``batch``:
    sequences of a step."""
    samples = values["train_samples"]
    if samples is None:
        samples = (values["train_iters"] or 0) * batch
    growth = growth_of({**values, "global_batch_size": batch})
    steps = growth.steps(0, samples) if growth else samples // batch
    late = [step for step in values[_SKIPPED] or () if step > steps]
    if late:
        yield _SKIPPED, f"{shown(late)}: training ends after step {steps}"
    given = () if any(phases.broken(values)) else values[phases.NAME] or ()
    begins = [phases.parse(text).begin(values["seq_length"]) for text in given]
    if begins and begins[-1] >= samples:
        first = next(begin for begin in begins if begin >= samples)
        yield phases.NAME, f"from sample {first} on: training ends after {samples}"
