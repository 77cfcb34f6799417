"""Tests of the statistics of training: ratios with intervals, losses, and byte matrices."""

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


def _times(seed: int, rounds: int, steps_per_round: int = 10) -> tuple[list[float], list[int]]:
    """Return times of steps, and the round of each. The steps of a round share a disturbance."""
    generator = np.random.default_rng(seed)
    disturbances = np.repeat(generator.lognormal(0, 0.3, rounds), steps_per_round)
    times = disturbances * generator.lognormal(0, 0.02, rounds * steps_per_round)
    return list(times), [int(r) for r in np.repeat(np.arange(1, rounds + 1), steps_per_round)]


def test_values_are_grouped_by_round() -> None:
    assert group_by_round([1.0, 2.0, 3.0], [1, 1, 4]) == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("percent", [50.0, 99.0])
def test_ratio_of_a_constant_slowdown_is_exact(percent: float) -> None:
    times, rounds = _times(1, 20)
    ratio = percentile_ratio([1.5 * t for t in times], times, rounds, percent)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_bootstrap_resamples_whole_rounds() -> None:
    """Resampling single steps would give too narrow an interval, which often excludes the true
    ratio of 1.
    """
    missed_intervals = 0
    for seed in range(12):
        numerators, rounds = _times(2 * seed, 24)
        denominators, _ = _times(2 * seed + 1, 24)
        ratio = percentile_ratio(numerators, denominators, rounds)
        missed_intervals += not ratio.low <= 1 <= ratio.high
    # 0.6 of 12 intervals miss the ratio on average; with single steps it would be every second.
    assert missed_intervals <= 3


def test_one_step_has_no_interval() -> None:
    ratio = percentile_ratio([3.0], [2.0], [1])
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 0.0, math.inf)


@pytest.mark.parametrize(
    ("other", "is_acceptable"),
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
def test_losses_agree_except_for_rounding(other: list[float | None], is_acceptable: bool) -> None:
    assert compare_losses([5.0 - 0.1 * i for i in range(20)], other).is_acceptable is is_acceptable


def test_time_to_a_loss_that_all_reach() -> None:
    fast = smooth([4.0, 2.0, 1.0])
    slow = smooth([4.0, 3.0, 2.5])
    loss = common_loss([fast, slow])
    assert loss == 2.5
    assert time_to_loss(loss, fast, [0.5, 0.5, 0.5]) == 1.0
    assert time_to_loss(loss, slow, [1.0, 1.0, 1.0]) == 3.0
    assert time_to_loss(0.1, slow, [1.0, 1.0, 1.0]) is None
    assert common_loss([fast, smooth([None, None])]) is None


def _byte_matrix(size: int, **sent: int) -> list[list[int]]:
    """Return a matrix [from][to]. ``f01=9``: 9 bytes from rank 0 to rank 1."""
    matrix = [[0] * size for _ in range(size)]
    for pair, count in sent.items():
        matrix[int(pair[1])][int(pair[2])] = count
    return matrix


@pytest.mark.parametrize(
    ("table", "description"),
    [
        pytest.param(_byte_matrix(4, f01=9, f12=9, f23=9, f30=9), "a ring", id="ring"),
        pytest.param(
            _byte_matrix(4, f03=9, f32=9, f21=9, f10=9), "a ring", id="ring, other way round"
        ),
        pytest.param(_byte_matrix(3, f01=9, f10=9, f02=8, f20=8), "a tree: 2 pairs", id="tree"),
        pytest.param([[0, 5, 5], [5, 0, 5], [5, 5, 0]], "every rank to every other", id="all"),
        pytest.param(
            _byte_matrix(3, f01=1000, f12=1000, f20=1000, f10=3), "a ring", id="some control"
        ),
        pytest.param(_byte_matrix(2, f01=9, f10=9), "two ranks", id="two"),
        pytest.param(_byte_matrix(4, f01=9, f02=9, f13=9), "3 of 12 directions", id="neither"),
        pytest.param(_byte_matrix(3), "nothing was sent", id="nothing"),
    ],
)
def test_byte_matrix_topology(table: Any, description: str) -> None:
    assert describe_matrix(table).startswith(description)


BYTE_MATRICES = st.lists(
    st.lists(st.integers(0, 10**9), min_size=3, max_size=3), min_size=3, max_size=3
)


@settings(max_examples=50)
@given(first=BYTE_MATRICES, second=BYTE_MATRICES, factor=st.integers(1, 9))
def test_matrix_difference_is_a_share_of_bytes(first: Any, second: Any, factor: int) -> None:
    difference = matrix_difference(first, second)
    assert 0 <= difference <= 1 + 1e-9
    assert difference == pytest.approx(matrix_difference(second, first))
    # The total number of bytes does not matter.
    assert matrix_difference(first, [[factor * x for x in row] for row in first]) == pytest.approx(
        0, abs=1e-9
    )


def test_ring_and_tree_matrices_differ() -> None:
    ring = _byte_matrix(4, f01=9, f12=9, f23=9, f30=9)
    tree = _byte_matrix(4, f01=9, f10=9, f12=9, f21=9, f03=9, f30=9)
    assert matrix_difference(ring, tree) == pytest.approx(0.5)
