"""Tests of predictions whose causes take other times than predicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.tune.prediction import CAUSES, PredictedMemory, Prediction

SECONDS = st.dictionaries(st.sampled_from(list(CAUSES)), st.floats(1e-3, 10.0), min_size=1)
FACTORS = st.fixed_dictionaries({cause: st.floats(0.1, 10.0) for cause in CAUSES})


def prediction_of(seconds_by_cause: dict[str, float]) -> Prediction:
    return Prediction(PredictedMemory(0.0, 0.0, 0.0), seconds_by_cause)


@given(SECONDS)
def test_without_corrections_it_is_the_prediction(seconds: dict[str, float]) -> None:
    corrected = prediction_of(seconds).correct(dict.fromkeys(CAUSES, 1.0))
    assert corrected.seconds == pytest.approx(sum(seconds.values()))


@given(SECONDS, FACTORS)
def test_shares_are_derivatives(seconds: dict[str, float], factors: dict[str, float]) -> None:
    prediction = prediction_of(seconds)
    corrected = prediction.correct(factors)
    step = 1e-6
    for cause, share in corrected.shares.items():
        changed = prediction.correct({**factors, cause: factors[cause] * (1 + step)})
        relative_change = (changed.seconds / corrected.seconds - 1) / step
        assert share == pytest.approx(relative_change, abs=1e-3)


def test_a_bubble_grows_with_the_passes() -> None:
    prediction = prediction_of({"compute": 1.0, "pipeline": 0.5, "optimizer": 0.1})
    corrected = prediction.correct({**dict.fromkeys(CAUSES, 1.0), "compute": 2.0})
    assert corrected.seconds == pytest.approx(3.1)
