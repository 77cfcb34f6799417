"""Weights and gradients that are gathered, reduced and released together.

A bucket is one flat tensor of weights and one of gradients. Every data-parallel rank keeps an equal
shard of both. The whole tensors have memory only while a layer computes: their storages are resized
to zero bytes when they are released, so that parameters, gradients and the tensors that autograd
has saved remain views of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flagscale.train.layers.wgrad_accumulation import expect_first_write, forget_first_write

_ALIGNED_ELEMENTS = 64
"""Multiple of the first element of a weight, so that its address is aligned to 128 bytes."""
_ALIGNED_SHARD_ELEMENTS = 128
"""Multiple of a shard's size, so that its address is aligned to 256 bytes."""


class ShardedBucket:
    """Weights of one dtype that are sharded over one process group.

    megatron.core's distributed optimizer reads the attributes that its own buckets have too.

    Attributes:
        params_list: the weights, in the order of the flat tensors. Each is a view of ``param_data``
            and, if it is trained, has ``main_grad``: a view of ``grad_data``.
        params: the same as a set.
        param_to_index: first and last element (exclusive) of each weight in the flat tensors.
        param_data: whole weights [numel].
        grad_data: whole gradients [numel], or None if the weights are frozen.
        weight_shard: this rank's part of the weights [numel / ranks].
        gradient_shard: the part of the gradients that this rank sums up over the micro-batches of
            a step [numel / ranks], or None.
        numel: number of elements with padding.
        numel_unpadded: number of elements up to the end of the last weight.
        offset: first element in the buffer that contains the bucket.
        bucket_id: index in that buffer.
        gradient_scaling_factor: factor of gradients before they are reduced.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        grad_dtype: torch.dtype | None,
        keeps_weights: bool,
        offset: int = 0,
        bucket_id: int = 0,
        gradient_scaling_factor: float = 1.0,
        averages: bool = False,
    ) -> None:
        """Move weights into the bucket and release their memory, except for this rank's shard.

        Args:
            params: the weights, at least one, all of one dtype.
            group: the data-parallel ranks.
            grad_dtype: dtype of gradients; None for frozen weights.
            keeps_weights: keep the whole weights in memory, and shard only gradients.
            offset: see the class.
            bucket_id: see the class.
            gradient_scaling_factor: see the class.
            averages: average gradients over the ranks instead of summing them up.
        """
        self.params_list = list(params)
        self.params = set(self.params_list)
        self.offset, self.bucket_id = offset, bucket_id
        self.gradient_scaling_factor = gradient_scaling_factor
        self._group, self._ranks = group, group.size()
        self._reduce_op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self.param_to_index: dict[torch.nn.Parameter, tuple[int, int]] = {}
        end = 0
        for param in self.params_list:
            start = _round_up(end, _ALIGNED_ELEMENTS)
            end = start + param.numel()
            self.param_to_index[param] = (start, end)
        self.numel_unpadded = end
        self.numel = _round_up(end, self._ranks * _ALIGNED_SHARD_ELEMENTS)
        self._shard_numel = self.numel // self._ranks
        self._keeps_weights = keeps_weights or self._ranks == 1
        self._move_weights()
        self.grad_data: torch.Tensor | None = None
        self.gradient_shard: torch.Tensor | None = None
        if grad_dtype is not None:
            self._create_gradients(grad_dtype)

    @torch.no_grad()
    def _move_weights(self) -> None:
        first = self.params_list[0]
        self.param_data = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        for param in self.params_list:
            self._view(self.param_data, param).copy_(param.data)
            param.data = self._view(self.param_data, param)
        self.weight_shard = self._local_part(self.param_data)
        if not self._keeps_weights:
            self.weight_shard = self.weight_shard.clone()
            _release(self.param_data)

    def _create_gradients(self, dtype: torch.dtype) -> None:
        device = self.param_data.device
        self.grad_data = torch.zeros(self.numel, dtype=dtype, device=device)
        self.gradient_shard = self.grad_data
        self._views = {param: self._view(self.grad_data, param) for param in self.params_list}
        if self._ranks > 1:
            self.gradient_shard = torch.zeros(self._shard_numel, dtype=dtype, device=device)
            _release(self.grad_data)
        self._shards = {
            param: self._select(self.gradient_shard, param) for param in self.params_list
        }
        self._written_in_place: set[torch.nn.Parameter] = set()
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

    def _local_part(self, flat: torch.Tensor) -> torch.Tensor:
        start = self._group.rank() * self._shard_numel
        return flat[start : start + self._shard_numel]

    def _select(self, shard: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the elements of a weight that are in this rank's shard; maybe none."""
        start, end = self.param_to_index[param]
        offset = self._group.rank() * self._shard_numel
        begin = min(max(start - offset, 0), self._shard_numel)
        return shard[begin : max(min(end - offset, self._shard_numel), begin)]

    def iter_weight_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each weight with the flat part of it that is in this rank's shard; maybe empty."""
        for param in self.params_list:
            yield param, self._select(self.weight_shard, param)

    @property
    def is_gathered(self) -> bool:
        """Whether the whole weights have memory."""
        return self.param_data.untyped_storage().size() > 0

    def start_gather(self) -> Any:
        """Allocate the whole weights and start to gather them.

        Returns:
            Handle whose ``wait`` must be called before the weights are read; None with one rank.
        """
        if self._ranks == 1:
            return None
        _allocate(self.param_data)
        return dist.all_gather_into_tensor(
            self.param_data, self.weight_shard, group=self._group, async_op=True
        )

    def release_weights(self) -> None:
        """Free the whole weights."""
        if not self._keeps_weights:
            _release(self.param_data)

    @torch.no_grad()
    def update_shard(self) -> None:
        """Copy this rank's part of the whole weights, which have been written to, to the shard."""
        if not self._keeps_weights:
            self.weight_shard.copy_(self._local_part(self.param_data))

    def allocate_gradients(self) -> None:
        """Allocate the whole gradients of a micro-batch.

        They are set to zero where the first value was not written in place so far.
        """
        if self.grad_data is not None and self._ranks > 1:
            _allocate(self.grad_data)
            for param, view in self._views.items():
                is_zero = param not in self._written_in_place
                if is_zero:
                    view.zero_()
                expect_first_write(view, is_zero=is_zero)

    def start_reduce(self) -> Any:
        """Start to reduce the whole gradients to the shards of the ranks.

        Returns:
            Handle to wait for before :meth:`finish_reduce`, or None.
        """
        if self.grad_data is None or self._ranks == 1:
            return None
        for param, view in self._views.items():
            is_unwritten = forget_first_write(view)
            if is_unwritten and param in self._written_in_place:
                view.zero_()
            elif not is_unwritten:
                self._written_in_place.add(param)
        for start, end in self._gaps:
            self.grad_data[start:end].zero_()
        if self.gradient_scaling_factor != 1.0:
            self.grad_data *= self.gradient_scaling_factor
        return dist.reduce_scatter_tensor(
            self._local_part(self.grad_data),
            self.grad_data,
            op=self._reduce_op,
            group=self._group,
            async_op=True,
        )

    def finish_reduce(self) -> None:
        """Add the reduced gradients to the shard and free the whole gradients."""
        if self.grad_data is not None and self._ranks > 1:
            assert self.gradient_shard is not None
            if self._has_first_gradients:
                self.gradient_shard.add_(self._local_part(self.grad_data))
            else:
                self.gradient_shard.copy_(self._local_part(self.grad_data))
                self._has_first_gradients = True
            _release(self.grad_data)

    def start_step(self) -> None:
        """Discard the gradients of the last step and expose the whole ones as ``main_grad``."""
        if self.gradient_shard is None:
            return
        if self._ranks == 1:
            self.gradient_shard.zero_()
        self._has_first_gradients = self._ranks == 1
        for param, view in self._views.items():
            param.main_grad = view  # type: ignore[attr-defined]

    def finish_step(self) -> None:
        """Complete the gradients of a step and expose this rank's shard of them.

        Until :meth:`start_step`, ``main_grad`` of a weight is the flat part that is in
        this rank's shard. Sums over other groups, such as those of layer norms over tensor-parallel
        ranks, then apply to that part, which is the same one on those ranks.
        """
        if self.gradient_shard is None:
            return
        if not self._has_first_gradients:
            self.gradient_shard.zero_()
        if self._ranks == 1 and self.gradient_scaling_factor != 1.0:
            self.gradient_shard *= self.gradient_scaling_factor
        for param, shard in self._shards.items():
            param.main_grad = shard  # type: ignore[attr-defined]


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _allocate(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _release(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
