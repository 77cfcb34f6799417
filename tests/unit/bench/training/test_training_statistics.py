"""Ratios with intervals, losses that agree, time to a loss, tables of bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.bench.bootstrap import group_by_round, percentile_ratio
from flagscale.bench.training.byte_counts import describe_matrix, matrix_difference
from flagscale.bench.training.losses import common_loss, compare_losses, smooth, time_to_loss


def _times(seed: int, rounds: int, each: int = 10) -> tuple[list[float], list[int]]:
    """Times of steps, which a round shares a disturbance of."""
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.lognormal(0, 0.3, rounds), each)
    times = shared * draw.lognormal(0, 0.02, rounds * each)
    return list(times), [int(r) for r in np.repeat(np.arange(1, rounds + 1), each)]


def test_values_are_grouped_by_round() -> None:
    assert group_by_round([1.0, 2.0, 3.0], [1, 1, 4]) == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("percent", [50.0, 99.0])
def test_a_constant_slowdown_is_found_exactly(percent: float) -> None:
    times, rounds = _times(1, 20)
    found = percentile_ratio([1.5 * t for t in times], times, rounds, percent)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_rounds_are_drawn_whole() -> None:
    """Steps by themselves would make the interval too narrow, and leave the truth out of it."""
    missed = 0
    for seed in range(12):
        above, rounds = _times(2 * seed, 24)
        below, _ = _times(2 * seed + 1, 24)
        found = percentile_ratio(above, below, rounds)
        missed += not found.low <= 1 <= found.high
    # Not one of 12 is expected; drawn step by step it is every second one.
    assert missed <= 3


def test_one_step_has_no_interval() -> None:
    found = percentile_ratio([3.0], [2.0], [1])
    assert (found.value, found.low, found.high) == (1.5, 0.0, math.inf)


@pytest.mark.parametrize(
    ("other", "holds"),
    [
        pytest.param([5.0 - 0.1 * i for i in range(20)], True, id="same"),
        pytest.param([5.0 - 0.1 * i + 1e-6 * i for i in range(20)], True, id="rounding"),
        pytest.param([5.0, *[5.0 - 0.2 * i for i in range(1, 20)]], False, id="early"),
        pytest.param([5.0 - 0.1 * i + 0.1 * (i > 15) for i in range(20)], False, id="late"),
        pytest.param([*[5.0 - 0.1 * i for i in range(19)], None], False, id="no number"),
        pytest.param(
            [5.0 - 0.1 * i + (i > 9) * 0.2 * (-1) ** i for i in range(20)], True, id="to and fro"
        ),
    ],
)
def test_losses_agree_except_for_rounding(other: list[float | None], holds: bool) -> None:
    assert compare_losses([5.0 - 0.1 * i for i in range(20)], other).holds is holds


def test_time_to_a_loss_that_all_reach() -> None:
    fast = smooth([4.0, 2.0, 1.0])
    slow = smooth([4.0, 3.0, 2.5])
    loss = common_loss([fast, slow])
    assert loss == 2.5
    assert time_to_loss(loss, fast, [0.5, 0.5, 0.5]) == 1.0
    assert time_to_loss(loss, slow, [1.0, 1.0, 1.0]) == 3.0
    assert time_to_loss(0.1, slow, [1.0, 1.0, 1.0]) is None
    assert common_loss([fast, smooth([None, None])]) is None


def _table(size: int, **sent: int) -> list[list[int]]:
    found = [[0] * size for _ in range(size)]
    for pair, count in sent.items():
        found[int(pair[1])][int(pair[2])] = count
    return found


@pytest.mark.parametrize(
    ("table", "told"),
    [
        pytest.param(_table(4, f01=9, f12=9, f23=9, f30=9), "a ring", id="ring"),
        pytest.param(_table(4, f03=9, f32=9, f21=9, f10=9), "a ring", id="ring, other way round"),
        pytest.param(_table(3, f01=9, f10=9, f02=8, f20=8), "a tree: 2 pairs", id="tree"),
        pytest.param([[0, 5, 5], [5, 0, 5], [5, 5, 0]], "every rank to every other", id="all"),
        pytest.param(_table(3, f01=1000, f12=1000, f20=1000, f10=3), "a ring", id="some control"),
        pytest.param(_table(2, f01=9, f10=9), "two ranks", id="two"),
        pytest.param(_table(4, f01=9, f02=9, f13=9), "3 of 12 directions", id="neither"),
        pytest.param(_table(3), "nothing was sent", id="nothing"),
    ],
)
def test_byte_matrix_topology(table: Any, told: str) -> None:
    assert describe_matrix(table).startswith(told)


TABLES = st.lists(st.lists(st.integers(0, 10**9), min_size=3, max_size=3), min_size=3, max_size=3)


@settings(max_examples=50)
@given(one=TABLES, other=TABLES, factor=st.integers(1, 9))
def test_matrix_difference_is_a_share_of_bytes(one: Any, other: Any, factor: int) -> None:
    found = matrix_difference(one, other)
    assert 0 <= found <= 1 + 1e-9
    assert found == pytest.approx(matrix_difference(other, one))
    # How much is sent is not the question.
    assert matrix_difference(one, [[factor * x for x in row] for row in one]) == pytest.approx(
        0, abs=1e-9
    )


def test_ring_and_tree_matrices_differ() -> None:
    ring = _table(4, f01=9, f12=9, f23=9, f30=9)
    tree = _table(4, f01=9, f10=9, f12=9, f21=9, f03=9, f30=9)
    assert matrix_difference(ring, tree) == pytest.approx(0.5)
