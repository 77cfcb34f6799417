"""Rules of the learning-rate and weight-decay schedules, of batch-size ramp-up and of planned
steps.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.rules.data import check_data_phases
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.data_phases import DATA_PHASES, parse_phase
from flagscale.config.arguments.spec.system_arguments import STAGE_RECOMPUTE
from flagscale.config.arguments.spec.values import format_value

RAMPUP = "rampup_batch_size"
_LENGTHS_IN_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True)
class BatchSizeRampup:
    """Ramp-up of the global batch size: ``start`` sequences first, ``increment`` more after each
    equal part of the first ``samples`` sequences, ``final`` afterwards."""

    start: int
    increment: int
    samples: int
    final: int

    @property
    def batches(self) -> range:
        """All sizes, growing."""
        return range(self.start, self.final + 1, self.increment)

    def batch(self, consumed: int) -> int:
        """Return the batch size of the step after ``consumed`` sequences."""
        if consumed > self.samples:
            return self.final
        return self.start + self._grown(consumed) * self.increment

    def micro_batches(self, batch: int, count: int) -> int:
        """Return the micro-batches per rank in a step of ``batch`` sequences, if a step of
        ``final`` sequences has ``count``."""
        return batch * count // self.final

    def steps(self, consumed: int, total: int) -> int:
        """Whole steps from ``consumed`` sequences up to ``total``."""
        steps = 0
        while consumed <= self.samples:
            batch = self.batch(consumed)
            if consumed + batch > total:
                return steps
            consumed, steps = consumed + batch, steps + 1
        return steps + max(total - consumed, 0) // self.final

    def _grown(self, consumed: int) -> int:
        # Rounded as there, where 9 / (9 / 7) is below 7.
        return int(consumed / (self.samples / (len(self.batches) - 1)))


def rampup_of(values: Values) -> BatchSizeRampup | None:
    """Return the batch-size ramp-up of valid arguments; None without one."""
    if values[RAMPUP] is None:
        return None
    start, increment, samples = values[RAMPUP]
    return BatchSizeRampup(start, increment, samples, values["global_batch_size"])


def save_interval_at(values: Values, consumed: int) -> int | None:
    """Steps between checkpoints where ``consumed`` sequences have been taken, of resolved
    arguments; None where only the end is saved."""
    growth: BatchSizeRampup | None = values["growth"]
    grows = growth is not None and consumed <= growth.samples
    rampup_interval: int | None = values["rampup_save_interval"] if grows else None
    every: int | None = values["save_interval"]
    return rampup_interval or every


def check_batch_size_rampup(values: Values) -> Iterator[Violation]:
    """Check the batch-size ramp-up independently of the number of ranks."""
    rampup, final = values[RAMPUP], values["global_batch_size"]
    if rampup is None:
        return
    if len(rampup) != 3:
        yield (
            RAMPUP,
            f"expected three numbers (first size, increment, sequences), found {len(rampup)}",
        )
        return
    if final is None:
        yield "global_batch_size", f"is needed by {RAMPUP}: what does it grow to?"
        return
    start, increment, _ = rampup
    if start >= final or (final - start) % increment:
        message = f"{start} does not grow to global_batch_size {final} in steps of {increment}"
        yield RAMPUP, message
    if values["train_samples"] is None:
        yield RAMPUP, "needs train_samples in place of train_iters: steps are of unlike sizes"
    for name in _LENGTHS_IN_STEPS:
        if values[name]:
            yield name, f"counts steps, which are of unlike sizes with {RAMPUP}: give it in samples"
    if values.get("hetero_mode") == "dp" and values.get("enable_hetero"):
        yield RAMPUP, "is for replicas that take equal shares of a step, not for hetero_mode: dp"
    for name in STAGE_RECOMPUTE:
        if values[name]:
            yield name, f"names micro-batches, of which there are more and more with {RAMPUP}"


def check_rampup_sizes(values: Values, slice_: int, what: str, stages: int) -> Iterator[Violation]:
    """Sizes that cannot be shared out in micro-batches of ``slice_`` sequences, which ``what``
    describes; with ``stages`` above 1 the number of micro-batches must be a multiple of it."""
    growth = rampup_of(values)
    if growth is None:
        return
    for batch in growth.batches:
        if batch % slice_:
            yield RAMPUP, f"comes to {batch}, which is not divisible by {what}"
            return
        if batch // slice_ % stages:
            actual = f"comes to {batch}, {batch // slice_} micro-batches"
            yield RAMPUP, f"{actual}, which the {stages} stages with virtual stages must divide"
            return


_LENGTHS = ("lr_decay", "lr_warmup", "lr_wsd_decay")
_SKIPPED_STEPS = "iterations_to_skip"
PLANNED_STEPS = (_SKIPPED_STEPS, DATA_PHASES)
"""What a user plans for a step or a sample of training."""


def check_schedule(values: Values) -> Iterator[Violation]:
    """Check the schedules of learning rate and weight decay."""
    for name in ("min_lr", "lr_warmup_init"):
        if values[name] > values["lr"]:
            yield name, f"{values[name]} exceeds lr {values['lr']}"
    twice = list(_check_units(values))
    yield from twice
    fraction = values["lr_warmup_fraction"]
    if fraction is not None and (values["lr_warmup_iters"] or values["lr_warmup_samples"]):
        yield "lr_warmup_fraction", "excludes lr_warmup_iters and lr_warmup_samples"
    elif not twice:
        yield from _check_lengths(values)
    yield from _check_weight_decay(values)
    if values["override_opt_param_scheduler"] and values["use_checkpoint_opt_param_scheduler"]:
        yield "override_opt_param_scheduler", "excludes use_checkpoint_opt_param_scheduler"


def _check_units(values: Values) -> Iterator[Violation]:
    """Lengths that are given in both units."""
    for what in _LENGTHS:
        steps, samples = f"{what}_iters", f"{what}_samples"
        if values[steps] and values[samples]:
            actual = f"{values[steps]} beside {samples} {values[samples]}"
            yield steps, f"{actual}: give the length in steps or in samples"


def _check_lengths(values: Values) -> Iterator[Violation]:
    """Warm-up, and WSD's last phase, must fit in the decay that they are part of."""
    decay = _length_in_steps(values, "lr_decay") or _length_in_steps(values, "train")
    warmup = _length_in_steps(values, "lr_warmup")
    if warmup and decay is not None and warmup >= decay:
        name = "lr_warmup_samples" if values["lr_warmup_samples"] else "lr_warmup_iters"
        yield name, f"warming up for {warmup:g} steps leaves nothing of the {decay:g} of the decay"
    elif values["lr_decay_style"] == "WSD":
        yield from _check_wsd_decay(values, decay, warmup)


