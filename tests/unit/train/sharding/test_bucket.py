"""Buckets of sharded weights on the first of two ranks, whose exchange stays in the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.exchange import Exchange
from flagscale.train.sharding.unit import GradientSlot, ShardedUnit

pytestmark = pytest.mark.torch


class FirstOfTwo(Exchange):
    """Exchange in which the other rank has zeros. Memory contains NaN at first."""

    def __init__(self) -> None:
        self.group: Any = None
        self.rank, self.ranks = 0, 2

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), float("nan"), dtype=dtype)

    def start_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self._local_part(whole).copy_(shard)

    def start_reduce(self, whole: torch.Tensor, shard: torch.Tensor, *, adds: bool) -> None:
        shard.copy_(self._local_part(whole) + (shard if adds else 0))

    def synchronize_ranks(self) -> None:
        pass


def create_bucket(*, keeps_weights: bool) -> ShardedBucket:
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    exchange = FirstOfTwo()
    bucket = ShardedBucket(weights, exchange, keeps_weights=keeps_weights)
    bucket.create_gradients(exchange.allocate_shared(bucket.numel, torch.float32))
    return bucket


def test_kept_weights_stay_where_other_ranks_read_them() -> None:
    bucket = create_bucket(keeps_weights=True)
    addresses = [bucket.param_data.data_ptr(), bucket.params_list[0].data_ptr()]
    bucket.start_gather()
    bucket.release_weights()
    assert [bucket.param_data.data_ptr(), bucket.params_list[0].data_ptr()] == addresses


def test_released_weights_come_back() -> None:
    bucket = create_bucket(keeps_weights=False)
    expected = bucket.weight_shard.clone()
    assert bucket.param_data.untyped_storage().size() == 0
    bucket.start_gather()
    assert torch.equal(bucket.params_list[0].flatten(), expected[:15])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_nothing_has_written_are_zero_before_they_are_checked(
    micro_batches: int,
) -> None:
    bucket = create_bucket(keeps_weights=True)
    weights: list[Any] = bucket.params_list
    written, unwritten = weights
    bucket.start_step()
    for _ in range(micro_batches):
        bucket.expect_gradients()
        written.main_grad.fill_(2.0)
        bucket.complete_gradients()
        assert bucket.grad_data is not None
        assert float(bucket.grad_data.sum()) == 2.0 * written.numel()
        bucket.start_reduce()
    bucket.finish_step()
    assert torch.equal(written.main_grad, torch.full((15,), 2.0 * micro_batches))
    assert not unwritten.main_grad.any()


def test_gradients_are_not_overwritten_before_they_are_reduced() -> None:
    slot = GradientSlot()
    first, second = (
        ShardedUnit([create_bucket(keeps_weights=True)], slot, keeps_weights=True) for _ in range(2)
    )
    first.expect_gradients()
    with pytest.raises(AssertionError):
        second.expect_gradients()
    first.complete_gradients()
    first.start_reduce()
    second.expect_gradients()
    assert slot.user is second
    second.complete_gradients()
