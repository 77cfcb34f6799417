"""Buckets of weights that layers use in FP8 only.

The 16-bit weights stay in shards during training. What is gathered before a pass is their FP8
values: in 8 bits where the ranks can quantize their shards, otherwise the 16-bit weights, which are
quantized on arrival and released. The values and their transposes have memory only while a layer
computes.

With 8 bits, the ranks exchange the largest magnitudes in their shards once per step, so that the
scales are those of whole weights (:mod:`flagscale.train.layers.fp8_parts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flagscale.train.layers import fp8_parts
from flagscale.train.layers.fp8 import FORWARD_DTYPE, Fp8Weight, quantize_weight
from flagscale.train.layers.fp8_layers import Fp8Linears
from flagscale.train.layers.fp8_parts import WeightPart
from flagscale.train.layers.jit import compiled_if_faster
from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.deferred import lacks_memory

_ALIGNED_BYTES = 256
"""Multiple of the address of each matrix."""


@compiled_if_faster(dynamic=True)
def _copy_transposed(values: torch.Tensor, transposed: torch.Tensor) -> None:
    transposed.copy_(values.t())


class _Memory(NamedTuple):
    """Memory of an FP8 weight: bytes of the values of the weight and of its transpose, both with
    padded columns, and the scales of both.

    ``is_gathered`` tells whether ``values`` is a part of what is gathered, so that nothing has to
    be copied on arrival.
    """

    values: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor
    is_gathered: bool


class Fp8Bucket(ShardedBucket):
    """Weights of FP8 linear layers that are sharded over one process group.

    It sets ``fp8_weight`` of the layers. ``param_data`` has memory only while the 16-bit weights
    are read or written to, such as for checkpoints.

    Attributes:
        fp8_weights: FP8 values and scales of each weight.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        collectives: ShardCollectives,
        *,
        fp8_linears: Fp8Linears,
        **options: Any,
    ) -> None:
        """Move weights into the bucket and release their memory, except for this rank's shard.

        Args:
            params: the weights, at least one, all of one dtype.
            collectives: collectives of at least two data-parallel ranks.
            fp8_linears: the layers that have the weights.
            **options: see the base class.
        """
        super().__init__(params, collectives, **options)
        self._scaling = fp8_linears.scaling
        self._gathers_fp8 = fp8_parts.can_quantize_parts(self._scaling)
        self._is_stale = self._gathers_fp8
        self._are_transposed = False
        self._value_shard: torch.Tensor | None = None
        if self._gathers_fp8:
            self._value_shard = collectives.allocate_shared(self._shard_numel, torch.uint8)
            self._value_shard.zero_()
        self._create_memory(fp8_linears.by_weight)

    def _create_memory(self, linears: Mapping[torch.nn.Parameter, Any]) -> None:
        """Set the FP8 weights of the layers to views of one tensor, which has no memory so far."""
        device = self.weight_shard.device
        weights = {
            # An empty weight of the same shape tells the shapes of values and scales.
            param: quantize_weight(torch.zeros_like(param, device="meta"), self._scaling)
            for param in self.params_list
        }
        sizes = [self.numel] if self._gathers_fp8 else []
        for param, weight in weights.items():
            is_gathered = self._gathers_fp8 and weight.weight.shape == param.shape
            sizes += [0 if is_gathered else weight.weight.numel(), weight.transposed.numel()]
        sizes = [math.ceil(size / _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
        self._storage = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = iter(torch.split(self._storage, sizes))
        self._gathered = next(parts)[: self.numel] if self._gathers_fp8 else self._storage[:0]
        self._memory_of: dict[torch.nn.Parameter, _Memory] = {}
        self.fp8_weights: dict[torch.nn.Parameter, Fp8Weight] = {}
        for param, weight in weights.items():
            own_values, transposed = next(parts), next(parts)
            is_gathered = own_values.numel() == 0
            values = self._view(self._gathered, param) if is_gathered else own_values
            memory = _Memory(
                values.view(-1)[: weight.weight.numel()].view(weight.weight.shape),
                torch.empty_like(weight.scale, device=device),
                transposed[: weight.transposed.numel()].view(weight.transposed.shape),
                torch.empty_like(weight.transposed_scale, device=device),
                is_gathered,
            )
            self._memory_of[param] = memory
            # The data of a tensor has a version counter of its own: what is gathered for the
            # backward pass is no change of what autograd has saved.
            self.fp8_weights[param] = Fp8Weight(
                memory.values.view(FORWARD_DTYPE).data,
                memory.scale.data,
                memory.transposed.view(FORWARD_DTYPE).data,
                memory.transposed_scale.data,
            )
            linears[param].fp8_weight = self.fp8_weights[param]
        self._storage.untyped_storage().resize_(0)

    # Quantization of the shards

    def invalidate(self) -> None:
        if self.gradient_shard is not None:  # frozen weights do not change
            self._is_stale = self._gathers_fp8

    def update_shard(self) -> None:
        super().update_shard()
        self._is_stale = self._gathers_fp8

    @property
    def is_stale(self) -> bool:
        """True if the shard of the weights has changed since it was quantized."""
        return self._is_stale

    def measure_shard(self) -> torch.Tensor:
        """Return the largest magnitudes in this rank's shard, flat and in fp32."""
        return torch.cat(
            [
                fp8_parts.measure_part(self._get_part(param), self._scaling)
                for param in self.params_list
            ]
        )

    @torch.no_grad()
    def quantize_shard(self, magnitudes: torch.Tensor) -> None:
        """Quantize this rank's shard.

        Args:
            magnitudes: the maxima of what :meth:`measure_shard` returned on all ranks.
        """
        assert self._value_shard is not None
        parts = {param: self._get_part(param) for param in self.params_list}
        counts = [fp8_parts.count_magnitudes(part, self._scaling) for part in parts.values()]
        for (param, part), maxima in zip(
            parts.items(), torch.split(magnitudes, counts), strict=True
        ):
            scales = fp8_parts.compute_scales(part, maxima, self._scaling)
            memory = self._memory_of[param]
            memory.scale.copy_(scales[0])
            memory.transposed_scale.copy_(scales[1])
            if part.elements.numel():
                values = fp8_parts.quantize_part(part, maxima, self._scaling)
                self._select(self._value_shard, param).copy_(values.view(torch.uint8))
        self._is_stale = False

    def _get_part(self, param: torch.nn.Parameter) -> WeightPart:
        start, _ = self.param_to_index[param]
        begin = max(self._collectives.rank * self._shard_numel - start, 0)
        rows, columns = param.shape
        return WeightPart(self._select(self.weight_shard, param), begin, rows, columns)

    # Gathering

    def start_all_gather(self) -> Any:
        """Start to all-gather what the FP8 values are made of.

        Returns:
            Handle whose ``wait`` must be called before :meth:`finish_all_gather`.
        """
        assert not self._is_stale, "weights changed and were not quantized"
        if lacks_memory(self._storage):
            self._storage.untyped_storage().resize_(self._storage.numel())
        self._are_transposed = False
        if self._value_shard is None:
            return super().start_all_gather()
        return self._collectives.start_all_gather(self._gathered, self._value_shard)

    @torch.no_grad()
    def finish_all_gather(self) -> None:
        if self._value_shard is None:
            for param in self.params_list:
                weight = quantize_weight(self._view(self.param_data, param), self._scaling)
                memory = self._memory_of[param]
                memory.values.copy_(weight.weight.view(torch.uint8))
                memory.scale.copy_(weight.scale)
                memory.transposed.copy_(weight.transposed.view(torch.uint8))
                memory.transposed_scale.copy_(weight.transposed_scale)
            super().release_weights()
            self._are_transposed = True
            return
        for param, memory in self._memory_of.items():
            if not memory.is_gathered:
                memory.values.zero_()
                columns = param.shape[1]
                memory.values[:, :columns].copy_(self._view(self._gathered, param))

    @torch.no_grad()
    def prepare_backward(self) -> None:
        if self._are_transposed:
            return
        for param, memory in self._memory_of.items():
            rows = param.shape[0]
            if memory.transposed.shape[1] > rows:
                memory.transposed[:, rows:].zero_()
            _copy_transposed(self._view(self._gathered, param), memory.transposed[:, :rows])
        self._are_transposed = True

    def start_all_gather_weights(self) -> Any:
        return super().start_all_gather()

    def release_weights(self) -> None:
        super().release_weights()
        self._storage.untyped_storage().resize_(0)


def quantize_stale_shards(buckets: Sequence[Fp8Bucket], group: dist.ProcessGroup) -> None:
    """Quantize the shards of buckets. Collective.

    Args:
        buckets: at least one, all sharded over ``group``.
        group: the ranks.
    """
    measured = [bucket.measure_shard() for bucket in buckets]
    magnitudes = torch.cat(measured)
    dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX, group=group)
    sizes = [len(part) for part in measured]
    for bucket, part in zip(buckets, torch.split(magnitudes, sizes), strict=True):
        bucket.quantize_shard(part)
