"""All-gather of weights and reduce-scatter of gradients between data-parallel ranks.

There are two implementations. Collectives of the communication backend work everywhere. Between
GPUs of one host, copy engines read the memory of the other ranks, so that no multiprocessor is
taken from the products that are computed meanwhile.
"""

from __future__ import annotations

import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flagscale.accelerators.device import count_shared_memory, current_device
from flagscale.errors import JobError
from flagscale.train.layers.collectives import get_group_name
from flagscale.train.layers.jit import compiled_if_faster

T = TypeVar("T")

_READY_CHANNEL, _DONE_CHANNEL = 0, 1
"""Signal channels of barriers: before and after gradients are read."""
_PIECE_ELEMENTS = 1 << 26
"""Gradients that are copied from another rank at a time, which bounds the memory for them."""


@compiled_if_faster(dynamic=True)
def _add_sum(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    # Compiled into one kernel, because memory limits its speed.
    total.add_(first + second)


class ShardCollectives(ABC):
    """Collectives of one process group on tensors of which each rank has a shard.

    All ranks call the methods in the same order with tensors of the same sizes.

    Attributes:
        group: the ranks.
        replica_group: the ranks with the same shard in all groups; None with one group.
        rank: index of this rank in the group.
        ranks: number of ranks in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, replica_group: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.replica_group = group, replica_group
        self.rank, self.ranks = group.rank(), group.size()

    @abstractmethod
    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory for a shard of weights or for unsharded gradients."""

    @abstractmethod
    def start_all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> Any:
        """Start to fill ``unsharded`` with the shards of all ranks.

        Args:
            unsharded: [numel].
            shard: [numel / ranks], allocated by :meth:`allocate_shared`, or this rank's part of
                ``unsharded``.

        Returns:
            Handle whose ``wait`` makes the current stream wait for the end.
        """

    @abstractmethod
    def start_reduce_scatter(
        self, unsharded: torch.Tensor, shard: torch.Tensor, *, accumulate: bool
    ) -> Any:
        """Start to sum this rank's part of ``unsharded`` over all ranks.

        Args:
            unsharded: [numel], in memory allocated by :meth:`allocate_shared`. It may be
                overwritten.
            shard: [numel / ranks], receives the sum.
            accumulate: add the sum to ``shard`` instead of writing it.

        Returns:
            Handle whose ``wait`` makes the current stream wait for the end.
        """

    @abstractmethod
    def synchronize_ranks(self) -> None:
        """Make the current streams of all ranks wait for each other, if ranks read each other's
        memory.
        """

    def start_all_reduce(self, shard: torch.Tensor) -> Any:
        """Start to sum a shard of gradients over all groups, each of which has a replica.

        Returns:
            Handle whose ``wait`` makes the current stream wait for the end; None with one group.
        """
        if self.replica_group is None:
            return None
        return dist.all_reduce(shard, group=self.replica_group, async_op=True)

    def local_part(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor."""
        numel = unsharded.numel() // self.ranks
        return unsharded[self.rank * numel : (self.rank + 1) * numel]


class BackendCollectives(ShardCollectives):
    """All-gather and reduce-scatter of the communication backend."""

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=current_device().torch_device)

    def start_all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(unsharded, shard, group=self.group, async_op=True)

    def start_reduce_scatter(
        self, unsharded: torch.Tensor, shard: torch.Tensor, *, accumulate: bool
    ) -> Any:
        part = self.local_part(unsharded)
        handle = dist.reduce_scatter_tensor(part, unsharded, group=self.group, async_op=True)
        return _ReduceScatterHandle(handle, part, shard, accumulate)

    def synchronize_ranks(self) -> None:
        pass


class _ReduceScatterHandle:
    """Handle that writes or adds a reduced part to a shard when it is waited for."""

    def __init__(
        self, handle: Any, part: torch.Tensor, shard: torch.Tensor, accumulate: bool
    ) -> None:
        self._handle, self._part, self._shard = handle, part, shard
        self._accumulate = accumulate

    def wait(self) -> None:
        self._handle.wait()
        if self._accumulate:
            self._shard.add_(self._part)
        else:
            self._shard.copy_(self._part)


class PeerMemoryCollectives(ShardCollectives):
    """Copies from the memory of the other ranks, over torch's symmetric memory.

    Copies run on two streams besides the current one. A rank signals that its gradients are ready,
    and that it has read those of the others. Weights change only between steps, so that
    :meth:`synchronize_ranks` before and after the optimizer's step is enough for them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        timeout: timedelta,
    ) -> None:
        """Create the streams and make sure that each rank can read the memory of the others.

        Args:
            group: the ranks. All of them call it.
            replica_group: see the base class.
            device: device of this rank.
            timeout: time after which a rank fails that waits for another one on the device.

        Raises:
            JobError: a rank has no memory left, or the devices are not connected.
        """
        super().__init__(group, replica_group)
        self._device = device
        self._timeout = timeout
        self._module = torch.get_device_module(device)
        self._gather_stream = self._module.Stream(device)
        self._reduce_stream = self._module.Stream(device)
        self._handles: dict[int, Any] = {}
        self._received: torch.Tensor | None = None
        self._barrier_handle = self._handles[self.allocate_shared(1, torch.uint8).data_ptr()]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Imported here because it takes half a second.
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        tensor: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=self._device)
        return tensor

    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        with self._limit_rendezvous():
            return symmetric.rendezvous(tensor, get_group_name(self.group))

    @contextmanager
    def _limit_rendezvous(self) -> Iterator[None]:
        """Return a context manager in which waiting for another rank takes half the timeout.

        If a rank fails, the others thus report it before the collective that reports it times out.
        """
        store: Any = dist.distributed_c10d._get_process_group_store(self.group)
        previous_timeout = store.timeout
        store.set_timeout(self._timeout / 2)
        try:
            yield
        finally:
            store.set_timeout(previous_timeout)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A rendezvous waits for all ranks, so that none may begin it if another one has failed.
        tensor = run_on_group(
            self.group,
            lambda: self._allocate(numel, dtype),
            f"allocate {numel * dtype.itemsize:,} bytes that other ranks can read",
        )
        self._handles[tensor.data_ptr()] = run_on_group(
            self.group, lambda: self._rendezvous(tensor), "read the memory of the other ranks"
        )
        count_shared_memory(tensor)
        return tensor

    def _barrier(self, handle: Any, channel: int) -> None:
        timeout_ms = int(self._timeout.total_seconds() * 1000)
        handle.barrier(channel=channel, timeout_ms=timeout_ms)

    def _peers(self) -> list[int]:
        """Return the other ranks, so that ranks read from different ones at the same time."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def start_all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> Any:
        numel, handle = shard.numel(), self._handles.get(unsharded.data_ptr())
        is_in_place = handle is not None  # weights that are not sharded between the passes
        if handle is None:
            handle = self._handles[shard.data_ptr()]
        self._gather_stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._gather_stream), torch.no_grad():
            if not is_in_place:
                self.local_part(unsharded).copy_(shard, non_blocking=True)
            for peer in self._peers():
                part = unsharded[peer * numel : (peer + 1) * numel]
                offset = peer * numel if is_in_place else 0
                part.copy_(
                    handle.get_buffer(peer, shard.shape, shard.dtype, offset), non_blocking=True
                )
            return _EventHandle(self._module, self._gather_stream.record_event())

    def start_reduce_scatter(
        self, unsharded: torch.Tensor, shard: torch.Tensor, *, accumulate: bool
    ) -> Any:
        handle = self._handles[unsharded.data_ptr()]
        numel, offset = shard.numel(), self.rank * shard.numel()
        self._reduce_stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._reduce_stream), torch.no_grad():
            self._barrier(handle, _READY_CHANNEL)
            local_part = self.local_part(unsharded)
            buffer = self._get_receive_buffer(min(numel, _PIECE_ELEMENTS), unsharded.dtype)
            for begin in range(0, numel, _PIECE_ELEMENTS):
                piece = shard[begin : begin + _PIECE_ELEMENTS]
                local_piece = local_part[begin : begin + _PIECE_ELEMENTS]
                received = buffer[: piece.numel()]
                for index, peer in enumerate(self._peers()):
                    received.copy_(
                        handle.get_buffer(peer, piece.shape, unsharded.dtype, offset + begin),
                        non_blocking=True,
                    )
                    if index > 0:
                        piece.add_(received)
                    elif accumulate:
                        _add_sum(piece, local_piece, received)
                    else:
                        torch.add(local_piece, received, out=piece)
            self._barrier(handle, _DONE_CHANNEL)
            return _EventHandle(self._module, self._reduce_stream.record_event())

    def _get_receive_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for ``numel`` elements of another rank, used on the reduce stream only."""
        if (
            self._received is None
            or self._received.numel() < numel
            or self._received.dtype != dtype
        ):
            self._received = torch.empty(numel, dtype=dtype, device=self._device)
        return self._received

    def synchronize_ranks(self) -> None:
        self._barrier(self._barrier_handle, _READY_CHANNEL)


