"""``rampup_batch_size``: a global batch that grows while training starts, as Megatron-LM's does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments import recompute
from flagscale.config.arguments.precision import Broken, Values

NAME = "rampup_batch_size"
_IN_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True)
class Growth:
    """Sequences of a step: ``start`` at first, ``increment`` more each time that another equal
    part of the first ``samples`` sequences has been taken, and ``final`` after them."""

    start: int
    increment: int
    samples: int
    final: int

    @property
    def batches(self) -> range:
        """All sizes, growing."""
        return range(self.start, self.final + 1, self.increment)

    def batch(self, consumed: int) -> int:
        """Of the step that comes after ``consumed`` sequences."""
        if consumed > self.samples:
            return self.final
        return self.start + self._grown(consumed) * self.increment

    def micro_batches(self, batch: int, count: int) -> int:
        """How many a rank takes of a step of ``batch`` sequences, which takes ``count`` of one of
        ``final``."""
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


def growth_of(values: Values) -> Growth | None:
    """How the batch grows by arguments that have passed :func:`broken`; None where it does not."""
    if values[NAME] is None:
        return None
    start, increment, samples = values[NAME]
    return Growth(start, increment, samples, values["global_batch_size"])


def save_interval(values: Values, consumed: int) -> int | None:
    """Steps between checkpoints where ``consumed`` sequences have been taken, of resolved
    arguments; None where only the end is saved."""
    growth: Growth | None = values["growth"]
    grows = growth is not None and consumed <= growth.samples
    own: int | None = values["rampup_save_interval"] if grows else None
    every: int | None = values["save_interval"]
    return own or every


def broken(values: Values) -> Iterator[Broken]:
    """What does not fit the batch that grows, whatever the number of ranks."""
    given, final = values[NAME], values["global_batch_size"]
    if given is None:
        return
    if len(given) != 3:
        yield NAME, f"expected three numbers (first size, increment, sequences), found {len(given)}"
        return
    if final is None:
        yield "global_batch_size", f"is needed by {NAME}: what does it grow to?"
        return
    start, increment, _ = given
    if start >= final or (final - start) % increment:
        message = f"{start} does not grow to global_batch_size {final} in steps of {increment}"
        yield NAME, message
    if values["train_samples"] is None:
        yield NAME, "needs train_samples in place of train_iters: steps are of unlike sizes"
    for name in _IN_STEPS:
        if values[name]:
            yield name, f"counts steps, which are of unlike sizes with {NAME}: give it in samples"
    if values.get("hetero_mode") == "dp" and values.get("enable_hetero"):
        yield NAME, "is for replicas that take equal shares of a step, not for hetero_mode: dp"
    for name in recompute.NAMES:
        if values[name]:
            yield name, f"names micro-batches, of which there are more and more with {NAME}"


def undivided(values: Values, slice_: int, what: str, stages: int) -> Iterator[Broken]:
    """Sizes that cannot be shared out in micro-batches of ``slice_`` sequences, which ``what``
    describes; with ``stages`` above 1 the number of micro-batches must be a multiple of it."""
    growth = growth_of(values)
    if growth is None:
        return
    for batch in growth.batches:
        if batch % slice_:
            yield NAME, f"comes to {batch}, which is not divisible by {what}"
            return
        if batch // slice_ % stages:
            found = f"comes to {batch}, {batch // slice_} micro-batches"
            yield NAME, f"{found}, which the {stages} stages with virtual stages must divide"
            return
