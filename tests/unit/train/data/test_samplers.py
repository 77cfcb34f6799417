"""Samplers: the same global batches in every layout, and no lost or repeated sample on resume."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.data.samplers import MicroBatchSampler, Order, Shard


def steps(
    samples: int,
    layout: tuple[int, int],
    global_batch: int,
    count: int,
    *,
    consumed: int = 0,
    order: Order = "cyclic",
) -> list[list[int]]:
    """Return the global batch of each of ``count`` steps, assembled from all ranks."""
    micro, size = layout
    ranks = [
        iter(
            MicroBatchSampler(
                samples, Shard.even(rank, size, micro), consumed=consumed, order=order, seed=7
            )
        )
        for rank in range(size)
    ]
    per_step = global_batch // (micro * size)
    batches = []
    for _ in range(count):
        batch: list[int] = []
        for _ in range(per_step):
            for rank in ranks:
                batch += next(rank)
        batches.append(batch)
    return batches


LAYOUTS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]))


@given(
    samples=st.integers(1, 200),
    first=LAYOUTS,
    second=LAYOUTS,
    factor=st.integers(1, 3),
    before=st.integers(0, 6),
    order=st.sampled_from(["wrapped", "cyclic"]),
)
def test_global_batches_do_not_depend_on_layout_or_resume(
    samples: int,
    first: tuple[int, int],
    second: tuple[int, int],
    factor: int,
    before: int,
    order: Order,
) -> None:
    global_batch = 48 * factor  # every layout above divides it
    whole = steps(samples, first, global_batch, before + 3, order=order)
    resumed = steps(samples, second, global_batch, 3, consumed=before * global_batch, order=order)
    assert whole[before:] == resumed


@given(samples=st.integers(1, 60), consumed=st.integers(0, 80), layout=LAYOUTS)
def test_single_takes_each_sample_once_and_ends(
    samples: int, consumed: int, layout: tuple[int, int]
) -> None:
    micro, size = layout
    indices = [
        [
            i
            for batch in MicroBatchSampler(samples, Shard.even(r, size, micro), consumed=consumed)
            for i in batch
        ]
        for r in range(size)
    ]
    width = micro * size
    whole = max(0, samples - consumed) // width * width
    assert sorted(i for rank in indices for i in rank) == list(range(consumed, consumed + whole))


@given(samples=st.integers(1, 50), epochs=st.integers(1, 4))
def test_cyclic_epochs_are_permutations(samples: int, epochs: int) -> None:
    sampler = MicroBatchSampler(samples, Shard.even(), order="cyclic", seed=3)
    indices = [i for batch in islice(sampler, samples * epochs) for i in batch]
    for epoch in range(epochs):
        assert sorted(indices[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_cyclic_reshuffles_each_epoch_and_follows_the_seed() -> None:
    def epochs(seed: int) -> list[int]:
        sampler = MicroBatchSampler(100, Shard.even(), order="cyclic", seed=seed)
        return [i for batch in islice(sampler, 200) for i in batch]

    assert epochs(1)[:100] != epochs(1)[100:]
    assert epochs(1) == epochs(1) != epochs(2)


@pytest.mark.parametrize(
    ("rank", "size"), [(1, 1), (-1, 2), (0, 0)], ids=["beyond", "negative", "empty"]
)
def test_a_rank_outside_the_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        Shard.even(rank, size)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="samples=0"):
        MicroBatchSampler(0, Shard.even())


def test_uneven_shards_read_each_sample_once() -> None:
    """One shard has one of six samples, another two micro-batches of two; the last wraps around."""
    shards = [Shard(5, (range(1),)), Shard(5, (range(1, 3), range(3, 5)))]
    batches = [iter(MicroBatchSampler(7, shard, order="wrapped", consumed=5)) for shard in shards]
    assert [next(batches[0]) for _ in range(2)] == [[5], [3]]
    assert [next(batches[1]) for _ in range(4)] == [[6, 0], [1, 2], [4, 5], [6, 0]]


@pytest.mark.parametrize(
    "parts", [(), (range(0),), (range(4, 6),)], ids=["none", "empty", "beyond"]
)
def test_a_shard_lies_in_its_samples(parts: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match="are no parts of 5 samples"):
        Shard(5, parts)
