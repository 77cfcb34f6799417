"""A batch that grows is megatron.core's own."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flagscale.config.arguments.growth import Growth, save_interval

pytestmark = pytest.mark.torch


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 16),
    increments=st.integers(1, 12),
    samples=st.integers(1, 3000),
    total=st.integers(0, 6000),
)
@example(start=9, increment=1, increments=7, samples=9, total=9)
def test_batches_are_megatrons(
    start: int, increment: int, increments: int, samples: int, total: int
) -> None:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator,
    )

    final = start + increments * increment
    grows = Growth(start, increment, samples, final)
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        final, 1, 1, False, 1, start, increment, samples
    )
    consumed, steps = 0, 0
    while True:
        theirs.update(consumed, consistency_check=False)
        batch = grows.batch(consumed)
        assert batch == theirs.get_current_global_batch_size()
        assert grows.steps(consumed, total) == grows.steps(0, total) - steps
        if consumed + batch > total:
            break
        consumed, steps = consumed + batch, steps + 1
    assert grows.steps(0, total) == steps


@pytest.mark.parametrize(
    ("growth", "own", "consumed", "interval"),
    [
        (Growth(8, 8, 100, 32), 5, 100, 5),
        (Growth(8, 8, 100, 32), 5, 101, 20),
        (Growth(8, 8, 100, 32), None, 50, 20),
        (None, 5, 50, 20),
    ],
    ids=["grows", "has grown", "the same", "does not grow"],
)
def test_checkpoints_while_the_batch_grows(
    growth: Growth | None, own: int | None, consumed: int, interval: int
) -> None:
    values = {"growth": growth, "rampup_save_interval": own, "save_interval": 20}
    assert save_interval(values, consumed) == interval
