"""GEMMs on parts of the sequence, pipelined with copies over torch's symmetric memory.

Each rank of a group has a workspace that its peers can read. GEMMs run on the current stream.
Peers' parts are fetched on a second stream by copy engines, which use no multiprocessors. A peer
sends a signal when a part is ready. A barrier ensures that all peers have finished reading the
workspace of the previous operation.

With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) an operation starts only when all
earlier ones can start. Therefore a copy is launched just before the GEMM that overlaps it, with
nothing in between that waits for the copy.

:mod:`.tp_comm_overlap` registers these functions as torch operators and documents their arguments.

The decomposition follows Wang et al., "Overlap communication with dependent computation via
decomposition in large deep learning models", ASPLOS 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from flagscale.train.layers.wgrad_accumulation import add_product, flatten_tokens

_BARRIER_CHANNEL, _INPUT_CHANNEL, _SUMMAND_CHANNEL = 0, 1, 2
"""Signal channels: of the barrier, of parts of the input, of summands of the output."""
_ALIGNMENT_BYTES = 256
"""Alignment of the parts of a workspace."""
_Result = TypeVar("_Result")
MIN_WORKSPACE_BYTES = 1 << 20
"""Minimum size of a workspace in bytes."""
_WORKSPACES: dict[str, tuple[torch.Tensor, Any]] = {}
"""Workspace of each group by name, with torch's handle."""


def get_workspace(group: str, min_bytes: int, device: torch.device) -> Any:
    """Return torch's handle of the workspace of a group, with at least ``min_bytes``.

    All ranks of the group call it with the same size; they replace a smaller workspace together.

    Raises:
        RuntimeError: the devices cannot read each other's memory (raised by torch).
    """
    buffer, handle = _WORKSPACES.get(group, (None, None))
    if buffer is None or buffer.numel() < min_bytes:
        # Imported here because it takes half a second.
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        # After this, no rank reads the old workspace any more.
        torch.get_device_module(device).synchronize()
        new_buffer = symmetric.empty(
            max(min_bytes, MIN_WORKSPACE_BYTES), dtype=torch.uint8, device=device
        )
        handle = symmetric.rendezvous(new_buffer, group)
        _WORKSPACES[group] = (new_buffer, handle)
    return handle


@functools.cache
def _get_copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


