from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.data.chat.packing import pack

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@given(lengths, st.integers(0, 3), st.booleans())
def test_every_conversation_is_in_one_sequence_that_has_room(
    lengths_: list[int], seed: int, alone: bool
) -> None:
    sizes = np.array(lengths_)
    packed = pack(sizes, 64, seed=seed, alone=alone)
    assert sorted(packed.order.tolist()) == list(range(len(sizes)))
    token_counts = [int(sizes[packed[index]].sum()) for index in range(len(packed))]
    assert max(token_counts) <= 64
    assert not alone or len(packed) == len(sizes)
    # At most one sequence is at most half full: two of them would fit into one.
    assert alone or sum(count * 2 <= 64 for count in token_counts) <= 1


def test_varied_lengths_waste_little_space() -> None:
    generator = np.random.default_rng(0)
    sizes = np.minimum(generator.lognormal(5.5, 1.0, 5000).astype(np.int64) + 8, 4096)
    packed = pack(sizes, 4096, seed=0)
    assert sizes.sum() / (len(packed) * 4096) > 0.99


def test_the_order_follows_from_the_seed() -> None:
    sizes = np.random.default_rng(1).integers(1, 64, 100)
    first, same, second = (pack(sizes, 64, seed=seed) for seed in (1, 1, 2))
    assert first.order.tolist() == same.order.tolist()
    assert first.order.tolist() != second.order.tolist()
