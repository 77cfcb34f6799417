from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.estimate.pipeline import (
    PipelinePass,
    StagePassTimes,
    count_warmup_passes,
    iter_schedule,
    simulate_step,
)


def equal_stages(
    stages: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> list[StagePassTimes]:
    return [StagePassTimes((forward / chunks,) * chunks, (backward / chunks,) * chunks)] * stages


def format_order(stages: int, index: int, micro_batches: int, chunks: int = 1) -> str:
    """Format a stage's order, such as ``F0 F1 B0``, with chunks as letters."""
    return " ".join(
        f"{'FB'[work.is_backward]}{'abc'[work.chunk] if chunks > 1 else ''}{work.micro_batch}"
        for work in iter_schedule(stages, index, micro_batches, chunks)
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, 0, 4), "F0 F1 F2 B0 F3 B1 B2 B3"),
        ((3, 2, 3), "F0 B0 F1 B1 F2 B2"),
        ((3, 0, 1), "F0 B0"),
        ((2, 0, 2, 2), "Fa0 Fa1 Fb0 Fb1 Bb0 Bb1 Ba0 Ba1"),
        ((2, 1, 2, 2), "Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1"),
    ],
    ids=["first-of-three", "last-of-three", "one-micro-batch", "interleaved-0", "interleaved-1"],
)
def test_order_equals_megatrons(arguments: tuple[int, ...], expected: str) -> None:
    assert format_order(*arguments) == expected


@given(
    stages=st.integers(1, 5),
    index=st.integers(0, 4),
    rounds=st.integers(1, 4),
    chunks=st.integers(1, 3),
)
def test_schedule_runs_each_pass_once(stages: int, index: int, rounds: int, chunks: int) -> None:
    index %= stages
    count = rounds * stages
    pass_counts = Counter(iter_schedule(stages, index, count, chunks))
    assert pass_counts == {
        PipelinePass(backward, chunk, number): 1
        for backward in (False, True)
        for chunk in range(chunks)
        for number in range(count)
    }


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 64])
def test_equal_stages_by_hand(stages: int, micro_batches: int) -> None:
    simulated = simulate_step(equal_stages(stages), micro_batches)
    assert simulated.seconds == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert simulated.busy_seconds == pytest.approx((3.0 * micro_batches,) * stages)


@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_shorten_the_time_in_which_the_pipeline_fills(chunks: int) -> None:
    """Narayanan et al. (2021): the idle time is (p - 1)(f + b) / v."""
    simulated = simulate_step(equal_stages(4, chunks), 8)
    assert simulated.seconds == pytest.approx(8 * 3.0 + 3 * 3.0 / chunks)


@given(
    first_seconds=st.floats(0.1, 10),
    second_seconds=st.floats(0.1, 10),
    micro_batches=st.integers(2, 40),
)
def test_two_different_stages_by_hand(
    first_seconds: float, second_seconds: float, micro_batches: int
) -> None:
    """The slower stage is busy except when it waits. A slow second stage waits for the
    first forward and the last backward pass of the first one. A slow first stage waits for the
    second's first and last two passes, as far as its own passes do not overlap with them.
    """
    stages = [
        StagePassTimes((seconds,), (2 * seconds,)) for seconds in (first_seconds, second_seconds)
    ]
    if first_seconds <= second_seconds:
        expected = 3 * first_seconds + 3 * second_seconds * micro_batches
    else:
        waits = max(3 * second_seconds - first_seconds, 0) + max(
            3 * second_seconds - 2 * first_seconds, 0
        )
        expected = 3 * first_seconds * micro_batches + waits
    assert simulate_step(stages, micro_batches).seconds == pytest.approx(expected)


@given(
    times=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=2, max_size=5),
    micro_batches=st.integers(1, 30),
    transfer=st.floats(0, 3),
)
def test_simulated_time_lies_within_bounds(
    times: list[tuple[float, float]], micro_batches: int, transfer: float
) -> None:
    stages = [StagePassTimes((forward,), (backward,)) for forward, backward in times]
    micro_batch_seconds = sum(stage.total_seconds for stage in stages)
    slowest = max(stage.total_seconds for stage in stages)
    simulated = simulate_step(stages, micro_batches, [transfer] * len(stages))
    transfer_seconds = 2 * transfer * (len(stages) - 1)
    assert (
        simulated.seconds
        >= max(micro_batch_seconds + transfer_seconds, micro_batches * slowest) - 1e-9
    )
    assert simulated.seconds <= micro_batches * (micro_batch_seconds + transfer_seconds) + 1e-9


def test_transfers_take_time() -> None:
    assert simulate_step(equal_stages(2), 1, [0.5, 9.0]).seconds == pytest.approx(6.0 + 2 * 0.5)


def test_eager_schedule_hides_transfers() -> None:
    """Plain 1F1B leaves no time for transfers: every second micro-batch waits for a round trip."""
    without_eager, eager = (
        simulate_step(equal_stages(2), 8, [0.5, 0.0], eager=eager).seconds
        for eager in (False, True)
    )
    filling = 2 * 0.5
    assert without_eager == pytest.approx(8 * 3 + 3 + filling + 7 // 2 * filling)
    assert eager == pytest.approx(8 * 3 + 3 + filling)


def test_warming_up_holds_more_with_chunks() -> None:
    assert [count_warmup_passes(4, index) for index in range(4)] == [3, 2, 1, 0]
    assert [count_warmup_passes(4, index, 2) for index in range(4)] == [10, 8, 6, 4]
    assert [count_warmup_passes(4, index, eager=True) for index in range(4)] == [6, 4, 2, 0]
