"""Partition of a model chunk into units, and of their weights into buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from flagscale.train.layers.fp8_layers import Fp8Linears
from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.sharding.bucket import Initialize, ShardedBucket
from flagscale.train.sharding.buffer import ShardedBuffer
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.fp8_bucket import Fp8Bucket
from flagscale.train.sharding.unit import GradientMemory, ShardedUnit


def has_embedding_in_head(model: Any) -> bool:
    """Return whether the weights of the embedding belong to the unit after the last layer.

    Then the output layer shares them, or MTP layers, which embed tokens again.
    """
    if getattr(model.config, "mtp_num_layers", None):
        return True
    return (
        getattr(model, "embedding", None) is not None
        and bool(getattr(model, "post_process", False))
        and bool(getattr(model, "share_embeddings_and_output_weights", False))
    )


class ChunkPartition:
    """Units of a model chunk.

    Attributes:
        embedding_unit: the weights before the layers, none if they belong to ``head_unit``.
        layer_units: one unit per transformer layer.
        head_unit: all other weights.
    """

    def __init__(
        self,
        model: Any,
        ddp_config: DistributedDataParallelConfig,
        collectives: Mapping[bool, ShardCollectives],
        gradient_scaling_factor: float,
        *,
        shards_weights: bool,
        initialize: Initialize | None,
        fp8_linears: Fp8Linears | None,
    ) -> None:
        """Move the weights of a chunk into buckets.

        Args:
            model: the unwrapped model.
            ddp_config: configuration of data parallelism.
            collectives: collectives of the ranks that share other weights (False) and those of
                experts (True).
            gradient_scaling_factor: factor of the gradients of a step.
            shards_weights: shard weights as well, not only gradients.
            initialize: initializes given weights; None if they are initialized.
            fp8_linears: the layers that use FP8; None without.
        """
        self._ddp_config, self._collectives = ddp_config, collectives
        self._gradient_scaling_factor = gradient_scaling_factor
        self._initialize = initialize
        self._shards_weights = shards_weights
        self._fp8_linears = fp8_linears
        self._buffers: dict[tuple[bool, torch.dtype, torch.dtype], ShardedBuffer] = {}
        layers = find_transformer_layers(model)
        layer_parameters = {param for layer in layers for param in layer.parameters()}
        others = [param for param in model.parameters() if param not in layer_parameters]
        embedding = getattr(model, "embedding", None)
        embedding_parameters: set[torch.nn.Parameter] = set()
        if embedding is not None and not has_embedding_in_head(model):
            embedding_parameters = set(embedding.parameters())
        # When the backward pass of a layer begins, the gradients of the next but one are in shards.
        outer_memory, layer_memories = GradientMemory(), (GradientMemory(), GradientMemory())
        self.embedding_unit = self._create_unit(
            [param for param in others if param in embedding_parameters], outer_memory
        )
        self.layer_units = [
            self._create_unit(list(layer.parameters()), layer_memories[index % len(layer_memories)])
            for index, layer in enumerate(layers)
        ]
        self.head_unit = self._create_unit(
            [param for param in others if param not in embedding_parameters], outer_memory
        )
        for buffer in self._buffers.values():
            buffer.create_gradients(self._list_sharing_buckets(buffer))

    def list_buffers(self, *, of_experts: bool) -> list[ShardedBuffer]:
        """Return the buffers of the trained weights of experts, or of all others."""
        return [buffer for key, buffer in self._buffers.items() if key[0] == of_experts]

    def _list_sharing_buckets(self, buffer: ShardedBuffer) -> list[list[ShardedBucket]]:
        """Return lists of buckets whose gradients are never needed at the same time."""
        sharing: dict[tuple[GradientMemory, int], list[ShardedBucket]] = {}
        for unit in (self.embedding_unit, *self.layer_units, self.head_unit):
            buckets = [bucket for bucket in unit.buckets if bucket in buffer.buckets]
            for index, bucket in enumerate(buckets):
                sharing.setdefault((unit.gradient_memory, index), []).append(bucket)
        return list(sharing.values())

    def _create_unit(
        self, params: Sequence[torch.nn.Parameter], gradient_memory: GradientMemory
    ) -> ShardedUnit:
        by_bucket: dict[Any, list[torch.nn.Parameter]] = {}
        for param in dict.fromkeys(params):
            of_experts = not getattr(param, "allreduce", True)
            # Weights that two pipeline stages share must be sharded in the same way on both.
            shared = getattr(param, "shared_embedding", False)
            key = (of_experts, param.dtype, param.requires_grad, shared, self._is_fp8(param))
            by_bucket.setdefault(key, []).append(param)
        buckets = []
        for (of_experts, dtype, is_trained, _, is_fp8), bucket_params in by_bucket.items():
            create_bucket = partial(
                self._select_bucket_type(is_fp8=is_fp8),
                bucket_params,
                self._collectives[of_experts],
                shards_weights=self._shards_weights,
                initialize=self._initialize,
            )
            if is_trained:
                buckets.append(self._get_buffer(dtype, of_experts).add_bucket(create_bucket))
            else:
                buckets.append(create_bucket())
        return ShardedUnit(buckets, gradient_memory, shards_weights=self._shards_weights)

    def _is_fp8(self, param: torch.nn.Parameter) -> bool:
        """Return whether only FP8 values of a weight are needed between its all-gather and release,
        because it is sharded.
        """
        return (
            self._fp8_linears is not None
            and param in self._fp8_linears.by_weight
            and self._shards_weights
            and self._collectives[False].ranks > 1
        )

    def _select_bucket_type(self, *, is_fp8: bool) -> Callable[..., ShardedBucket]:
        if not is_fp8 or self._fp8_linears is None:
            return ShardedBucket
        return partial(Fp8Bucket, fp8_linears=self._fp8_linears)

    def _get_buffer(self, dtype: torch.dtype, of_experts: bool) -> ShardedBuffer:
        grad_dtype = torch.float32 if self._ddp_config.grad_reduce_in_fp32 else dtype
        key = (of_experts, dtype, grad_dtype)
        if key not in self._buffers:
            self._buffers[key] = ShardedBuffer(
                self._ddp_config,
                dtype,
                grad_dtype,
                self._collectives[of_experts],
                self._gradient_scaling_factor,
            )
        return self._buffers[key]
