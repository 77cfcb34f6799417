"""Exchange of shards between data-parallel ranks: gathering weights and reducing gradients.

There are two ways. Collectives of the communication backend work everywhere. Between GPUs of one
host, copy engines read the memory of the other ranks, so that no multiprocessor is taken from the
products that are computed meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from flagscale.accelerators.device import count_shared_memory, current_device
from flagscale.train.layers.collectives import get_group_name
from flagscale.train.layers.jit import compiled_if_faster

_READY_CHANNEL, _DONE_CHANNEL = 0, 1
"""Signal channels of barriers: before and after gradients are read."""
_PIECE_ELEMENTS = 1 << 26
"""Gradients that are copied from another rank at a time, which bounds the memory for them."""


@compiled_if_faster(dynamic=True)
def _add_sum(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    # Compiled into one kernel, because memory limits its speed.
    total.add_(first + second)


class Exchange(ABC):
    """Exchange of shards over one process group.

    All ranks call the methods in the same order with tensors of the same sizes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = group.rank(), group.size()

    @abstractmethod
    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory for a shard of weights or for whole gradients."""

    @abstractmethod
    def start_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Any:
        """Start to fill ``whole`` with the shards of all ranks.

        Args:
            whole: [numel].
            shard: [numel / ranks], allocated by :meth:`allocate_shared`, or this rank's part of
                ``whole``.

        Returns:
            Handle whose ``wait`` makes the current stream wait for the end.
        """

    @abstractmethod
    def start_reduce(self, whole: torch.Tensor, shard: torch.Tensor, *, adds: bool) -> Any:
        """Start to sum this rank's part of ``whole`` over all ranks.

        Args:
            whole: [numel], in memory allocated by :meth:`allocate_shared`. It may be overwritten.
            shard: [numel / ranks], receives the sum.
            adds: add the sum to ``shard`` instead of writing it.

        Returns:
            Handle whose ``wait`` makes the current stream wait for the end.
        """

    @abstractmethod
    def synchronize_ranks(self) -> None:
        """Make the current streams of all ranks wait for each other, if ranks read each other's
        memory.
        """

    def _local_part(self, whole: torch.Tensor) -> torch.Tensor:
        numel = whole.numel() // self.ranks
        return whole[self.rank * numel : (self.rank + 1) * numel]


class CollectiveExchange(Exchange):
    """Exchange by all_gather and reduce_scatter of the communication backend."""

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=current_device().torch_device)

    def start_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(whole, shard, group=self.group, async_op=True)

    def start_reduce(self, whole: torch.Tensor, shard: torch.Tensor, *, adds: bool) -> Any:
        part = self._local_part(whole)
        handle = dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
        return _ReduceHandle(handle, part, shard, adds)

    def synchronize_ranks(self) -> None:
        pass


class _ReduceHandle:
    """Handle that adds a reduced part to a shard when it is waited for."""

    def __init__(self, handle: Any, part: torch.Tensor, shard: torch.Tensor, adds: bool) -> None:
        self._handle, self._part, self._shard, self._adds = handle, part, shard, adds

    def wait(self) -> None:
        self._handle.wait()
        if self._adds:
            self._shard.add_(self._part)
        else:
            self._shard.copy_(self._part)


class PeerExchange(Exchange):
    """Exchange by copies from the memory of the other ranks, over torch's symmetric memory.

    Copies run on two streams besides the current one. A rank signals that its gradients are ready,
    and that it has read those of the others. Weights change only between steps, so that
    :meth:`synchronize_ranks` before and after the optimizer's step is enough for them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._module = torch.get_device_module(device)
        self._gather_stream = self._module.Stream(device)
        self._reduce_stream = self._module.Stream(device)
        self._handles: dict[int, Any] = {}
        self._landing: torch.Tensor | None = None
        # Fails here if a rank cannot read the memory of another one.
        self._barrier_handle = self._rendezvous(self._allocate(1, torch.uint8))

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Imported here because it takes half a second.
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        tensor: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=self._device)
        count_shared_memory(tensor)
        return tensor

    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        handle = symmetric.rendezvous(tensor, get_group_name(self.group))
        self._handles[tensor.data_ptr()] = handle
        return handle

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._allocate(numel, dtype)
        self._rendezvous(tensor)
        return tensor

    def _peers(self) -> list[int]:
        """Return the other ranks, so that ranks read from different ones at the same time."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def start_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Any:
        numel, handle = shard.numel(), self._handles.get(whole.data_ptr())
        is_in_place = handle is not None  # weights that are kept whole
        if handle is None:
            handle = self._handles[shard.data_ptr()]
        self._gather_stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._gather_stream), torch.no_grad():
            if not is_in_place:
                self._local_part(whole).copy_(shard, non_blocking=True)
            for peer in self._peers():
                part = whole[peer * numel : (peer + 1) * numel]
                offset = peer * numel if is_in_place else 0
                part.copy_(
                    handle.get_buffer(peer, shard.shape, shard.dtype, offset), non_blocking=True
                )
            return _EventHandle(self._module, self._gather_stream.record_event())

    def start_reduce(self, whole: torch.Tensor, shard: torch.Tensor, *, adds: bool) -> Any:
        handle = self._handles[whole.data_ptr()]
        numel, offset = shard.numel(), self.rank * shard.numel()
        self._reduce_stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._reduce_stream), torch.no_grad():
            handle.barrier(channel=_READY_CHANNEL)
            own_part = self._local_part(whole)
            landing = self._get_landing(min(numel, _PIECE_ELEMENTS), whole.dtype)
            for begin in range(0, numel, _PIECE_ELEMENTS):
                piece = shard[begin : begin + _PIECE_ELEMENTS]
                own_piece = own_part[begin : begin + _PIECE_ELEMENTS]
                received = landing[: piece.numel()]
                for index, peer in enumerate(self._peers()):
                    received.copy_(
                        handle.get_buffer(peer, piece.shape, whole.dtype, offset + begin),
                        non_blocking=True,
                    )
                    if index > 0:
                        piece.add_(received)
                    elif adds:
                        _add_sum(piece, own_piece, received)
                    else:
                        torch.add(own_piece, received, out=piece)
            handle.barrier(channel=_DONE_CHANNEL)
            return _EventHandle(self._module, self._reduce_stream.record_event())

    def _get_landing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for ``numel`` elements of another rank, used on the reduce stream only."""
        if self._landing is None or self._landing.numel() < numel or self._landing.dtype != dtype:
            self._landing = torch.empty(numel, dtype=dtype, device=self._device)
        return self._landing

    def synchronize_ranks(self) -> None:
        self._barrier_handle.barrier(channel=_READY_CHANNEL)


class _EventHandle:
    """Handle that makes the current stream wait for an event."""

    def __init__(self, module: Any, event: Any) -> None:
        self._module, self._event = module, event

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)


def create_exchange(group: dist.ProcessGroup) -> Exchange:
    """Return the exchange for a process group. All ranks of the group call it.

    Copies between the ranks' memory are used if all ranks are on one host whose devices support it.
    """
    device = current_device()
    if group.size() == 1:
        return CollectiveExchange(group)
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.symmetric_memory), group=group)
    if len(set(places)) > 1 or not device.symmetric_memory:
        return CollectiveExchange(group)
    exchange: Exchange = CollectiveExchange(group)
    with contextlib.suppress(RuntimeError):  # devices that are not connected
        exchange = PeerExchange(group, device.torch_device)
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, isinstance(exchange, PeerExchange), group=group)
    return exchange if all(outcomes) else CollectiveExchange(group)
