"""Buckets of weights that layers read only as FP8 values.

With ``tensorwise`` and ``blockwise`` scaling, each rank quantizes its shard of the weights in the
first forward pass after they have changed, and what is gathered before a layer computes is FP8. The
scales are those of whole weights, for which the ranks exchange the largest magnitudes in their
shards (:mod:`flagscale.train.layers.fp8_parts`). With ``rowwise`` scaling the 16-bit weights are
gathered, quantized on arrival and released.

The FP8 values of weights and of their transposes have memory from the start of the all-gather until
they are released after the layer. The transposes, which only backward passes read, are written
before those. Scales always have memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flagscale.train.layers import fp8_parts
from flagscale.train.layers.fp8 import FORWARD_DTYPE, Fp8Weight, quantize_weight
from flagscale.train.layers.fp8_blockwise import MAX_WEIGHT_SHAPES
from flagscale.train.layers.fp8_layers import Fp8Linears
from flagscale.train.layers.fp8_parts import WeightPart
from flagscale.train.layers.jit import compiled_if_faster
from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.deferred import lacks_memory

_ALIGNED_BYTES = 256
"""Multiple of the size of each matrix that is not gathered, so that the next one is aligned."""


@compiled_if_faster(dynamic=True, max_shapes=MAX_WEIGHT_SHAPES)
def _copy_transposed(values: torch.Tensor, transposed: torch.Tensor) -> None:
    # Compiled, because torch's kernel writes single bytes across rows.
    transposed.copy_(values.t())


class _WeightMemory(NamedTuple):
    """Memory of an FP8 weight.

    Attributes:
        values: bytes of the values of the weight; with blockwise scaling columns are padded.
        scale: its scales.
        transposed: bytes of the values of its transpose, padded in the same way.
        transposed_scale: its scales.
        is_part_of_gathered: whether ``values`` is a part of what is gathered, because it has no
            padding. Otherwise what is gathered is copied to it.
    """

    values: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor
    is_part_of_gathered: bool


class Fp8Bucket(ShardedBucket):
    """Weights of FP8 linear layers that are sharded over one process group.

    It sets ``fp8_weight`` of the layers. ``param_data`` has memory only while the 16-bit weights
    are read or written to, such as for checkpoints, and with rowwise scaling while they arrive.

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
            fp8_linears: the FP8 layers of the model chunk.
            **options: other arguments of the base class; ``shards_weights`` must be true.
        """
        super().__init__(params, collectives, **options)
        assert self._shards_weights
        self._scaling = fp8_linears.scaling
        self._has_transposes = False
        self._is_stale = False
        self._fp8_shard: torch.Tensor | None = None  # None: 16-bit weights are gathered
        if fp8_parts.can_quantize_parts(self._scaling):
            self._fp8_shard = collectives.allocate_shared(self._shard_numel, torch.uint8)
            self._fp8_shard.zero_()  # the padding between weights
            self._is_stale = True
        self._allocate_weights(fp8_linears.by_weight)

    def _allocate_weights(self, linears: Mapping[torch.nn.Parameter, Any]) -> None:
        """Set the FP8 weights of the layers, whose values are views of one storage, and release the
        storage.
        """
        device = self.weight_shard.device
        gathered_numel = 0 if self._fp8_shard is None else self.numel
        # Quantization on the meta device tells shapes and strides without memory.
        outlines = {
            param: quantize_weight(torch.zeros_like(param, device="meta"), self._scaling)
            for param in self.params_list
        }
        needs_values = {
            param: self._fp8_shard is None or outline.weight.shape != param.shape
            for param, outline in outlines.items()
        }
        sizes = [gathered_numel]
        for param, outline in outlines.items():
            sizes += [outline.weight.numel() * needs_values[param], outline.transposed.numel()]
        sizes = [math.ceil(size / _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
        self._all_values = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        pieces = iter(torch.split(self._all_values, sizes))
        self._gathered = next(pieces)[:gathered_numel]
        self._memory: dict[torch.nn.Parameter, _WeightMemory] = {}
        self.fp8_weights: dict[torch.nn.Parameter, Fp8Weight] = {}
        for param, outline in outlines.items():
            own_values, transposed = next(pieces), next(pieces)
            values = own_values if needs_values[param] else self._view(self._gathered, param)
            memory = _WeightMemory(
                values.view(-1)[: outline.weight.numel()].view(outline.weight.shape),
                torch.empty_like(outline.scale, device=device),
                transposed[: outline.transposed.numel()].view(outline.transposed.shape),
                torch.empty_like(outline.transposed_scale, device=device),
                not needs_values[param],
            )
            self._memory[param] = memory
            # ``.data`` has a version counter of its own: gathering again for the backward pass is
            # no change of what autograd has saved in the forward pass.
            self.fp8_weights[param] = Fp8Weight(
                memory.values.view(FORWARD_DTYPE).data,
                memory.scale.data,
                memory.transposed.view(FORWARD_DTYPE).data,
                memory.transposed_scale.data,
            )
            linears[param].fp8_weight = self.fp8_weights[param]
        self._all_values.untyped_storage().resize_(0)

    # Quantization of the shard

    def invalidate(self, *, only_trained: bool) -> None:
        if self.gradient_shard is not None or not only_trained:
            self._is_stale = self._fp8_shard is not None

    def update_shard(self) -> None:
        super().update_shard()
        self.invalidate(only_trained=False)

    @property
    def is_stale(self) -> bool:
        """True if the shard must be quantized before the next all-gather. Always false with rowwise
        scaling.
        """
        return self._is_stale

    def measure_shard(self) -> torch.Tensor:
        """Return the largest magnitude per scale of each weight, flat, in the order of
        ``params_list``. Only elements in this rank's shard count.
        """
        parts = (self._get_part(param) for param in self.params_list)
        return torch.cat([fp8_parts.measure_part(part, self._scaling) for part in parts])

    @torch.no_grad()
    def quantize_shard(self, magnitudes: torch.Tensor) -> None:
        """Quantize this rank's shard. Unsharded values must have been released.

        Args:
            magnitudes: the maxima of what :meth:`measure_shard` returned on all ranks.
        """
        assert self._fp8_shard is not None
        assert lacks_memory(self._all_values), "layers would read old values with new scales"
        parts = [self._get_part(param) for param in self.params_list]
        counts = [fp8_parts.count_magnitudes(part, self._scaling) for part in parts]
        pieces = torch.split(magnitudes, counts)
        for param, part, piece in zip(self.params_list, parts, pieces, strict=True):
            # Every rank needs the scales of all weights, also of those outside its shard.
            memory = self._memory[param]
            scale, transposed_scale = fp8_parts.compute_scales(part, piece, self._scaling)
            memory.scale.copy_(scale)
            memory.transposed_scale.copy_(transposed_scale)
            if part.elements.numel():
                values = fp8_parts.quantize_part(part, piece, self._scaling)
                self._select(self._fp8_shard, param).copy_(values.view(torch.uint8))
        self._is_stale = False

    def _get_part(self, param: torch.nn.Parameter) -> WeightPart:
        start, _ = self.param_to_index[param]
        begin = max(self._collectives.rank * self._shard_numel - start, 0)
        rows, columns = param.shape
        return WeightPart(self._select(self.weight_shard, param), begin, rows, columns)

    # Gathering

    def start_all_gather(self) -> Any:
        """Start to all-gather the FP8 values, or the 16-bit weights with rowwise scaling.

        Returns:
            Handle whose ``wait`` must be called before :meth:`finish_all_gather`.
        """
        assert not self._is_stale, "call quantize_shards after the weights have changed"
        if lacks_memory(self._all_values):
            self._all_values.untyped_storage().resize_(self._all_values.numel())
        self._has_transposes = False
        if self._fp8_shard is None:
            return super().start_all_gather()
        return self._collectives.start_all_gather(self._gathered, self._fp8_shard)

    @torch.no_grad()
    def finish_all_gather(self) -> None:
        """Write the FP8 values that were not gathered into their place."""
        if self._fp8_shard is None:
            self._quantize_gathered_weights()
            return
        for param, memory in self._memory.items():
            if not memory.is_part_of_gathered:
                columns = param.shape[1]
                memory.values[:, columns:].zero_()  # GEMMs read the padding
                memory.values[:, :columns].copy_(self._view(self._gathered, param))

    def _quantize_gathered_weights(self) -> None:
        for param, memory in self._memory.items():
            weight = quantize_weight(self._view(self.param_data, param), self._scaling)
            memory.values.copy_(weight.weight.view(torch.uint8))
            memory.scale.copy_(weight.scale)
            memory.transposed.copy_(weight.transposed.view(torch.uint8))
            memory.transposed_scale.copy_(weight.transposed_scale)
        super().release_weights()  # not those of this class: the FP8 values stay
        self._has_transposes = True

    @torch.no_grad()
    def prepare_backward(self) -> None:
        """Write the values of the transposes unless that has been done."""
        if self._has_transposes:
            return
        for param, memory in self._memory.items():
            rows = param.shape[0]
            memory.transposed[:, rows:].zero_()
            _copy_transposed(self._view(self._gathered, param), memory.transposed[:, :rows])
        self._has_transposes = True

    def start_all_gather_weights(self) -> Any:
        return super().start_all_gather()

    def release_weights(self) -> None:
        super().release_weights()
        self._all_values.untyped_storage().resize_(0)


def quantize_shards(buckets: Sequence[Fp8Bucket], group: dist.ProcessGroup) -> None:
    """Quantize the shards of buckets. Collective.

    Args:
        buckets: at least one, all sharded over ``group``.
        group: the ranks.
    """
    measured = [bucket.measure_shard() for bucket in buckets]
    magnitudes = torch.cat(measured)
    dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX, group=group)
    pieces = torch.split(magnitudes, [len(piece) for piece in measured])
    for bucket, piece in zip(buckets, pieces, strict=True):
        bucket.quantize_shard(piece)
