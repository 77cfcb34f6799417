"""Buckets of a model chunk, as megatron.core's distributed optimizer expects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.collectives import ShardCollectives


class ShardedBuffer:
    """Buckets of the trained weights of one dtype that are sharded over one process group.

    It has the attributes of megatron.core's ``_ParamAndGradBuffer`` that its distributed optimizer
    reads.

    Attributes:
        ddp_config: configuration of data parallelism.
        param_dtype: dtype of the weights.
        grad_dtype: dtype of the gradients.
        data_parallel_group: the ranks.
        data_parallel_world_size: their number.
        params: all weights.
        buckets: all buckets.
        param_index_map: first and last element (exclusive) of a weight, and the index of its
            bucket. Elements are counted over all buckets with their padding.
        numel: number of elements with padding.
        numel_unpadded: number of elements without the padding at the end of buckets.
    """

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        collectives: ShardCollectives,
        gradient_scaling_factor: float,
    ) -> None:
        """Create a buffer without buckets; the arguments are those of its buckets."""
        self.ddp_config = ddp_config
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.data_parallel_group = collectives.group
        self.data_parallel_world_size = collectives.ranks
        self.params: list[torch.nn.Parameter] = []
        self.buckets: list[ShardedBucket] = []
        self.param_index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
        self.numel = self.numel_unpadded = 0
        self._collectives = collectives
        self._gradient_scaling_factor = gradient_scaling_factor

    def add_bucket(self, create_bucket: Callable[..., ShardedBucket]) -> ShardedBucket:
        """Create a bucket and return it, without gradients so far.

        Args:
            create_bucket: constructor of the bucket that takes the place in the buffer and the
                factor of the gradients (:class:`.bucket.ShardedBucket`).
        """
        bucket = create_bucket(
            offset=self.numel,
            bucket_id=len(self.buckets),
            gradient_scaling_factor=self._gradient_scaling_factor,
        )
        for param, (start, end) in bucket.param_to_index.items():
            self.param_index_map[param] = (self.numel + start, self.numel + end, bucket.bucket_id)
        self.params += bucket.params_list
        self.buckets.append(bucket)
        self.numel += bucket.numel
        self.numel_unpadded += bucket.numel_unpadded
        return bucket

    def create_gradients(self, sharing_buckets: Sequence[Sequence[ShardedBucket]]) -> None:
        """Create the gradients of all buckets, in memory that the buckets of each list share."""
        for buckets in sharing_buckets:
            if self.data_parallel_world_size == 1:
                for bucket in buckets:
                    bucket.create_gradients(self._allocate_gradients(bucket.numel))
            else:
                memory = self._allocate_gradients(max(bucket.numel for bucket in buckets))
                for bucket in buckets:
                    bucket.create_gradients(memory)

    def _allocate_gradients(self, numel: int) -> torch.Tensor:
        return self._collectives.allocate_shared(numel, self.grad_dtype)
