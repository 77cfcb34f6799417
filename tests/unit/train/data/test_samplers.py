"""Samplers: the same global batches in every layout, and no lost or repeated sample on resume."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.data.samplers import MicroBatchSampler, SampleOrder, Shard


def read_global_batches(
    sample_count: int,
    layout: tuple[int, int],
    global_batch_size: int,
    step_count: int,
    *,
    consumed: int = 0,
    order: SampleOrder = "cyclic",
) -> list[list[int]]:
    """Return the global batch of each of ``count`` steps, assembled from all ranks."""
    micro_batch_size, rank_count = layout
    ranks = [
        iter(
            MicroBatchSampler(
                sample_count,
                Shard.for_equal_ranks(rank, rank_count, micro_batch_size),
                consumed=consumed,
                order=order,
                seed=7,
            )
        )
        for rank in range(rank_count)
    ]
    rounds_per_step = global_batch_size // (micro_batch_size * rank_count)
    batches = []
    for _ in range(step_count):
        batch: list[int] = []
        for _ in range(rounds_per_step):
            for rank in ranks:
                batch += next(rank)
        batches.append(batch)
    return batches


LAYOUTS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]))


@given(
    sample_count=st.integers(1, 200),
    first_layout=LAYOUTS,
    second_layout=LAYOUTS,
    factor=st.integers(1, 3),
    consumed_steps=st.integers(0, 6),
    order=st.sampled_from(["wrapped", "cyclic"]),
)
def test_global_batches_do_not_depend_on_layout_or_resume(
    sample_count: int,
    first_layout: tuple[int, int],
    second_layout: tuple[int, int],
    factor: int,
    consumed_steps: int,
    order: SampleOrder,
) -> None:
    global_batch = 48 * factor  # every layout above divides it
    uninterrupted = read_global_batches(
        sample_count, first_layout, global_batch, consumed_steps + 3, order=order
    )
    resumed = read_global_batches(
        sample_count,
        second_layout,
        global_batch,
        3,
        consumed=consumed_steps * global_batch,
        order=order,
    )
    assert uninterrupted[consumed_steps:] == resumed


@given(sample_count=st.integers(1, 60), consumed=st.integers(0, 80), layout=LAYOUTS)
def test_single_takes_each_sample_once_and_ends(
    sample_count: int, consumed: int, layout: tuple[int, int]
) -> None:
    micro_batch_size, rank_count = layout
    indices = [
        [
            i
            for batch in MicroBatchSampler(
                sample_count,
                Shard.for_equal_ranks(r, rank_count, micro_batch_size),
                consumed=consumed,
            )
            for i in batch
        ]
        for r in range(rank_count)
    ]
    samples_per_round = micro_batch_size * rank_count
    complete_count = max(0, sample_count - consumed) // samples_per_round * samples_per_round
    assert sorted(i for rank in indices for i in rank) == list(
        range(consumed, consumed + complete_count)
    )


@given(sample_count=st.integers(1, 50), epochs=st.integers(1, 4))
def test_cyclic_epochs_are_permutations(sample_count: int, epochs: int) -> None:
    sampler = MicroBatchSampler(sample_count, Shard.for_equal_ranks(), order="cyclic", seed=3)
    indices = [i for batch in islice(sampler, sample_count * epochs) for i in batch]
    for epoch in range(epochs):
        assert sorted(indices[epoch * sample_count : (epoch + 1) * sample_count]) == list(
            range(sample_count)
        )


def test_cyclic_reshuffles_each_epoch_and_follows_the_seed() -> None:
    def epochs(seed: int) -> list[int]:
        sampler = MicroBatchSampler(100, Shard.for_equal_ranks(), order="cyclic", seed=seed)
        return [i for batch in islice(sampler, 200) for i in batch]

    assert epochs(1)[:100] != epochs(1)[100:]
    assert epochs(1) == epochs(1) != epochs(2)


@pytest.mark.parametrize(
    ("rank", "rank_count"), [(1, 1), (-1, 2), (0, 0)], ids=["beyond", "negative", "empty"]
)
def test_a_rank_outside_the_group_is_refused(rank: int, rank_count: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        Shard.for_equal_ranks(rank, rank_count)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_count=0"):
        MicroBatchSampler(0, Shard.for_equal_ranks())


def test_uneven_shards_read_each_sample_once() -> None:
    """One shard has one of six samples, another two micro-batches of two; the last wraps around."""
    shards = [Shard(5, (range(1),)), Shard(5, (range(1, 3), range(3, 5)))]
    batches = [iter(MicroBatchSampler(7, shard, order="wrapped", consumed=5)) for shard in shards]
    assert [next(batches[0]) for _ in range(2)] == [[5], [3]]
    assert [next(batches[1]) for _ in range(4)] == [[6, 0], [1, 2], [4, 5], [6, 0]]


@pytest.mark.parametrize(
    "micro_batches", [(), (range(0),), (range(4, 6),)], ids=["none", "empty", "beyond"]
)
def test_positions_outside_the_shard_are_refused(micro_batches: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match="are not positions in 5 samples"):
        Shard(5, micro_batches)
