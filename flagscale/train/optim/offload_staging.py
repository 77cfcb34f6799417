"""Staging buffers and streams for the update of offloaded optimizer states.

Parameters are cut into pieces. Copies in both directions and updates overlap, and pieces use
``STAGED_PIECES`` buffers in turn: 192 MiB on the device for fp32 states, and 96 MiB of pinned host
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

PIECE_WEIGHTS = 1 << 22
"""Weights of a piece: 16 MiB of an fp32 tensor, which PCIe copies in less than a millisecond."""
STAGED_PIECES = 4
"""Number of buffers, which is that of the pieces being copied or updated at a time."""


class Piece(NamedTuple):
    """A slice of a flat parameter."""

    parameter: Any
    part: slice

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(self.part.stop - self.part.start)


def cut_in_pieces(parameters: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Yield all pieces of flat parameters."""
    for parameter in parameters:
        size = parameter.numel()
        for begin in range(0, size, PIECE_WEIGHTS):
            yield Piece(parameter, slice(begin, min(begin + PIECE_WEIGHTS, size)))


class HostUpdateStaging:
    """Buffers for gradients and weights of states that the host's cores update.

    On a host without a device the copies are plain ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._gradients: dict[torch.dtype, torch.Tensor] = {}
        self._weights: dict[torch.dtype, torch.Tensor] = {}
        if not self._is_host:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_host, self._to_device = module.Stream(device), module.Stream(device)
            self._gradient_events = [module.Event() for _ in range(STAGED_PIECES)]
            self._weight_events = [module.Event() for _ in range(STAGED_PIECES)]

    def begin(self) -> None:
        """Order all copies after the work that is queued on the current stream."""
        if not self._is_host:
            current = self._module.current_stream()
            self._to_host.wait_stream(current)
            self._to_device.wait_stream(current)

    def finish(self) -> None:
        """Make the current stream wait for all copies, without waiting on the host."""
        if not self._is_host:
            current = self._module.current_stream()
            current.wait_stream(self._to_host)
            current.wait_stream(self._to_device)

    def start_gradient(self, index: int, piece: Piece) -> None:
        """Start to copy the gradient of piece ``index`` to the host."""
        gradient = piece.parameter.decoupled_grad[piece.part]
        staged = self._buffer(self._gradients, index, gradient)
        if self._is_host:
            staged.copy_(gradient)
            return
        with self._module.stream(self._to_host):
            staged.copy_(gradient, non_blocking=True)
            self._gradient_events[index % STAGED_PIECES].record()

    def wait_for_gradient(self, index: int, piece: Piece) -> torch.Tensor:
        """Return the gradient of piece ``index`` in host memory."""
        if not self._is_host:
            self._gradient_events[index % STAGED_PIECES].synchronize()
        return self._buffer(self._gradients, index, piece.parameter.decoupled_grad[piece.part])

    def acquire_weights(self, index: int, piece: Piece) -> torch.Tensor:
        """Return host memory for the new weights of piece ``index``, once the piece before that
        used it has been copied to the device. On a host without a device these are the weights.
        """
        weights: torch.Tensor = piece.parameter.detach()[piece.part]
        if self._is_host:
            return weights
        self._weight_events[index % STAGED_PIECES].synchronize()
        return self._buffer(self._weights, index, weights)

    def start_weights(self, index: int, piece: Piece) -> None:
        """Start to copy the new weights of piece ``index`` to the device."""
        if self._is_host:
            return
        weights = piece.parameter.detach()[piece.part]
        with self._module.stream(self._to_device):
            weights.copy_(self._buffer(self._weights, index, weights), non_blocking=True)
            self._weight_events[index % STAGED_PIECES].record()

    def _buffer(
        self, buffers: dict[torch.dtype, torch.Tensor], index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the buffer of piece ``index`` with the size and dtype of a tensor."""
        if like.dtype not in buffers:
            buffers[like.dtype] = torch.empty(
                (STAGED_PIECES, PIECE_WEIGHTS), dtype=like.dtype, pin_memory=not self._is_host
            )
        buffer: torch.Tensor = buffers[like.dtype][index % STAGED_PIECES, : like.numel()]
        return buffer


class DeviceUpdatePipeline:
    """Updates on the device of states in host memory.

    The states of a piece are copied to the device, updated there and copied back, on three streams.
    The host only queues this, so that its cores can update other states meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_host = device, device.type == "cpu"
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._pieces = 0
        if not self._is_host:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_device = module.Stream(device)
            self._updates = module.Stream(device)
            self._to_host = module.Stream(device)
            self._copied_events = [module.Event() for _ in range(STAGED_PIECES)]
            self._updated_events = [module.Event() for _ in range(STAGED_PIECES)]
            self._returned_events = [module.Event() for _ in range(STAGED_PIECES)]

    def begin(self) -> None:
        """Order all updates after the work that is queued on the current stream: gradients."""
        if not self._is_host:
            self._updates.wait_stream(self._module.current_stream())

    def update(
        self, states: Sequence[torch.Tensor], update: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """Queue the update of the states of a piece.

        Args:
            states: flat tensors in pinned host memory, of at most ``PIECE_WEIGHTS`` elements.
            update: called with copies of them on the device, which it updates in place.
        """
        slot = self._pieces % STAGED_PIECES
        self._pieces += 1
        copies = [self._buffer(slot, index, state) for index, state in enumerate(states)]
        if self._is_host:
            _copy_all(copies, states)
            update(copies)
            _copy_all(states, copies)
            return
        with self._module.stream(self._to_device):
            self._returned_events[slot].wait()
            _copy_all(copies, states)
            self._copied_events[slot].record()
        with self._module.stream(self._updates):
            self._copied_events[slot].wait()
            update(copies)
            self._updated_events[slot].record()
        with self._module.stream(self._to_host):
            self._updated_events[slot].wait()
            _copy_all(states, copies)
            self._returned_events[slot].record()

    def finish(self) -> None:
        """Wait on the host until all states are back in its memory."""
        if not self._is_host:
            self._to_host.synchronize()
            self._module.current_stream().wait_stream(self._updates)

    def _buffer(self, slot: int, index: int, state: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for tensor ``index`` of the states of a piece."""
        key = (slot, index, state.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(PIECE_WEIGHTS, dtype=state.dtype, device=self._device)
            if not self._is_host:
                # Queued work may still read memory that was freed for this buffer.
                self._to_device.wait_stream(self._module.current_stream())
        return self._buffers[key][: state.numel()]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
