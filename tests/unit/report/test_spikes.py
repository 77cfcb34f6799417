"""Tests of the detection of spikes."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.report.spikes import (
    GRAD_NORM_RULE,
    LOSS_RULE,
    MIN_VALUES,
    WINDOW,
    SpikeRule,
    find_spikes,
)

CALM = [2.0] * 20
# A loss is a spike above 2 times the median and more than 0.5 above it: above 4.0 after CALM. A
# gradient norm is one above 5 times the median.


@pytest.mark.parametrize(
    ("values", "rule", "indices"),
    [
        pytest.param([*CALM, 4.6, 2.0], LOSS_RULE, [20], id="above-the-factor"),
        pytest.param([*CALM, 3.9, 2.0], LOSS_RULE, [], id="below-the-factor"),
        pytest.param(
            [*CALM, 9.0, 9.0, 2.0, 9.0], LOSS_RULE, [20, 23], id="first-of-consecutive-spikes"
        ),
        pytest.param([0.01] * 20 + [0.4], LOSS_RULE, [], id="factor-without-the-minimum-increase"),
        pytest.param([2.0] * (MIN_VALUES - 1) + [90.0], LOSS_RULE, [], id="too-few-earlier-values"),
        pytest.param(
            [2.0] * MIN_VALUES + [90.0], LOSS_RULE, [MIN_VALUES], id="fewest-earlier-values"
        ),
        pytest.param([0.1] * 20 + [0.6], GRAD_NORM_RULE, [20], id="norms-have-no-minimum-increase"),
        pytest.param(
            [math.nan, *CALM, math.inf, math.nan, 2.0], LOSS_RULE, [0, 21], id="nan-and-infinity"
        ),
        pytest.param([1e300, *CALM], LOSS_RULE, [0], id="too-large-to-draw"),
        pytest.param(
            [9.0] * 60 + [2.0] * 60 + [5.0], LOSS_RULE, [120], id="median-of-the-window-alone"
        ),
    ],
)
def test_spikes_are_found(values: list[float], rule: SpikeRule, indices: list[int]) -> None:
    assert [spike.index for spike in find_spikes(values, rule)] == indices


@given(st.lists(st.floats(0, 50) | st.sampled_from([math.nan, math.inf]), max_size=150))
def test_spikes_match_the_stated_rule(values: list[float]) -> None:
    rule, expected, recent, is_in_spike = SpikeRule(3.0, 0.5), [], [], False
    for index, value in enumerate(values):
        usual = median(recent[-WINDOW:]) if len(recent) >= MIN_VALUES else None
        if not math.isfinite(value):
            is_high, usual = True, None
        else:
            is_high = usual is not None and value > 3.0 * usual and value > usual + 0.5
            recent.append(value)
        if is_high and not is_in_spike:
            expected.append((index, usual))
        is_in_spike = is_high
    assert [(spike.index, spike.median) for spike in find_spikes(values, rule)] == expected