def _check_wsd_decay(
    values: Values, decay: float | None, warmup: float | None
) -> Iterator[Violation]:
    last = _length_in_steps(values, "lr_wsd_decay")
    if (values["lr_wsd_decay_iters"], values["lr_wsd_decay_samples"]) == (None, None):
        yield "lr_wsd_decay_iters", "WSD needs it, or lr_wsd_decay_samples"
    if last is None or decay is None:
        return
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    available = decay - (warmup or 0)
    if last > available + 1e-9 * decay:
        name = "lr_wsd_decay_samples" if values["lr_wsd_decay_samples"] else "lr_wsd_decay_iters"
        there = f"{decay:g} of the decay" + (f" less {warmup:g} of warm-up" if warmup else "")
        yield name, f"{last:g} steps exceed {there}: the rate would jump below lr; take fewer"


def _length_in_steps(values: Values, what: str) -> float | None:
    """A length in steps, in whichever unit it is given; None if samples cannot be converted."""
    samples, batch = values[f"{what}_samples"], values["global_batch_size"]
    if samples:
        return samples / batch if batch else None
    steps: float | None = values[f"{what}_iters"]
    return steps


def _check_weight_decay(values: Values) -> Iterator[Violation]:
    start, end = weight_decays(values)
    style = values["weight_decay_incr_style"]
    bounds = (values["start_weight_decay"], values["end_weight_decay"])
    if start > end:
        yield "start_weight_decay", f"{start} exceeds end_weight_decay {end}"
    elif start != end and style == "constant":
        message = f"constant does not lead from {start} to {end}; take linear"
        yield "weight_decay_incr_style", message
    elif style != "constant" and bounds == (None, None):
        message = f"{style} leads from start_weight_decay to end_weight_decay: give one or both"
        yield "weight_decay_incr_style", message


def weight_decays(values: Values) -> tuple[float, float]:
    """Weight decay at the start and at the end of training."""
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    return (
        values["weight_decay"] if start is None else start,
        values["weight_decay"] if end is None else end,
    )


def note_unreached_steps(values: Values, batch: int) -> Iterator[tuple[str, str]]:
    """Yield arguments that plan for a step after the end of training, with the reason. ``batch`` is
    the number of sequences per step."""
    samples = values["train_samples"]
    if samples is None:
        samples = (values["train_iters"] or 0) * batch
    growth = rampup_of({**values, "global_batch_size": batch})
    steps = growth.steps(0, samples) if growth else samples // batch
    late = [step for step in values[_SKIPPED_STEPS] or () if step > steps]
    if late:
        yield _SKIPPED_STEPS, f"{format_value(late)}: training ends after step {steps}"
    phases = () if any(check_data_phases(values)) else values[DATA_PHASES] or ()
    begins = [parse_phase(text).begin(values["seq_length"]) for text in phases]
    if begins and begins[-1] >= samples:
        first = next(begin for begin in begins if begin >= samples)
        yield DATA_PHASES, f"from sample {first} on: training ends after {samples}"


def schedule_lengths(values: Values) -> dict[str, Any]:
    """Lengths of decay, warm-up, WSD's last phase and weight decay's increase, in samples, from
    resolved arguments."""

    def samples(what: str) -> int | None:
        in_samples, in_steps = values[f"{what}_samples"], values[f"{what}_iters"]
        if in_samples is not None:
            return int(in_samples)
        return None if in_steps is None else int(in_steps * values["global_batch_size"])

    total = max(values["train_samples"], 1)
    decay = samples("lr_decay") or total
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    else:
        warmup = (
            values["lr_warmup_samples"] or values["lr_warmup_iters"] * values["global_batch_size"]
        )
    return {
        "lr_decay_steps": decay,
        "lr_warmup_steps": warmup,
        "wsd_decay_steps": samples("lr_wsd_decay"),
        "wd_incr_steps": total,
    }