class _WorkspaceExchange:
    """Exchange of parts between the ranks of a group by one operation, over their workspaces."""

    def __init__(self, group: str, device: torch.device, *part_bytes: int) -> None:
        """Acquire the workspace; ``part_bytes`` are the sizes of its parts."""
        aligned_part_bytes = [
            -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in part_bytes
        ]
        self.handle = get_workspace(group, sum(aligned_part_bytes), device)
        self._offsets = [
            sum(aligned_part_bytes[:index]) for index in range(len(aligned_part_bytes))
        ]
        self._module = torch.get_device_module(device)
        self._copy_stream = _get_copy_stream(device)
        self.rank, self.size = int(self.handle.rank), int(self.handle.world_size)
        self.handle.barrier(channel=_BARRIER_CHANNEL)
        self._copy_stream.wait_stream(self._module.current_stream())

    def buffer(self, rank: int, part: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """Return a part of the workspace of ``rank`` as a tensor."""
        offset = self._offsets[part] // dtype.itemsize
        return self.handle.get_buffer(rank, shape, dtype, offset)

    def peers(self) -> Iterator[int]:
        """Return the other ranks, starting with the next one.

        Ranks thus fetch from different peers at the same time.
        """
        return ((self.rank + step) % self.size for step in range(1, self.size))

    def signal(self, rank: int, channel: int) -> None:
        """Signal to ``rank``, in stream order, that its part is ready."""
        self.handle.put_signal(rank, channel=channel)

    def publish(self, rows: torch.Tensor) -> None:
        """Copy ``rows`` to the first part of this rank's workspace and signal all peers."""
        self.buffer(self.rank, 0, rows.shape, rows.dtype).copy_(rows)
        for rank in self.peers():
            self.signal(rank, _INPUT_CHANNEL)

    def fetch(self, rank: int, channel: int, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy from a peer on the copy stream after its signal; return the completion event."""
        with self._module.stream(self._copy_stream):
            self.handle.wait_signal(rank, channel=channel)
        return self.copy(target, source)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy on the copy stream; return the completion event."""
        with self._module.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            return self._copy_stream.record_event()

    def join_streams(self) -> None:
        """Make the current stream wait for the copy stream."""
        self._module.current_stream().wait_stream(self._copy_stream)

    def wait(self, event: Any) -> None:
        """Make the current stream wait for ``event``."""
        self._module.current_stream().wait_event(event)


def gathered_product(
    part: torch.Tensor, factor: torch.Tensor, group_size: int, group: str, return_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :meth:`~.tp_comm_overlap._SequentialOperators.gathered_product` with overlap."""
    rows = flatten_tokens(part)
    gathered = rows.new_empty(group_size, *rows.shape)
    output = rows.new_empty(group_size, len(rows), factor.shape[1])
    exchange = _WorkspaceExchange(group, part.device, _count_bytes(rows))
    own_rank, dtype = exchange.rank, rows.dtype
    exchange.publish(rows)
    source, source_rank = rows, own_rank
    for rank in exchange.peers():
        peer_rows = exchange.buffer(rank, 0, rows.shape, dtype)
        fetch_event = exchange.fetch(rank, _INPUT_CHANNEL, gathered[rank], peer_rows)
        torch.mm(source, factor, out=output[source_rank])
        exchange.wait(fetch_event)
        source, source_rank = gathered[rank], rank
    if return_gathered:
        exchange.copy(gathered[own_rank], rows)
    torch.mm(source, factor, out=output[source_rank])
    exchange.join_streams()
    inner = part.shape[1:-1]
    return (
        gathered.view(-1, *inner, gathered.shape[-1]) if return_gathered else gathered.new_empty(0),
        output.view(-1, *inner, output.shape[-1]),
    )


def scattered_product(
    input_: torch.Tensor, factor: torch.Tensor, group_size: int, group: str
) -> torch.Tensor:
    """Run :meth:`~.tp_comm_overlap._SequentialOperators.scattered_product` with overlap."""
    parts = flatten_tokens(input_).view(group_size, -1, input_.shape[-1])
    summands = parts.new_empty(group_size, parts.shape[1], factor.shape[1])
    exchange = _WorkspaceExchange(group, input_.device, _count_bytes(summands))
    own_rank, shape, dtype = exchange.rank, summands.shape, summands.dtype
    own_summands = exchange.buffer(own_rank, 0, shape, dtype)
    for step, rank in enumerate(exchange.peers(), 1):
        torch.mm(parts[rank], factor, out=own_summands[rank])
        exchange.signal(rank, _SUMMAND_CHANNEL)
        source = (own_rank - step) % group_size
        peer_summands = exchange.buffer(source, 0, shape, dtype)[own_rank]
        exchange.fetch(source, _SUMMAND_CHANNEL, summands[source], peer_summands)
    torch.mm(parts[own_rank], factor, out=summands[own_rank])
    exchange.join_streams()
    return _view_by_rank(summands, input_)


def shared_gradients(
    gradient: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, group_size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :meth:`~.tp_comm_overlap._SequentialOperators.shared_gradients` with overlap."""
    return _overlap_gradients(
        gradient,
        weight,
        part,
        group_size,
        group,
        lambda gathered: flatten_tokens(gradient).t() @ gathered,
    )


def add_shared_gradients(
    accumulator: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    group_size: int,
    group: str,
) -> torch.Tensor:
    """Run :meth:`~.tp_comm_overlap._SequentialOperators.add_shared_gradients` with overlap."""

    def accumulate(gathered: torch.Tensor) -> None:
        add_product(accumulator, gradient, gathered)

    return _overlap_gradients(gradient, weight, part, group_size, group, accumulate)[0]


def _overlap_gradients(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    group_size: int,
    group: str,
    use_input: Callable[[torch.Tensor], _Result],
) -> tuple[torch.Tensor, _Result]:
    """Return the summands of the input's gradient, and the result of ``use_input``.

    ``use_input`` is called with the gathered input, while the summands are exchanged.
    """
    rows, gradient_rows = flatten_tokens(part), flatten_tokens(gradient)
    gathered = rows.new_empty(group_size, *rows.shape)
    summands = gradient_rows.new_empty(group_size, len(rows), weight.shape[1])
    exchange = _WorkspaceExchange(group, part.device, _count_bytes(rows), _count_bytes(summands))
    own_rank, shape, dtype = exchange.rank, summands.shape, rows.dtype
    own_summands = exchange.buffer(own_rank, 1, shape, dtype)
    exchange.publish(rows)
    for index, rank in enumerate(exchange.peers()):
        peer_buffer = exchange.buffer(rank, 0, rows.shape, dtype)
        exchange.fetch(rank, _INPUT_CHANNEL, gathered[rank], peer_buffer)
        if index == 0:
            torch.mm(gradient_rows, weight, out=own_summands.view(-1, shape[-1]))
    copy_event = exchange.copy(gathered[own_rank], rows)
    for rank in exchange.peers():
        exchange.signal(rank, _SUMMAND_CHANNEL)
    exchange.wait(copy_event)
    for index, rank in enumerate(exchange.peers()):
        peer_buffer = exchange.buffer(rank, 1, shape, dtype)[own_rank]
        exchange.fetch(rank, _SUMMAND_CHANNEL, summands[rank], peer_buffer)
        if index == 0:
            result = use_input(flatten_tokens(gathered))
    exchange.copy(summands[own_rank], own_summands[own_rank])
    exchange.join_streams()
    return _view_by_rank(summands, gradient), result


def _view_by_rank(summands: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``summands`` as [ranks, s/tp, ..., out]; ``whole`` is [s, ..., in]."""
    return summands.view(len(summands), -1, *whole.shape[1:-1], summands.shape[-1])


def _count_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
