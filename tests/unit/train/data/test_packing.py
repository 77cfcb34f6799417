"""Packing of conversations into sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.data.chat.packing import pack_best_fit, pack_conversations

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@given(LENGTHS, st.integers(0, 3), st.booleans())
def test_every_conversation_is_in_one_sequence_that_has_room(
    lengths: list[int], seed: int, one_per_sequence: bool
) -> None:
    sizes = np.array(lengths)
    sequences = pack_conversations(sizes, 64, seed=seed, one_per_sequence=one_per_sequence)
    assert sorted(sequences.conversations.tolist()) == list(range(len(sizes)))
    token_counts = [int(sizes[sequences[index]].sum()) for index in range(len(sequences))]
    assert max(token_counts) <= 64
    assert not one_per_sequence or len(sequences) == len(sizes)
    # At most one sequence is at most half full: two of them would fit into one.
    assert one_per_sequence or sum(count * 2 <= 64 for count in token_counts) <= 1


@given(LENGTHS, st.integers(1, 5))
def test_a_sequence_has_at_most_so_many_members(lengths: list[int], max_members: int) -> None:
    sizes = np.sort(np.array(lengths))[::-1]
    sequences = pack_best_fit(np.arange(len(sizes)), sizes, 64, max_members)
    assert sorted(index for members in sequences for index in members) == list(range(len(sizes)))
    assert max(map(len, sequences)) <= max_members
    assert max(int(sizes[members].sum()) for members in sequences) <= 64


def test_packing_uses_99_percent_of_the_space() -> None:
    generator = np.random.default_rng(0)
    sizes = np.minimum(generator.lognormal(5.5, 1.0, 5000).astype(np.int64) + 8, 4096)
    sequences = pack_conversations(sizes, 4096, seed=0)
    assert sizes.sum() / (len(sequences) * 4096) > 0.99


def test_the_order_depends_on_the_seed() -> None:
    sizes = np.random.default_rng(1).integers(1, 64, 100)
    first, same, second = (pack_conversations(sizes, 64, seed=seed) for seed in (1, 1, 2))
    assert first.conversations.tolist() == same.conversations.tolist()
    assert first.conversations.tolist() != second.conversations.tolist()
