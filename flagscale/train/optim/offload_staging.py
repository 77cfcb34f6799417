"""Staging buffers and streams for the update of offloaded optimizer states.

Parameters are cut into pieces. Copies in both directions and updates of different pieces overlap.
Of the pieces that the device updates, and of those that the host updates, ``PIECES_IN_FLIGHT`` are
in flight, each with its own buffers. With fp32 states and a model in bf16 these are

- for the device, three states of 4 bytes per weight in its memory: 192 MiB;
- for the host, a gradient of 4 bytes and a weight of 2 bytes per weight in pinned memory: 96 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

WEIGHTS_PER_PIECE = 1 << 22
"""Most weights in a piece: 16 MiB of an fp32 tensor, which PCIe copies in less than a millisecond.
Pieces begin at multiples of it, a power of two and a multiple of the blocks of lean states.
"""
PIECES_IN_FLIGHT = 4
"""Number of pieces that are copied or updated at the same time."""


class Piece(NamedTuple):
    """A slice of a flat parameter, whose gradient is in its attribute ``decoupled_grad``."""

    parameter: Any
    part: slice

    @property
    def weights(self) -> torch.Tensor:
        """The model's weights, which are updated in place."""
        weights: torch.Tensor = self.parameter.detach()[self.part]
        return weights

    @property
    def gradient(self) -> torch.Tensor:
        gradient: torch.Tensor = self.parameter.decoupled_grad[self.part]
        return gradient


