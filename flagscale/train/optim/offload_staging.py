"""Copies between device and host memory while states that are offloaded are updated.

Copies in both directions and the computation overlap. Pieces of all weights use the same few
buffers in turn, so that these stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_PIECE_WEIGHTS = 1 << 22
"""Weights that are copied and updated at once; their copies take up to a millisecond."""
STAGED_PIECES = 4
"""Number of pieces that are being copied or updated at a time."""


class Piece(NamedTuple):
    """A part of a parameter, which is flat."""

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
        for begin in range(0, size, _PIECE_WEIGHTS):
            yield Piece(parameter, slice(begin, min(begin + _PIECE_WEIGHTS, size)))


class HostStaging:
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
        """Let the copies wait for what the device has to do before."""
        if not self._is_host:
            current = self._module.current_stream()
            self._to_host.wait_stream(current)
            self._to_device.wait_stream(current)

    def finish(self) -> None:
        """Let the device wait for the copies."""
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

    def wait_for_weights(self, index: int, piece: Piece) -> torch.Tensor:
        """Return host memory for the new weights of piece ``index``, when an earlier piece has been
        copied from it.
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
                (STAGED_PIECES, _PIECE_WEIGHTS), dtype=like.dtype, pin_memory=not self._is_host
            )
        buffer: torch.Tensor = buffers[like.dtype][index % STAGED_PIECES, : like.numel()]
        return buffer


class StateStream:
    """Buffers on the device for states in host memory that the device updates.

    The states of a piece are copied to the device, updated there and copied back. Everything is
    ordered by streams of the device, so that the host's cores can update other states meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_host = device, device.type == "cpu"
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._pieces = 0
        if not self._is_host:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_device, self._updates, self._to_host = (
                module.Stream(device) for _ in range(3)
            )
            self._copied_events, self._updated_events, self._returned_events = (
                [module.Event() for _ in range(STAGED_PIECES)] for _ in range(3)
            )

    def begin(self) -> None:
        """Let the updates wait for the gradients."""
        if not self._is_host:
            self._updates.wait_stream(self._module.current_stream())

    def update(
        self, states: Sequence[torch.Tensor], update: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """Start to update the states of a piece.

        Args:
            states: flat tensors in host memory from which the device copies asynchronously.
            update: updates copies of them, which it gets, in place.
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
        """Wait until all states are in host memory, and let the device wait for the updates."""
        if not self._is_host:
            self._module.current_stream().wait_stream(self._updates)
            self._to_host.synchronize()

    def _buffer(self, slot: int, index: int, state: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for tensor ``index`` of the states of a piece."""
        key = (slot, index, state.dtype)
        if key not in self._buffers or self._buffers[key].numel() < state.numel():
            self._buffers[key] = torch.empty(
                max(state.numel(), _PIECE_WEIGHTS), dtype=state.dtype, device=self._device
            )
        return self._buffers[key][: state.numel()]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
