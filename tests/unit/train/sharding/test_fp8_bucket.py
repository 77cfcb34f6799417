"""Buckets of FP8 weights on several ranks of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.train.layers.fp8 import Fp8Weight, Scaling, quantize_weight
from flagscale.train.layers.fp8_layers import Fp8Linears
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.fp8_bucket import Fp8Bucket

pytestmark = pytest.mark.torch

SCALINGS: list[Scaling] = ["tensorwise", "rowwise", "blockwise"]
SHAPES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20)).map(lambda sizes: [16 * n for n in sizes]),
    min_size=1,
    max_size=4,
)


class RankOfProcess(ShardCollectives):
    """Collectives of a rank whose peers are in the same process.

    A peer's shard is the tensor that it allocated when this rank allocated its own.
    """

    def __init__(self, rank: int, peers: list[RankOfProcess]) -> None:
        self.group: Any = None
        self.replica_group = None
        self.rank, self._peers = rank, peers
        self.allocated: list[torch.Tensor] = []
        peers.append(self)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(torch.empty(numel, dtype=dtype))
        return self.allocated[-1]

    def start_all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        (index,) = (i for i, tensor in enumerate(self.allocated) if tensor is shard)
        torch.cat([peer.allocated[index] for peer in self._peers], out=unsharded)

    def start_reduce_scatter(
        self, unsharded: torch.Tensor, shard: torch.Tensor, *, accumulate: bool
    ) -> None:
        raise AssertionError("no gradients")

    def synchronize_ranks(self) -> None:
        pass


def create_buckets(weights: list[torch.Tensor], ranks: int, scaling: Scaling) -> list[Fp8Bucket]:
    """Return a bucket of the same weights for each rank."""
    peers: list[RankOfProcess] = []
    buckets = []
    for rank in range(ranks):
        collectives = RankOfProcess(rank, peers)
        collectives.ranks = ranks
        params = [torch.nn.Parameter(weight.clone()) for weight in weights]
        linears = {param: SimpleNamespace(fp8_weight=None) for param in params}
        buckets.append(
            Fp8Bucket(
                params,
                collectives,
                fp8_linears=Fp8Linears(scaling, linears),
                shards_weights=True,
            )
        )
        assert all(linear.fp8_weight is not None for linear in linears.values())
    return buckets


def quantize_shards(buckets: list[Fp8Bucket]) -> None:
    if buckets[0].is_stale:
        magnitudes = torch.stack([bucket.measure_shard() for bucket in buckets]).amax(0)
        for bucket in buckets:
            bucket.quantize_shard(magnitudes)


def assert_equal(actual: Fp8Weight, expected: Fp8Weight) -> None:
    for name, tensor, other in zip(Fp8Weight._fields, actual, expected, strict=True):
        assert tensor.shape == other.shape, name
        assert torch.equal(tensor.float(), other.float()), name


@pytest.mark.parametrize("scaling", SCALINGS)
@settings(max_examples=15)
@given(shapes=SHAPES, ranks=st.integers(2, 5), seed=st.integers(0, 99))
def test_gathered_values_are_those_of_whole_weights(
    scaling: Scaling, shapes: list[list[int]], ranks: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    buckets = create_buckets(weights, ranks, scaling)
    quantize_shards(buckets)
    for bucket in buckets:
        for _ in range(2):  # what was gathered can be released and comes back
            bucket.start_all_gather()
            bucket.finish_all_gather()
            bucket.prepare_backward()
            for param, weight in zip(bucket.params_list, weights, strict=True):
                assert_equal(bucket.fp8_weights[param], quantize_weight(weight, scaling))
            bucket.release_weights()
            assert bucket.param_data.untyped_storage().size() == 0


@pytest.mark.parametrize("scaling", SCALINGS)
def test_weights_that_were_written_are_quantized_again(scaling: Scaling) -> None:
    weights = [torch.ones(32, 48).bfloat16(), torch.ones(144, 16).bfloat16()]
    buckets = create_buckets(weights, 2, scaling)
    quantize_shards(buckets)
    for bucket in buckets:
        bucket.start_all_gather_weights()
        for param, weight in zip(bucket.params_list, weights, strict=True):
            assert torch.equal(param, weight)
            param.data.fill_(3.0)
    for bucket in buckets:
        bucket.update_shard()
        bucket.release_weights()
    quantize_shards(buckets)
    for bucket in buckets:
        bucket.start_all_gather()
        bucket.finish_all_gather()
        for param, weight in zip(bucket.params_list, weights, strict=True):
            expected = quantize_weight(3 * weight, scaling)
            assert torch.equal(bucket.fp8_weights[param].weight.float(), expected.weight.float())
            assert torch.equal(bucket.fp8_weights[param].scale, expected.scale)


def test_a_layer_cannot_compute_with_values_of_older_weights() -> None:
    (bucket, _) = create_buckets([torch.ones(16, 16).bfloat16()], 2, "tensorwise")
    with pytest.raises(AssertionError, match="quantize_shards"):
        bucket.start_all_gather()
