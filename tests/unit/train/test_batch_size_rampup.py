"""Batch size ramp-up, compared with megatron.core's."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flagscale.config.arguments.rules.optimizer import BatchSizeRampup, save_interval_at

pytestmark = pytest.mark.torch


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 16),
    increments=st.integers(1, 12),
    rampup_samples=st.integers(1, 3000),
    total_samples=st.integers(0, 6000),
)
@example(start=9, increment=1, increments=7, rampup_samples=9, total_samples=9)
def test_batch_sizes_and_steps_equal_megatrons(
    start: int, increment: int, increments: int, rampup_samples: int, total_samples: int
) -> None:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator,
    )

    final_batch_size = start + increments * increment
    rampup = BatchSizeRampup(start, increment, rampup_samples, final_batch_size)
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        final_batch_size, 1, 1, False, 1, start, increment, rampup_samples
    )
    consumed_samples, steps = 0, 0
    while True:
        calculator.update(consumed_samples, consistency_check=False)
        batch_size = rampup.batch_size_after(consumed_samples)
        assert batch_size == calculator.get_current_global_batch_size()
        assert (
            rampup.steps(consumed_samples, total_samples) == rampup.steps(0, total_samples) - steps
        )
        if consumed_samples + batch_size > total_samples:
            break
        consumed_samples, steps = consumed_samples + batch_size, steps + 1
    assert rampup.steps(0, total_samples) == steps


@pytest.mark.parametrize(
    ("rampup", "rampup_interval", "consumed_samples", "expected_interval"),
    [
        (BatchSizeRampup(8, 8, 100, 32), 5, 100, 5),
        (BatchSizeRampup(8, 8, 100, 32), 5, 101, 20),
        (BatchSizeRampup(8, 8, 100, 32), None, 50, 20),
        (None, 5, 50, 20),
    ],
    ids=["during_rampup", "after_rampup", "no_own_interval", "no_rampup"],
)
def test_save_interval_during_rampup(
    rampup: BatchSizeRampup | None,
    rampup_interval: int | None,
    consumed_samples: int,
    expected_interval: int,
) -> None:
    values = {"rampup": rampup, "rampup_save_interval": rampup_interval, "save_interval": 20}
    assert save_interval_at(values, consumed_samples) == expected_interval
