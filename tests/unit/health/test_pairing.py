"""Tests of the rounds in which hosts exchange data in pairs."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.health.pairing import pair_hosts


@given(st.integers(2, 200))
def test_pairs_of_a_round_are_disjoint_and_no_pair_is_repeated(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    for pairs in rounds:
        members = list(chain.from_iterable(pairs))
        assert len(members) == len(set(members)) >= hosts - 1
        assert all(0 <= first < second < hosts for first, second in pairs)
    all_pairs = list(chain.from_iterable(rounds))
    assert len(all_pairs) == len(set(all_pairs))
    assert len(rounds) <= math.ceil(math.log2(hosts)) + 1


@given(st.integers(3, 200))
def test_every_host_has_two_partners(hosts: int) -> None:
    counts = Counter(chain.from_iterable(chain.from_iterable(pair_hosts(hosts))))
    assert min(counts[host] for host in range(hosts)) >= 2


@given(st.integers(10, 200))
def test_second_selection_has_other_pairs(hosts: int) -> None:
    first, second = (set(chain.from_iterable(pair_hosts(hosts, n))) for n in (0, 1))
    assert not first & second


@pytest.mark.parametrize(
    ("hosts", "rounds"),
    [
        (0, []),
        (1, []),
        (2, [[(0, 1)]]),
        (3, [[(1, 2)], [(0, 2)], [(0, 1)]]),
        (4, [[(0, 3), (1, 2)], [(1, 3), (0, 2)]]),
    ],
)
def test_rounds_of_few_hosts(hosts: int, rounds: list[list[tuple[int, int]]]) -> None:
    assert [sorted(pairs) for pairs in pair_hosts(hosts)] == [sorted(pairs) for pairs in rounds]
