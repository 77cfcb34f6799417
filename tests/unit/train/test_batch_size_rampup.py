"""Batch size ramp-up, compared with megatron.core's."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flagscale.config.arguments.rules.schedule import BatchSizeRampup, save_interval_at

pytestmark = pytest.mark.torch


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 16),
    increments=st.integers(1, 12),
    samples=st.integers(1, 3000),
    total=st.integers(0, 6000),
)
@example(start=9, increment=1, increments=7, samples=9, total=9)
def test_batch_sizes_equal_megatrons(
    start: int, increment: int, increments: int, samples: int, total: int
) -> None:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator,
    )

    final = start + increments * increment
    growth = BatchSizeRampup(start, increment, samples, final)
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        final, 1, 1, False, 1, start, increment, samples
    )
    consumed, steps = 0, 0
    while True:
        calculator.update(consumed, consistency_check=False)
        batch = growth.batch(consumed)
        assert batch == calculator.get_current_global_batch_size()
        assert growth.steps(consumed, total) == growth.steps(0, total) - steps
        if consumed + batch > total:
            break
        consumed, steps = consumed + batch, steps + 1
    assert growth.steps(0, total) == steps


@pytest.mark.parametrize(
    ("growth", "rampup_interval", "consumed", "interval"),
    [
        (BatchSizeRampup(8, 8, 100, 32), 5, 100, 5),
        (BatchSizeRampup(8, 8, 100, 32), 5, 101, 20),
        (BatchSizeRampup(8, 8, 100, 32), None, 50, 20),
        (None, 5, 50, 20),
    ],
    ids=["grows", "has grown", "the same", "does not grow"],
)
def test_save_interval_during_rampup(
    growth: BatchSizeRampup | None, rampup_interval: int | None, consumed: int, interval: int
) -> None:
    values = {"growth": growth, "rampup_save_interval": rampup_interval, "save_interval": 20}
    assert save_interval_at(values, consumed) == interval
