from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.estimate.pipeline import Passes, Work, order, play, warm_up


def alike(
    stages: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> list[Passes]:
    return [Passes((forward / chunks,) * chunks, (backward / chunks,) * chunks)] * stages


def texts(stages: int, index: int, micro_batches: int, chunks: int = 1) -> str:
    """A stage's order, such as ``F0 F1 B0``; chunks as letters."""
    return " ".join(
        f"{'FB'[work.backward]}{'abc'[work.chunk] if chunks > 1 else ''}{work.micro_batch}"
        for work in order(stages, index, micro_batches, chunks)
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
def test_the_order_of_megatron(arguments: tuple[int, ...], expected: str) -> None:
    assert texts(*arguments) == expected


@given(
    stages=st.integers(1, 5),
    index=st.integers(0, 4),
    rounds=st.integers(1, 4),
    chunks=st.integers(1, 3),
)
def test_each_pass_once(stages: int, index: int, rounds: int, chunks: int) -> None:
    index %= stages
    count = rounds * stages
    found = Counter(order(stages, index, count, chunks))
    assert found == {
        Work(backward, chunk, number): 1
        for backward in (False, True)
        for chunk in range(chunks)
        for number in range(count)
    }


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 64])
def test_equal_stages_by_hand(stages: int, micro_batches: int) -> None:
    played = play(alike(stages), micro_batches)
    assert played.seconds == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert played.busy == pytest.approx((3.0 * micro_batches,) * stages)


@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_shorten_the_time_in_which_the_pipeline_fills(chunks: int) -> None:
    """Narayanan et al. (2021): the idle time is (p - 1)(f + b) / v."""
    played = play(alike(4, chunks), 8)
    assert played.seconds == pytest.approx(8 * 3.0 + 3 * 3.0 / chunks)


@given(first=st.floats(0.1, 10), second=st.floats(0.1, 10), micro_batches=st.integers(2, 40))
def test_two_unlike_stages_by_hand(first: float, second: float, micro_batches: int) -> None:
    """The slower stage works all the time but where it waits: a slow second one for the first
    forward and the last backward pass of the first stage, a slow first one for the second's first
    and last two passes, as far as its own forward or backward pass does not cover them."""
    stages = [Passes((each,), (2 * each,)) for each in (first, second)]
    if first <= second:
        expected = 3 * first + 3 * second * micro_batches
    else:
        waits = max(3 * second - first, 0) + max(3 * second - 2 * first, 0)
        expected = 3 * first * micro_batches + waits
    assert play(stages, micro_batches).seconds == pytest.approx(expected)


@given(
    times=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=2, max_size=5),
    micro_batches=st.integers(1, 30),
    transfer=st.floats(0, 3),
)
def test_bounds(times: list[tuple[float, float]], micro_batches: int, transfer: float) -> None:
    stages = [Passes((forward,), (backward,)) for forward, backward in times]
    one = sum(stage.both for stage in stages)
    slowest = max(stage.both for stage in stages)
    played = play(stages, micro_batches, [transfer] * len(stages))
    way = 2 * transfer * (len(stages) - 1)
    assert played.seconds >= max(one + way, micro_batches * slowest) - 1e-9
    assert played.seconds <= micro_batches * (one + way) + 1e-9


def test_what_is_on_its_way_counts() -> None:
    assert play(alike(2), 1, [0.5, 9.0]).seconds == pytest.approx(6.0 + 2 * 0.5)


def test_what_is_on_its_way_is_hidden_where_stages_are_eager() -> None:
    """Plain 1F1B leaves no time for it: every second micro-batch waits for a way there and back."""
    plain, eager = (play(alike(2), 8, [0.5, 0.0], eager=eager).seconds for eager in (False, True))
    filling = 2 * 0.5
    assert plain == pytest.approx(8 * 3 + 3 + filling + 7 // 2 * filling)
    assert eager == pytest.approx(8 * 3 + 3 + filling)


def test_warming_up_holds_more_with_chunks() -> None:
    assert [warm_up(4, index) for index in range(4)] == [3, 2, 1, 0]
    assert [warm_up(4, index, 2) for index in range(4)] == [10, 8, 6, 4]
    assert [warm_up(4, index, eager=True) for index in range(4)] == [6, 4, 2, 0]