def cut_in_pieces(parameters: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Yield all pieces of flat parameters."""
    for parameter in parameters:
        size = parameter.numel()
        for begin in range(0, size, WEIGHTS_PER_PIECE):
            yield Piece(parameter, slice(begin, min(begin + WEIGHTS_PER_PIECE, size)))


class HostUpdateStaging:
    """Buffers in host memory for pieces that the host's cores update: one for the gradient, which
    is copied from the device, and one for the model's weights, which are copied to it, and before
    from it if the update reads them.

    Pieces are numbered from 0 after each :meth:`begin`. Piece ``index`` has the buffers that piece
    ``index - PIECES_IN_FLIGHT`` had. The weights of a model on the CPU are updated where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cpu_model = device.type == "cpu"
        self._gradients: dict[torch.dtype, torch.Tensor] = {}
        self._weights: dict[torch.dtype, torch.Tensor] = {}
        if not self._is_cpu_model:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_host_stream = module.Stream(device)
            self._to_device_stream = module.Stream(device)
            # Waiting for an event that has never been recorded returns at once.
            self._on_host_events = [module.Event() for _ in range(PIECES_IN_FLIGHT)]
            self._weight_events = [module.Event() for _ in range(PIECES_IN_FLIGHT)]

    def begin(self) -> None:
        """Order all copies after the work that is queued on the current stream."""
        if not self._is_cpu_model:
            current = self._module.current_stream()
            self._to_host_stream.wait_stream(current)
            self._to_device_stream.wait_stream(current)

    def make_current_stream_wait(self) -> None:
        """Make the current stream wait for all copies. The host itself does not wait."""
        if not self._is_cpu_model:
            current = self._module.current_stream()
            current.wait_stream(self._to_host_stream)
            current.wait_stream(self._to_device_stream)

    def start_copy_to_host(self, index: int, piece: Piece, *, with_weights: bool) -> None:
        """Start to copy the gradient of piece ``index`` to the host, and its weights if asked for.

        The caller must have updated piece ``index - PIECES_IN_FLIGHT`` and have started to copy its
        weights to the device: the copies overwrite its buffers.
        """
        gradient = piece.gradient
        buffer = self._get_buffer(self._gradients, index, gradient)
        if self._is_cpu_model:
            buffer.copy_(gradient)
            return
        slot, weights = index % PIECES_IN_FLIGHT, piece.weights
        with self._module.stream(self._to_host_stream):
            buffer.copy_(gradient, non_blocking=True)
            if with_weights:
                self._weight_events[slot].wait()
                self._get_buffer(self._weights, index, weights).copy_(weights, non_blocking=True)
            self._on_host_events[slot].record()

    def wait_for_gradient(self, index: int, piece: Piece) -> torch.Tensor:
        """Wait for the copies of piece ``index`` to the host, and return its gradient."""
        if not self._is_cpu_model:
            self._on_host_events[index % PIECES_IN_FLIGHT].synchronize()
        return self._get_buffer(self._gradients, index, piece.gradient)

    def acquire_weights(self, index: int, piece: Piece) -> torch.Tensor:
        """Return the host memory to which the new weights of piece ``index`` must be written.

        It is a buffer, once its last piece has been copied to the device. It holds the present
        weights if they have been copied to the host; otherwise its values are undefined. For a
        model on the CPU it is the model's own memory.
        """
        if self._is_cpu_model:
            return piece.weights
        self._weight_events[index % PIECES_IN_FLIGHT].synchronize()
        return self._get_buffer(self._weights, index, piece.weights)

    def start_weight_copy(self, index: int, piece: Piece) -> None:
        """Start to copy the new weights of piece ``index`` to the device."""
        if self._is_cpu_model:
            return
        weights = piece.weights
        with self._module.stream(self._to_device_stream):
            weights.copy_(self._get_buffer(self._weights, index, weights), non_blocking=True)
            self._weight_events[index % PIECES_IN_FLIGHT].record()

    def _get_buffer(
        self, buffers: dict[torch.dtype, torch.Tensor], index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the buffer of piece ``index`` with the size and dtype of a tensor."""
        if like.dtype not in buffers:
            buffers[like.dtype] = torch.empty(
                (PIECES_IN_FLIGHT, WEIGHTS_PER_PIECE),
                dtype=like.dtype,
                pin_memory=not self._is_cpu_model,
            )
        buffer: torch.Tensor = buffers[like.dtype][index % PIECES_IN_FLIGHT, : like.numel()]
        return buffer


class DeviceUpdatePipeline:
    """Pipeline in which the device updates states that are in host memory.

    The states of a piece are copied to the device, updated there, and copied back. Each of the
    three has a stream. The host only queues the work, so that its cores can update other states
    meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cpu_model = device, device.type == "cpu"
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._queued_pieces = 0
        """Number of pieces since the start of training, by which they take the buffers in turn."""
        if not self._is_cpu_model:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_device_stream = module.Stream(device)
            self._update_stream = module.Stream(device)
            self._to_host_stream = module.Stream(device)
            # Waiting for an event that has never been recorded does nothing.
            self._on_device_events = [module.Event() for _ in range(PIECES_IN_FLIGHT)]
            self._updated_events = [module.Event() for _ in range(PIECES_IN_FLIGHT)]
            self._on_host_events = [module.Event() for _ in range(PIECES_IN_FLIGHT)]

    def begin(self) -> None:
        """Order all updates after the work that is queued on the current stream, which computes the
        gradients.
        """
        if not self._is_cpu_model:
            self._update_stream.wait_stream(self._module.current_stream())

    def queue_update(
        self,
        states: Sequence[torch.Tensor],
        update_in_place: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """Queue the update of the states of a piece.

        Args:
            states: flat tensors in pinned host memory, of at most ``WEIGHTS_PER_PIECE`` elements.
            update_in_place: called at once with tensors on the device, to queue their update. The
                values of ``states`` are in them by the time that the update runs.
        """
        slot = self._queued_pieces % PIECES_IN_FLIGHT
        self._queued_pieces += 1
        copies = [self._get_buffer(slot, index, state) for index, state in enumerate(states)]
        if self._is_cpu_model:  # as tests do; the host's cores update their states in place
            _copy_all(copies, states)
            update_in_place(copies)
            _copy_all(states, copies)
            return
        with self._module.stream(self._to_device_stream):
            self._on_host_events[slot].wait()
            _copy_all(copies, states)
            self._on_device_events[slot].record()
        with self._module.stream(self._update_stream):
            self._on_device_events[slot].wait()
            update_in_place(copies)
            self._updated_events[slot].record()
        with self._module.stream(self._to_host_stream):
            self._updated_events[slot].wait()
            _copy_all(states, copies)
            self._on_host_events[slot].record()

    def synchronize(self) -> None:
        """Wait on the host until all states are back in its memory, where it may read them. The
        current stream waits for the updates of the model's weights.
        """
        if not self._is_cpu_model:
            self._to_host_stream.synchronize()
            self._module.current_stream().wait_stream(self._update_stream)

    def _get_buffer(self, slot: int, index: int, state: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for tensor ``index`` of the states of a piece."""
        key = (slot, index, state.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(
                WEIGHTS_PER_PIECE, dtype=state.dtype, device=self._device
            )
            if not self._is_cpu_model:
                # torch may have freed this memory on the host while work that is queued on the
                # current stream still reads it. The first copy must wait for that work.
                self._to_device_stream.wait_stream(self._module.current_stream())
        return self._buffers[key][: state.numel()]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
