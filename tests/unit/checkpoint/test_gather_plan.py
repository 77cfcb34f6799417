"""Plan that gathers the parts of each parameter on one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.checkpoint.gather_plan import (
    Part,
    choose_owners,
    locate_parts,
    plan_rounds,
    plan_waves,
)


@pytest.mark.parametrize(
    ("start", "end", "offset", "expected"),
    [
        pytest.param(0, 3, 0, [(0, 0, 3)], id="first-rank"),
        pytest.param(3, 9, 0, [(0, 0, 1), (1, 1, 5), (2, 5, 6)], id="three-ranks"),
        pytest.param(4, 8, 0, [(1, 0, 4)], id="whole-shard"),
        pytest.param(23, 26, 20, [(0, 0, 1), (1, 1, 3)], id="later-bucket"),
        pytest.param(4, 4, 0, [], id="empty"),
    ],
)
def test_parts_are_those_of_the_shards(
    start: int, end: int, offset: int, expected: list[tuple[int, int, int]]
) -> None:
    parts = locate_parts(start, end, offset=offset, shard_size=4)
    assert parts == [Part(*part) for part in expected]


def test_owners_get_equal_numbers_of_elements() -> None:
    sizes = [1, 1, 1, 1, 8, 4]
    owners = choose_owners(sizes, 2)
    assert [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in (0, 1)] == [
        8,
        8,
    ]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 20))
def test_each_element_reaches_the_owner_once_in_limited_rounds(
    sizes: list[int], ranks: int, round_size: int
) -> None:
    shard_size = -(-sum(sizes) // ranks) or 1
    parts = [
        locate_parts(sum(sizes[:i]), sum(sizes[: i + 1]), offset=0, shard_size=shard_size)
        for i in range(len(sizes))
    ]
    owners = choose_owners(sizes, ranks)
    rounds = plan_rounds(parts, owners, round_size)
    pieces = [piece for pieces in rounds for piece in pieces]
    for index, size in enumerate(sizes):
        elements = [
            (piece.source, element)
            for piece in pieces
            if piece.parameter == index
            for element in range(piece.start, piece.end)
        ]
        assert elements == [
            (part.rank, element) for part in parts[index] for element in range(part.start, part.end)
        ]
        assert len(elements) == size
    assert all(piece.owner == owners[piece.parameter] for piece in pieces)
    for pieces in rounds:
        for rank in range(ranks):
            assert sum(piece.size for piece in pieces if piece.owner == rank) <= round_size


@given(
    st.lists(st.integers(1, 20), max_size=12).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes),
            st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)),
        )
    )
)
def test_a_wave_brings_a_rank_no_more_than_the_largest_parameter(
    parameters: tuple[list[int], list[int]],
) -> None:
    sizes, owners = parameters
    waves = plan_waves(sizes, owners)
    assert sorted(index for wave in waves for index in wave) == list(range(len(sizes)))
    for wave in waves:
        assert wave
        for rank in set(owners):
            received = sum(sizes[index] for index in wave if owners[index] == rank)
            assert received <= max(sizes)
    # Some owner needs about so many, because two waves of an owner exceed the limit together.
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in set(owners)]
    assert len(waves) <= 1 + 2 * max(loads, default=0) // max(sizes, default=1)