class _EventHandle:
    """Handle that makes the current stream wait for an event."""

    def __init__(self, module: Any, event: Any) -> None:
        self._module, self._event = module, event

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)


def run_on_group(group: dist.ProcessGroup, function: Callable[[], T], task: str) -> T:
    """Run a function on all ranks of a group and return its result. Collective.

    Without the exchange of errors, ranks would wait in the next collective for one that failed.

    Args:
        group: the ranks.
        function: raises RuntimeError if it fails.
        task: continues the sentence "rank 3 could not".

    Raises:
        RuntimeError: the function failed on this rank.
        JobError: it failed on another rank.
    """
    failure: RuntimeError | None = None
    result: Any = None
    try:
        result = function()
    except RuntimeError as error:
        failure = error
    failures: list[str | None] = [None] * group.size()
    dist.all_gather_object(failures, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            failed_rank = dist.get_global_rank(group, rank)
            reason = next(iter(text.strip().splitlines()), "no reason given")
            raise JobError(f"rank {failed_rank} could not {task}: {reason}")
    return result  # type: ignore[no-any-return]


def create_collectives(
    group: dist.ProcessGroup, replica_group: dist.ProcessGroup | None, *, timeout: timedelta
) -> ShardCollectives:
    """Return the collectives for a process group. All ranks of the group call it.

    Ranks read each other's memory if all of them are on one host whose devices support it.

    Args:
        group: the ranks that share weights.
        replica_group: the ranks with the same shard in all groups; None with one group.
        timeout: timeout of operations between ranks.
    """
    device = current_device()
    if group.size() == 1:
        return BackendCollectives(group, replica_group)
    locations: list[Any] = [None] * group.size()
    location = (socket.gethostname(), device.symmetric_memory)
    dist.all_gather_object(locations, location, group=group)
    if len(set(locations)) > 1 or not device.symmetric_memory:
        return BackendCollectives(group, replica_group)
    try:
        return PeerMemoryCollectives(group, replica_group, device.torch_device, timeout=timeout)
    except (RuntimeError, JobError) as error:  # on all ranks, such as of devices without links
        if group.rank() == 0:
            warnings.warn(
                f"weights and gradients are sharded by {dist.get_backend(group)}'s collectives, "
                f"not over peer memory: {error}",
                stacklevel=2,
            )
        return BackendCollectives(group, replica_group)
