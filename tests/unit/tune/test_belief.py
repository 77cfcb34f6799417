"""Tests of the times that are expected after measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from support.tuning import fake_layout

from flagscale.tune.belief import (
    MEASURED_DEVICES,
    OTHER_DEVICES,
    Belief,
    Observation,
    PriorErrors,
    Prospects,
)
from flagscale.tune.prediction import CAUSES, PredictedMemory, Prediction
from flagscale.tune.space import Layout


def layout_of(seconds_by_cause: dict[str, float], **setting: int) -> Layout:
    memory = PredictedMemory(0.0, 0.0, 0.0)
    return Layout(fake_layout(**setting).setting, Prediction(memory, seconds_by_cause))


def compare(belief: Belief, layouts: Sequence[Layout], reference: Layout) -> Prospects:
    return belief.compare(layouts, reference, min_gain=0.0, decisive_chance=0.05)


def test_without_measurements_the_prediction_is_expected() -> None:
    layout = fake_layout(2.0)
    expectation = Belief(MEASURED_DEVICES).expect(layout)
    assert expectation.seconds == pytest.approx(2.0)
    low, high = expectation.interval
    assert low < 2.0 < high


def test_a_measured_layout_is_known() -> None:
    layout = fake_layout(2.0)
    expectation = Belief(OTHER_DEVICES, [Observation(layout, 7.0, 0.01)]).expect(layout)
    assert expectation.seconds == pytest.approx(7.0, rel=0.01)
    assert expectation.deviation < 0.02


def test_the_speed_of_unknown_devices_is_that_of_the_first_measurement() -> None:
    first, other = fake_layout(2.0), fake_layout(3.0, micro_batch_size=4)
    expectation = Belief(OTHER_DEVICES, [Observation(first, 20.0, 0.01)]).expect(other)
    assert expectation.seconds == pytest.approx(30.0, rel=0.1)


def test_a_cause_that_is_slower_is_slower_in_other_layouts() -> None:
    computing = layout_of({"compute": 1.0})
    split = layout_of({"compute": 0.5, "tensor": 0.5}, tensor_model_parallel_size=2)
    more = layout_of({"compute": 0.3, "tensor": 0.7}, tensor_model_parallel_size=4)
    belief = Belief(
        MEASURED_DEVICES, [Observation(computing, 1.0, 0.01), Observation(split, 1.5, 0.01)]
    )
    assert belief.expect(more).seconds > 1.4
    assert belief.correction("tensor") > 1.2 > belief.correction("compute")


def test_the_speed_of_cores_says_nothing_about_links() -> None:
    computing = layout_of({"compute": 1.0})
    split = layout_of({"compute": 0.9, "tensor": 0.1}, tensor_model_parallel_size=2)
    expectation = Belief(OTHER_DEVICES, [Observation(computing, 0.2, 0.01)]).expect(split)
    assert 0.23 < expectation.seconds < 0.29  # in proportion: 0.2


def test_communication_that_is_added_cannot_save_time() -> None:
    computing = layout_of({"compute": 1.0})
    split = layout_of({"compute": 1.0, "tensor": 0.1}, tensor_model_parallel_size=2)
    belief = Belief(OTHER_DEVICES, [Observation(computing, 1.0, 0.01)])
    linear_deviation = belief.expect(split).deviation
    assert linear_deviation > 0.1
    assert compare(belief, [split], computing).win_probability(0.1) < 0.05


def test_nothing_wins_against_a_time_that_is_out_of_reach() -> None:
    fast, slow = fake_layout(1.0), fake_layout(3.0, micro_batch_size=4)
    belief = Belief(MEASURED_DEVICES, [Observation(fast, 1.0, 0.01)])
    assert compare(belief, [slow], fast).win_probability(0.0) == pytest.approx(0.0, abs=1e-6)
    equal = fake_layout(1.0, micro_batch_size=2)
    prospects = compare(belief, [slow, equal], fast)
    assert 0.2 < prospects.win_probability(0.0) < 0.8
    assert prospects.most_promising() is equal


def test_cost_decides_between_equal_layouts() -> None:
    measured = fake_layout(1.0)
    others = [fake_layout(1.0, micro_batch_size=2**n) for n in range(1, 4)]
    belief = Belief(MEASURED_DEVICES, [Observation(measured, 1.0, 0.01)])
    prospects = compare(belief, others, measured)
    for cheap in others:
        assert prospects.most_promising(lambda o, cheap=cheap: 0.1 if o is cheap else 1.0) is cheap


def test_probability_of_any_is_at_least_that_of_each() -> None:
    measured = fake_layout(1.0)
    others = [fake_layout(1.02, micro_batch_size=2**n) for n in range(1, 5)]
    belief = Belief(OTHER_DEVICES, [Observation(measured, 5.0, 0.01)])
    single = max(compare(belief, [o], measured).win_probability(0.02) for o in others)
    assert compare(belief, others, measured).win_probability(0.02) >= single


def test_many_equal_measurements_do_not_break_the_algebra() -> None:
    layout = fake_layout(1.0)
    belief = Belief(MEASURED_DEVICES, [Observation(layout, 2.0, 0.01)] * 20)
    assert math.isfinite(belief.expect(fake_layout(2.0)).seconds)


def test_order_of_causes_in_the_prior_does_not_matter() -> None:
    computing = layout_of({"compute": 1.0})
    split = layout_of({"compute": 0.5, "tensor": 0.5}, tensor_model_parallel_size=2)
    by_cause = dict(reversed([*MEASURED_DEVICES.by_cause.items()]))
    expectations = {
        Belief(prior, [Observation(computing, 2.0, 0.01)]).expect(split)
        for prior in (MEASURED_DEVICES, replace(MEASURED_DEVICES, by_cause=by_cause))
    }
    assert len(expectations) == 1


def test_sizes_of_zero_are_the_farther_the_larger_the_other_one() -> None:
    """Offloaded layers are such a size."""
    measured = fake_layout(1.0, cpu_offloading_num_layers=0)
    belief = Belief(OTHER_DEVICES, [Observation(measured, 1.0, 0.01)])
    deviations = [
        belief.expect(fake_layout(1.0, cpu_offloading_num_layers=count)).deviation
        for count in (0, 1, 2, 8)
    ]
    assert all(near < far for near, far in pairwise(deviations))


def test_a_layout_is_not_faster_than_itself() -> None:
    """It occurs twice in the samples, whose covariance is singular without errors."""
    measured = fake_layout(1.0)
    belief = Belief(OTHER_DEVICES, [Observation(measured, 3.0, 0.0)])
    prospects = compare(belief, [measured], measured)
    assert prospects.win_probability(0.001) == 0.0
    assert prospects.expected_improvements == pytest.approx([0.0], abs=1e-4)


def test_an_exact_measurement_far_from_the_prediction_is_kept() -> None:
    """The shares of causes change much from one fit to the next."""
    computing = layout_of({"compute": 1.0})
    split = layout_of({"compute": 0.9, "tensor": 0.1}, tensor_model_parallel_size=2)
    more = layout_of({"compute": 0.8, "tensor": 0.2}, tensor_model_parallel_size=4)
    observations = [
        Observation(layout, seconds, 0.0)
        for layout, seconds in ((computing, 1.0), (split, 3.0), (more, 4.0))
    ]
    belief = Belief(OTHER_DEVICES, observations)
    for layout, seconds, _ in observations:
        expectation = belief.expect(layout)
        assert expectation.seconds == pytest.approx(seconds, rel=1e-3)
        assert expectation.deviation < 1e-3


@pytest.mark.parametrize(
    ("count", "is_likely"),
    [
        pytest.param(40, False, id="few"),
        pytest.param(400, True, id="many"),
    ],
)
def test_many_unlikely_layouts_together_are_likely(count: int, is_likely: bool) -> None:
    """Each is faster than the measured one with a probability of 0.1 %."""
    prior = PriorErrors(
        common=0.1,
        by_cause=dict.fromkeys(CAUSES, 1e-4),
        by_sizes=dict.fromkeys(CAUSES, 0.0),
        layout=0.01,
        trial=0.0,
    )
    measured = fake_layout(1.0)
    others = [fake_layout(1.045, micro_batch_size=2 + n) for n in range(count)]
    belief = Belief(prior, [Observation(measured, 1.0, 0.0)])
    prospects = compare(belief, others, measured)
    assert (prospects.win_probability(0.0) >= 0.05) is is_likely


def test_without_layouts_none_is_promising() -> None:
    measured = fake_layout(1.0)
    belief = Belief(MEASURED_DEVICES, [Observation(measured, 1.0, 0.01)])
    prospects = compare(belief, [], measured)
    assert prospects.win_probability(0.0) == 0.0
    assert prospects.most_promising() is None
