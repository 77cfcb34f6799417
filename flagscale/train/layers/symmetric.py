"""Products of parts of the sequence, pipelined with the exchange over torch's symmetric memory.

Each rank of a group has a workspace that its peers read. Products run on the current stream; peers'
parts are fetched on a second one, by copy engines, which take no multiprocessor from the products.
A peer says by a signal that a part is there; that everyone has read the workspace of the operation
before, a barrier says.

With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) nothing starts before what was launched
earlier could start. So a copy is launched just before the product that is to hide it, and nothing
that has to wait for the copy comes in between.

The decomposition is that of Wang et al., "Overlap communication with dependent computation via
decomposition in large deep learning models", ASPLOS 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from flagscale.train.layers.accumulating import add_product, flat

_BEFORE, _PARTS, _SUMS = 0, 1, 2
"""Channels of the signals."""
_ALIGNMENT = 256
_Made = TypeVar("_Made")
LEAST = 1 << 20
"""Bytes that a workspace has at least."""
_WORKSPACES: dict[str, tuple[torch.Tensor, Any]] = {}
"""The workspace of each group, by its name, with torch's handle of it."""


def workspace(group: str, size: int, device: torch.device) -> Any:
    """torch's handle of a group's workspace of ``size`` bytes or more. Ranks come here together:
    they all make a larger one when one does.

    Raises:
        RuntimeError: torch's, of devices that do not read each other's memory.
    """
    kept, handle = _WORKSPACES.get(group, (None, None))
    if kept is None or kept.numel() < size:
        # Loaded where it is used: it takes half a second.
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        # The old one is read no more once all ranks have come here.
        torch.get_device_module(device).synchronize()
        new = symmetric.empty(max(size, LEAST), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(new, group)
        _WORKSPACES[group] = (new, handle)
    return handle


@functools.cache
def _second_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


class _Exchange:
    """One operation's use of the workspace, in two streams."""

    def __init__(self, group: str, device: torch.device, *sizes: int) -> None:
        """``sizes``: bytes of each of the workspace's parts."""
        places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.handle = workspace(group, sum(places), device)
        self._begins = [sum(places[:index]) for index in range(len(places))]
        self._module = torch.get_device_module(device)
        self._beside = _second_stream(device)
        self.rank, self.size = int(self.handle.rank), int(self.handle.world_size)
        self.handle.barrier(channel=_BEFORE)
        self._beside.wait_stream(self._module.current_stream())

    def buffer(self, rank: int, part: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A part of the workspace of ``rank``, as a tensor."""
        begin = self._begins[part] // dtype.itemsize
        return self.handle.get_buffer(rank, shape, dtype, begin)

    def others(self) -> Iterator[int]:
        """The other ranks, each rank's next one first, so that not all fetch from one."""
        return ((self.rank + step) % self.size for step in range(1, self.size))

    def tell(self, rank: int, channel: int) -> None:
        """Say to ``rank``, when products have come here, that its part is there."""
        self.handle.put_signal(rank, channel=channel)

    def offer(self, rows: torch.Tensor) -> None:
        """Lay this rank's rows into the first part of its workspace, and tell the others."""
        self.buffer(self.rank, 0, rows.shape, rows.dtype).copy_(rows)
        for rank in self.others():
            self.tell(rank, _PARTS)

    def fetch(self, rank: int, channel: int, into: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy, beside the products, what ``rank`` says is there; returns the event of its end."""
        with self._module.stream(self._beside):
            self.handle.wait_signal(rank, channel=channel)
        return self.copy(into, source)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy beside the products; returns the event of its end."""
        with self._module.stream(self._beside):
            into.copy_(source, non_blocking=True)
            return self._beside.record_event()

    def join(self) -> None:
        """Have what follows wait for all that was done beside the products."""
        self._module.current_stream().wait_stream(self._beside)

    def wait(self, event: Any) -> None:
        """Have products that follow wait for ``event``."""
        self._module.current_stream().wait_event(event)


def gathered_product(
    part: torch.Tensor, factor: torch.Tensor, size: int, group: str, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`flagscale.train.layers.overlapped._InTurn.gathered_product`."""
    rows = flat(part)
    whole = rows.new_empty(size, *rows.shape)
    product = rows.new_empty(size, len(rows), factor.shape[1])
    exchange = _Exchange(group, part.device, _bytes(rows))
    mine, dtype = exchange.rank, rows.dtype
    exchange.offer(rows)
    source, known = rows, mine
    for rank in exchange.others():
        theirs = exchange.buffer(rank, 0, rows.shape, dtype)
        arrived = exchange.fetch(rank, _PARTS, whole[rank], theirs)
        torch.mm(source, factor, out=product[known])
        exchange.wait(arrived)
        source, known = whole[rank], rank
    if wanted:
        exchange.copy(whole[mine], rows)
    torch.mm(source, factor, out=product[known])
    exchange.join()
    inner = part.shape[1:-1]
    return (
        whole.view(-1, *inner, whole.shape[-1]) if wanted else whole.new_empty(0),
        product.view(-1, *inner, product.shape[-1]),
    )


def scattered_product(
    input_: torch.Tensor, factor: torch.Tensor, size: int, group: str
) -> torch.Tensor:
    """See :func:`flagscale.train.layers.overlapped._InTurn.scattered_product`."""
    parts = flat(input_).view(size, -1, input_.shape[-1])
    summands = parts.new_empty(size, parts.shape[1], factor.shape[1])
    exchange = _Exchange(group, input_.device, _bytes(summands))
    mine, shape, dtype = exchange.rank, summands.shape, summands.dtype
    own = exchange.buffer(mine, 0, shape, dtype)
    for step, rank in enumerate(exchange.others(), 1):
        torch.mm(parts[rank], factor, out=own[rank])
        exchange.tell(rank, _SUMS)
        source = (mine - step) % size
        theirs = exchange.buffer(source, 0, shape, dtype)[mine]
        exchange.fetch(source, _SUMS, summands[source], theirs)
    torch.mm(parts[mine], factor, out=summands[mine])
    exchange.join()
    return _in_parts(summands, input_)


def shared_gradients(
    gradient: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`flagscale.train.layers.overlapped._InTurn.shared_gradients`."""
    return _gradients(gradient, weight, part, size, group, lambda whole: flat(gradient).t() @ whole)


def add_shared_gradients(
    accumulator: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    size: int,
    group: str,
) -> torch.Tensor:
    """See :func:`flagscale.train.layers.overlapped._InTurn.shared_gradients`."""

    def added(whole: torch.Tensor) -> None:
        add_product(accumulator, gradient, whole)

    return _gradients(gradient, weight, part, size, group, added)[0]


def _gradients(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    size: int,
    group: str,
    of_weight: Callable[[torch.Tensor], _Made],
) -> tuple[torch.Tensor, _Made]:
    """The summands of the input's gradient, and what ``of_weight`` makes of the whole input."""
    rows, upstream = flat(part), flat(gradient)
    whole = rows.new_empty(size, *rows.shape)
    summands = upstream.new_empty(size, len(rows), weight.shape[1])
    exchange = _Exchange(group, part.device, _bytes(rows), _bytes(summands))
    mine, shape, dtype = exchange.rank, summands.shape, rows.dtype
    own = exchange.buffer(mine, 1, shape, dtype)
    exchange.offer(rows)
    for index, rank in enumerate(exchange.others()):
        theirs = exchange.buffer(rank, 0, rows.shape, dtype)
        exchange.fetch(rank, _PARTS, whole[rank], theirs)
        if index == 0:
            torch.mm(upstream, weight, out=own.view(-1, shape[-1]))
    complete = exchange.copy(whole[mine], rows)
    for rank in exchange.others():
        exchange.tell(rank, _SUMS)
    exchange.wait(complete)
    for index, rank in enumerate(exchange.others()):
        theirs = exchange.buffer(rank, 1, shape, dtype)[mine]
        exchange.fetch(rank, _SUMS, summands[rank], theirs)
        if index == 0:
            made = of_weight(flat(whole))
    exchange.copy(summands[mine], own[mine])
    exchange.join()
    return _in_parts(summands, gradient), made


def _in_parts(summands: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[ranks, sequence of a rank, ..., out]``."""
    return summands.view(len(summands), -1, *like.shape[1:-1], summands.shape[-1])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
