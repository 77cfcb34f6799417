"""Buckets: weights and gradients that are all-gathered, reduce-scattered and released together.

A bucket is one flat tensor of unsharded weights and one of unsharded gradients. Every data-parallel
rank keeps an equal shard of both. Unsharded weights have memory only while a layer computes: their
storage is resized to zero bytes when they are released, so that parameters and the tensors that
autograd has saved remain views of it. Unsharded gradients are in memory that several buckets use in
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from flagscale.train.layers.wgrad_accumulation import mark_unwritten, pop_unwritten
from flagscale.train.sharding.collectives import ShardCollectives
from flagscale.train.sharding.deferred import lacks_memory

Initialize = Callable[[Collection[torch.nn.Parameter]], None]
"""Function that initializes those weights in place that are in a collection."""

_ALIGNED_ELEMENTS = 64
"""Multiple of the first element of a weight, so that its address is aligned to 128 bytes."""
_ALIGNED_SHARD_ELEMENTS = 128
"""Multiple of a shard's size, so that its address is aligned to 256 bytes."""


class ShardedBucket:
    """Weights of one dtype that are sharded over one process group.

    megatron.core's distributed optimizer reads the attributes that its own buckets have too.

    Attributes:
        params_list: the weights, in the order of the flat tensors. Each is a view of ``param_data``
            and, if it is trained, has ``main_grad``: a view of ``grad_data``, and between
            :meth:`finish_step` and :meth:`start_step` the part of it in this rank's shard.
        params: the same as a set.
        param_to_index: first and last element (exclusive) of each weight in the flat tensors.
        param_data: unsharded weights [numel].
        grad_data: unsharded gradients [numel]; None without :meth:`create_gradients`.
        weight_shard: this rank's part of the weights [numel / ranks].
        gradient_shard: the part of the gradients that this rank sums up over the micro-batches of
            a step [numel / ranks]; None like ``grad_data``.
        numel: number of elements with padding.
        numel_unpadded: number of elements up to the end of the last weight.
        offset: first element in the buffer that contains the bucket.
        bucket_id: index in that buffer.
        gradient_scaling_factor: factor of the gradients of a step.
        group: the ranks.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        collectives: ShardCollectives,
        *,
        shards_weights: bool,
        offset: int = 0,
        bucket_id: int = 0,
        gradient_scaling_factor: float = 1.0,
        initialize: Initialize | None = None,
    ) -> None:
        """Move weights into the bucket and release their memory, except for this rank's shard.

        Args:
            params: the weights, at least one, all of one dtype.
            collectives: collectives of the data-parallel ranks.
            shards_weights: release the unsharded weights. If false, only gradients are sharded.
            offset: see the class.
            bucket_id: see the class.
            gradient_scaling_factor: see the class.
            initialize: initializes the weights, or None if they are.
        """
        self.params_list = list(params)
        self.params = set(self.params_list)
        self.offset, self.bucket_id = offset, bucket_id
        self.gradient_scaling_factor = gradient_scaling_factor
        self._collectives, self._ranks = collectives, collectives.ranks
        self.group = collectives.group
        self.param_to_index: dict[torch.nn.Parameter, tuple[int, int]] = {}
        end = 0
        for param in self.params_list:
            start = _round_up(end, _ALIGNED_ELEMENTS)
            end = start + param.numel()
            self.param_to_index[param] = (start, end)
        self.numel_unpadded = end
        self.numel = _round_up(end, self._ranks * _ALIGNED_SHARD_ELEMENTS)
        self._shard_numel = self.numel // self._ranks
        self._shards_weights = shards_weights and self._ranks > 1
        self.grad_data: torch.Tensor | None = None
        self.gradient_shard: torch.Tensor | None = None
        self._gradient_views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._gradient_parts: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._written_in_place: set[torch.nn.Parameter] = set()
        self._has_first_gradients = False
        self._move_weights(initialize)

    @torch.no_grad()
    def _move_weights(self, initialize: Initialize | None) -> None:
        first = self.params_list[0]
        if self._shards_weights:
            self.param_data = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        else:
            self.param_data = self._collectives.allocate_shared(self.numel, first.dtype)
        self.param_data.zero_()
        for param in self.params_list:
            if not lacks_memory(param.data):
                self._view(self.param_data, param).copy_(param.data)
            param.data = self._view(self.param_data, param)
        if initialize is not None:
            initialize(self.params)
        self.weight_shard = self._collectives.local_part(self.param_data)
        if self._shards_weights:
            local_part = self.weight_shard
            self.weight_shard = self._collectives.allocate_shared(self._shard_numel, first.dtype)
            self.weight_shard.copy_(local_part)
            self.param_data.untyped_storage().resize_(0)

    def create_gradients(self, buffer: torch.Tensor) -> None:
        """Create the gradients of the weights.

        Args:
            buffer: memory for the unsharded gradients, of at least ``numel`` elements.
        """
        self.grad_data = buffer[: self.numel]
        self.gradient_shard = self.grad_data
        if self._ranks > 1:
            self.gradient_shard = torch.zeros(
                self._shard_numel, dtype=buffer.dtype, device=buffer.device
            )
        for param in self.params_list:
            self._gradient_views[param] = self._view(self.grad_data, param)
            self._gradient_parts[param] = self._select(self.gradient_shard, param)
        ends = [end for _, end in self.param_to_index.values()]
        starts = [start for start, _ in self.param_to_index.values()]
        self._gaps = [
            (end, start)
            for end, start in zip(ends, [*starts[1:], self.numel], strict=True)
            if end < start
        ]
        self.start_step()

    def _view(self, flat: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        start, end = self.param_to_index[param]
        return flat[start:end].view(param.shape)

    def _select(self, shard: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the elements of a weight that are in this rank's shard; maybe none."""
        start, end = self.param_to_index[param]
        offset = self._collectives.rank * self._shard_numel
        begin = min(max(start - offset, 0), self._shard_numel)
        return shard[begin : max(min(end - offset, self._shard_numel), begin)]

    def iter_weight_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each weight with the flat part of it that is in this rank's shard; maybe empty."""
        for param in self.params_list:
            yield param, self._select(self.weight_shard, param)

    def start_all_gather(self) -> Any:
        """Start to all-gather the weights, after allocating the unsharded ones if necessary.

        Returns:
            Handle whose ``wait`` must be called before the weights are read; None with one rank.
        """
        if self._ranks == 1:
            return None
        if lacks_memory(self.param_data):
            storage_bytes = self.param_data.numel() * self.param_data.element_size()
            self.param_data.untyped_storage().resize_(storage_bytes)
        return self._collectives.start_all_gather(self.param_data, self.weight_shard)

    def finish_all_gather(self) -> None:
        """Prepare what was gathered for a forward pass."""

    def prepare_backward(self) -> None:
        """Prepare what was gathered for a backward pass too, unless that has been done."""

    def start_all_gather_weights(self) -> Any:
        """Start to all-gather the weights themselves, where layers compute with something else.

        Returns:
            Handle as that of :meth:`start_all_gather`.
        """
        return self.start_all_gather()

    def invalidate(self, *, only_trained: bool) -> None:
        """Take note that this rank's shard of the weights has changed.

        ``only_trained`` tells that those of frozen weights have not.
        """

    def release_weights(self) -> None:
        """Free the unsharded weights."""
        if self._shards_weights:
            self.param_data.untyped_storage().resize_(0)

    @torch.no_grad()
    def update_shard(self) -> None:
        """Copy this rank's part of the unsharded weights, which have been written to, to the shard.

        Nothing happens if the unsharded weights have no memory.
        """
        if self._shards_weights and not lacks_memory(self.param_data):
            self.weight_shard.copy_(self._collectives.local_part(self.param_data))

    def prepare_gradients(self) -> None:
        """Prepare the unsharded gradients for the backward pass of a micro-batch.

        Those are set to zero whose first value was not written in place in earlier micro-batches.
        """
        if self._ranks > 1:
            for param, view in self._gradient_views.items():
                is_zero = param not in self._written_in_place
                if is_zero:
                    view.zero_()
                mark_unwritten(view, is_zero=is_zero)

    def zero_unwritten_gradients(self) -> None:
        """Set to zero what the backward pass of a micro-batch has not written, and the padding."""
        if self.grad_data is None or self._ranks == 1:
            return
        for param, view in self._gradient_views.items():
            is_unwritten = pop_unwritten(view)
            if is_unwritten and param in self._written_in_place:
                view.zero_()
            elif not is_unwritten:
                self._written_in_place.add(param)
        for start, end in self._gaps:
            self.grad_data[start:end].zero_()

    def start_reduce_scatter(self) -> Any:
        """Start to reduce-scatter the gradients of a micro-batch, and add them to the shards.

        Returns:
            Handle whose ``wait`` must be called before the unsharded gradients are written to or
            the shard is read; None with one rank.
        """
        if self.grad_data is None or self._ranks == 1:
            return None
        assert self.gradient_shard is not None
        accumulate, self._has_first_gradients = self._has_first_gradients, True
        return self._collectives.start_reduce_scatter(
            self.grad_data, self.gradient_shard, accumulate=accumulate
        )

    def start_all_reduce(self) -> Any:
        """Start to sum this rank's shard of a step's gradients over the replicas of the shard.

        Returns:
            Handle whose ``wait`` must be called before :meth:`finish_step`; None if there are no
            replicas or gradients.
        """
        if self.gradient_shard is None:
            return None
        if not self._has_first_gradients:
            self.gradient_shard.zero_()
        return self._collectives.start_all_reduce(self.gradient_shard)

    def start_step(self) -> None:
        """Discard the gradients of the last step and set ``main_grad`` to the unsharded ones."""
        if self.gradient_shard is None:
            return
        if self._ranks == 1:
            self.gradient_shard.zero_()
        self._has_first_gradients = self._ranks == 1
        for param, view in self._gradient_views.items():
            param.main_grad = view  # type: ignore[attr-defined]

    def finish_step(self) -> None:
        """Complete the gradients of a step and set ``main_grad`` to this rank's shard of them.

        Sums over other groups, such as those of layer norms over tensor-parallel ranks, then apply
        to that part, which is the same one on those ranks.
        """
        if self.gradient_shard is None:
            return
        if not self._has_first_gradients and self._collectives.replica_group is None:
            self.gradient_shard.zero_()
        elif self.gradient_scaling_factor != 1.0:
            self.gradient_shard *= self.gradient_scaling_factor
        for param, part in self._gradient_parts.items():
            param.main_grad = part  # type: ignore[attr-defined]


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
