"""Data phases: the order of samples across changes of the blend."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.spec.data_phases import (
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
    lambda found: Blend(tuple(found), tuple(found.values()) if len(found) > 1 else None)
)


@st.composite
def any_phases(draw: st.DrawFn) -> Phases:
    begins = [0, *sorted(draw(st.sets(st.integers(1, 700), max_size=4)))]
    blends = [draw(BLENDS) for _ in begins]
    return Phases(tuple(begins), tuple(blends), draw(st.integers(1, 900)))


@pytest.mark.torch
@settings(deadline=None, max_examples=60)
@given(phases=any_phases())
def test_each_phase_keeps_its_weights_and_no_sample_is_lost_or_repeated(phases: Phases) -> None:
    sets, samples = order_samples(phases)
    assert len(sets) == len(samples) == phases.total
    counts = np.bincount(sets, minlength=len(phases.prefixes))
    for index in range(len(phases.prefixes)):
        assert samples[sets == index].tolist() == list(range(counts[index]))
    assert all(counts <= phases.sample_bounds())
    for phase, (begin, length) in enumerate(
        zip(phases.begins, phases.phase_lengths(), strict=True)
    ):
        selected = sets[begin : begin + length]
        shares = phases.dataset_shares(phase)
        for used in {1, length // 3, length} - {0} if length else ():
            order = np.bincount(selected[:used], minlength=len(shares))
            assert all(order <= np.floor(shares * used) + 2)
            assert all(order > shares * used - len(shares))
            assert all(order[shares == 0] == 0)


@pytest.mark.torch
def test_counts_of_a_small_run_are_exact() -> None:
    blends = (Blend(("a", "b"), (0.75, 0.25)), Blend(("b", "c"), (0.5, 0.5)))
    sets, samples = order_samples(Phases((0, 8), blends, 16))
    assert np.bincount(sets[:8]).tolist() == [6, 2]
    assert np.bincount(sets[8:]).tolist() == [0, 4, 4]
    assert samples[sets == 1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.torch
def test_a_later_phase_does_not_change_earlier_ones() -> None:
    shorter, two = Blend(("a", "b"), (0.7, 0.3)), Blend(("a", "b"), (0.1, 0.9))
    short, longer = (
        Phases((0, 10), (shorter, two), 40),
        Phases((0, 10, 25), (shorter, two, shorter), 40),
    )
    assert order_samples(short)[0][:25].tolist() == order_samples(longer)[0][:25].tolist()
    assert order_samples(short)[1][:25].tolist() == order_samples(longer)[1][:25].tolist()


@pytest.mark.parametrize(
    ("texts", "lengths"),
    [
        pytest.param(["samples=10 a"], [10, 30], id="samples"),
        pytest.param(["tokens=80 a"], [10, 30], id="tokens"),
        pytest.param(["tokens=81 a"], [11, 29], id="a sample of both is the earlier's"),
        pytest.param(["samples=10 a", "samples=50 b"], [10, 30, 0], id="not come to"),
    ],
)
def test_where_phases_begin(texts: list[str], lengths: list[int]) -> None:
    args = Namespace(data_phases=texts, seq_length=8)
    parsed = parse_phases(args, Blend(("a", "b"), (1.0, 1.0)), 40)
    assert parsed is not None
    assert parsed.phase_lengths() == lengths


def test_data_sets_of_a_phase_have_weights() -> None:
    args = Namespace(data_phases=["samples=10 a b"], seq_length=8)
    with pytest.raises(DataError, match=r"without weights \(a, b\) cannot be a phase"):
        parse_phases(args, Blend(("a",)), 40)


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0=\n"), min_size=1).filter(
    lambda text: text.strip() == text
)


@given(
    st.integers(1, 10**12), st.sampled_from(PHASE_UNITS), st.lists(PLAIN, min_size=1, max_size=6)
)
def test_any_name_comes_through_the_command_line(count: int, unit: str, names: list[str]) -> None:
    (text,) = phase_words([{unit: count, "data_path": names}])
    assert parse_phase(text) == DataPhase(count, unit, tuple(names))
    assert parse_phase(map_phase_paths(text, lambda phase: phase)) == parse_phase(text)


BAD: dict[str, tuple[Any, str]] = {
    "no map": ("100 a", "expected {samples: 100000"),
    "another unit": ({"steps": 5, "data_path": ["a"]}, "found 'steps=5 a'"),
    "two units": ({"samples": 5, "tokens": 6, "data_path": ["a"]}, "found 'samples=5 tokens=6 a'"),
    "no number": ({"samples": "x", "data_path": ["a"]}, "samples: expected a whole number from 1"),
    "a part": ({"samples": 1.5, "data_path": ["a"]}, "expected a whole number from 1"),
    "none": ({"samples": 0, "data_path": ["a"]}, "expected a whole number from 1, found '0'"),
    "no data": ({"samples": 5}, "data_path is missing"),
    "open quotes": ("samples=5 'a", "expected {samples: 100000"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_phases_are_refused(case: str) -> None:
    texts, message = BAD[case]
    (text,) = phase_words([texts])
    with pytest.raises(ValueError, match=r"expected|missing") as caught:
        parse_phase(text)
    assert message in str(caught.value)
