"""Buckets of sharded weights on the first of two ranks, whose collectives stay in the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.unit import GradientMemory, ShardedUnit

pytestmark = pytest.mark.torch


class FirstOfTwo(ShardCollectives):
    """Collectives in which the other rank has zeros. Memory contains NaN at first."""

    def __init__(self) -> None:
        self.group: Any = None
        self.replica_group = None
        self.rank, self.ranks = 0, 2

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), float("nan"), dtype=dtype)

    def start_all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        self.local_part(unsharded).copy_(shard)

    def start_reduce_scatter(
        self, unsharded: torch.Tensor, shard: torch.Tensor, *, accumulate: bool
    ) -> None:
        shard.copy_(self.local_part(unsharded) + (shard if accumulate else 0))

    def synchronize_ranks(self) -> None:
        pass


def create_bucket(*, shards_weights: bool) -> ShardedBucket:
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    collectives = FirstOfTwo()
    bucket = ShardedBucket(weights, collectives, shards_weights=shards_weights)
    bucket.create_gradients(collectives.allocate_shared(bucket.numel, torch.float32))
    return bucket


def test_unsharded_weights_stay_where_other_ranks_read_them() -> None:
    bucket = create_bucket(shards_weights=False)
    addresses = [bucket.param_data.data_ptr(), bucket.params_list[0].data_ptr()]
    bucket.start_all_gather()
    bucket.release_weights()
    assert [bucket.param_data.data_ptr(), bucket.params_list[0].data_ptr()] == addresses


def test_released_weights_come_back() -> None:
    bucket = create_bucket(shards_weights=True)
    expected = bucket.weight_shard.clone()
    assert bucket.param_data.untyped_storage().size() == 0
    bucket.start_all_gather()
    assert torch.equal(bucket.params_list[0].flatten(), expected[:15])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_nothing_has_written_are_zero_before_they_are_checked(
    micro_batches: int,
) -> None:
    bucket = create_bucket(shards_weights=False)
    weights: list[Any] = bucket.params_list
    written, unwritten = weights
    bucket.start_step()
    for _ in range(micro_batches):
        bucket.prepare_gradients()
        written.main_grad.fill_(2.0)
        bucket.zero_unwritten_gradients()
        assert bucket.grad_data is not None
        assert float(bucket.grad_data.sum()) == 2.0 * written.numel()
        bucket.start_reduce_scatter()
    bucket.finish_step()
    assert torch.equal(written.main_grad, torch.full((15,), 2.0 * micro_batches))
    assert not unwritten.main_grad.any()


def test_gradients_are_not_overwritten_before_they_are_reduced() -> None:
    memory = GradientMemory()
    first, second = (
        ShardedUnit([create_bucket(shards_weights=False)], memory, shards_weights=False)
        for _ in range(2)
    )
    first.prepare_gradients()
    with pytest.raises(AssertionError):
        second.prepare_gradients()
    first.zero_unwritten_gradients()
    first.start_reduce_scatter()
    second.prepare_gradients()
    assert memory.unit is second
    second.zero_unwritten_gradients()
