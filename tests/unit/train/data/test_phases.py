"""Data phases: the order of samples across changes of the blend."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.spec.paths import (
    PHASE_UNITS,
    DataPhase,
    map_phase_paths,
    parse_phase,
    phase_words,
)
from flagscale.errors import DataError
from flagscale.train.data.blends import Blend
from flagscale.train.data.phases import Phases, order_samples, parse_phases

NAMES = ("web", "code", "math", "books")
WEIGHTS = st.floats(1e-3, 10, allow_nan=False)
BLENDS = st.dictionaries(st.sampled_from(NAMES), WEIGHTS, min_size=1).map(
    lambda weights: Blend(tuple(weights), tuple(weights.values()) if len(weights) > 1 else None)
)


@st.composite
def phase_plans(draw: st.DrawFn) -> Phases:
    first_samples = [0, *sorted(draw(st.sets(st.integers(1, 700), max_size=4)))]
    blends = [draw(BLENDS) for _ in first_samples]
    return Phases(tuple(first_samples), tuple(blends), draw(st.integers(1, 900)))


@pytest.mark.torch
@settings(deadline=None, max_examples=60)
@given(phases=phase_plans())
def test_each_phase_keeps_its_weights_and_no_sample_is_lost_or_repeated(phases: Phases) -> None:
    dataset_indices, sample_indices = order_samples(phases)
    assert len(dataset_indices) == len(sample_indices) == phases.total_samples
    counts = np.bincount(dataset_indices, minlength=len(phases.prefixes))
    for index in range(len(phases.prefixes)):
        assert sample_indices[dataset_indices == index].tolist() == list(range(counts[index]))
    assert all(counts <= phases.sample_bounds())
    for phase, (begin, length) in enumerate(
        zip(phases.first_samples, phases.phase_lengths(), strict=True)
    ):
        selected = dataset_indices[begin : begin + length]
        weights = phases.dataset_weights(phase)
        for prefix_length in {1, length // 3, length} - {0} if length else ():
            counts_so_far = np.bincount(selected[:prefix_length], minlength=len(weights))
            assert all(counts_so_far <= np.floor(weights * prefix_length) + 2)
            assert all(counts_so_far > weights * prefix_length - len(weights))
            assert all(counts_so_far[weights == 0] == 0)


@pytest.mark.torch
def test_each_dataset_gets_its_exact_number_of_samples() -> None:
    blends = (Blend(("a", "b"), (0.75, 0.25)), Blend(("b", "c"), (0.5, 0.5)))
    dataset_indices, sample_indices = order_samples(Phases((0, 8), blends, 16))
    assert np.bincount(dataset_indices[:8]).tolist() == [6, 2]
    assert np.bincount(dataset_indices[8:]).tolist() == [0, 4, 4]
    assert sample_indices[dataset_indices == 1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.torch
def test_a_later_phase_does_not_change_earlier_ones() -> None:
    first_blend, second_blend = Blend(("a", "b"), (0.7, 0.3)), Blend(("a", "b"), (0.1, 0.9))
    two_phases, three_phases = (
        Phases((0, 10), (first_blend, second_blend), 40),
        Phases((0, 10, 25), (first_blend, second_blend, first_blend), 40),
    )
    assert (
        order_samples(two_phases)[0][:25].tolist() == order_samples(three_phases)[0][:25].tolist()
    )
    assert (
        order_samples(two_phases)[1][:25].tolist() == order_samples(three_phases)[1][:25].tolist()
    )


@pytest.mark.parametrize(
    ("texts", "lengths"),
    [
        pytest.param(["samples=10 a"], [10, 30], id="samples"),
        pytest.param(["tokens=80 a"], [10, 30], id="tokens"),
        pytest.param(["tokens=81 a"], [11, 29], id="a sample of both is the earlier's"),
        pytest.param(["samples=10 a", "samples=50 b"], [10, 30, 0], id="not come to"),
    ],
)
def test_phase_lengths_in_samples_and_tokens(texts: list[str], lengths: list[int]) -> None:
    args = Namespace(data_phases=texts, seq_length=8)
    parsed = parse_phases(args, Blend(("a", "b"), (1.0, 1.0)), 40)
    assert parsed is not None
    assert parsed.phase_lengths() == lengths


def test_several_datasets_without_weights_are_refused() -> None:
    args = Namespace(data_phases=["samples=10 a b"], seq_length=8)
    with pytest.raises(DataError, match=r"without weights \(a, b\) cannot be a phase"):
        parse_phases(args, Blend(("a",)), 40)


PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0=\n"), min_size=1).filter(
    lambda text: text.strip() == text
)


@given(
    st.integers(1, 10**12), st.sampled_from(PHASE_UNITS), st.lists(PATHS, min_size=1, max_size=6)
)
def test_any_path_survives_the_command_line(count: int, unit: str, names: list[str]) -> None:
    (text,) = phase_words([{unit: count, "data_path": names}])
    assert parse_phase(text) == DataPhase(count, unit, tuple(names))
    assert parse_phase(map_phase_paths(text, lambda phase: phase)) == parse_phase(text)


INVALID_PHASES: dict[str, tuple[Any, str]] = {
    "no map": ("100 a", "expected {samples: 100000"),
    "another unit": ({"steps": 5, "data_path": ["a"]}, "found 'steps=5 a'"),
    "two units": ({"samples": 5, "tokens": 6, "data_path": ["a"]}, "found 'samples=5 tokens=6 a'"),
    "no number": ({"samples": "x", "data_path": ["a"]}, "samples: expected a whole number from 1"),
    "a part": ({"samples": 1.5, "data_path": ["a"]}, "expected a whole number from 1"),
    "none": ({"samples": 0, "data_path": ["a"]}, "expected a whole number from 1, found '0'"),
    "no data": ({"samples": 5}, "data_path is missing"),
    "open quotes": ("samples=5 'a", "expected {samples: 100000"),
}


@pytest.mark.parametrize("case", INVALID_PHASES)
def test_invalid_phases_are_refused(case: str) -> None:
    texts, message = INVALID_PHASES[case]
    (text,) = phase_words([texts])
    with pytest.raises(ValueError, match=r"expected|missing") as caught:
        parse_phase(text)
    assert message in str(caught.value)
