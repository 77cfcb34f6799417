"""Adam with fp32 master weights of its own, in the device's or in the host's memory.

With ``optimizer_cpu_offload`` the master weights and both moments of some weights are in host
memory, 12 bytes a weight, and the host's cores update them (Ren et al., "ZeRO-Offload", 2021).
Gradients are copied to the host and new weights to the device in pieces, so that copies in both
directions and the computation overlap, and the staging buffers stay small.

megatron.core's distributed optimizer treats this class as Transformer Engine's ``FusedAdam`` with
``use_precision_aware_optimizer``: the parameters are this rank's shards of the model's weights,
their gradients are in ``decoupled_grad``, and a step updates the weights in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flagscale.train.optim.adam import FusedAdam

MASTER, FIRST_MOMENT, SECOND_MOMENT = "master_param", "exp_avg", "exp_avg_sq"
"""Names of the tensors of a parameter's state."""
_PIECE_WEIGHTS = 1 << 23
"""Weights that are copied and updated at once. A piece's tensors stay in the host's caches while it
is updated and cast, and its copies take a millisecond.
"""
_STAGED_PIECES = 4
"""Number of pieces whose gradients or weights are being copied at a time."""


class MasterWeightAdam(FusedAdam):
    """Adam, or AdamW with ``adam_w_mode``, of weights of any precision.

    Results equal those of :class:`FusedAdam` on separate fp32 weights.
    """

    def __init__(
        self, params: Iterable[Any], *, offload_fraction: float = 0.0, **options: Any
    ) -> None:
        """Create the optimizer; its state is allocated by :meth:`initialize_states` or the first
        step, when the parameter groups are final.

        Args:
            params: parameter groups, as torch's optimizers take them.
            offload_fraction: fraction of the weights whose state is in host memory, 0 to 1.
            options: learning rate, betas, eps, weight decay and ``adam_w_mode``.
        """
        super().__init__(params, **options)
        self._offload_fraction = offload_fraction
        self._staging: _Staging | None = None

    # -- state -------------------------------------------------------------------------------------

    def initialize_states(self) -> None:
        """Allocate the state of each parameter that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self._initialize_state(parameter)

    def _initialize_state(self, parameter: torch.Tensor) -> None:
        """Allocate the state of a parameter: its weights in fp32, and zero moments."""
        device = "cpu" if id(parameter) in self._offloaded_parameters else parameter.device
        master = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        self.state[parameter] = {
            MASTER: master,
            FIRST_MOMENT: torch.zeros_like(master),
            SECOND_MOMENT: torch.zeros_like(master),
        }
        _copy_in_pieces(master, parameter)

    @property
    def host_bytes(self) -> int:
        """Bytes of the states in host memory, allocated or not."""
        weights = sum(
            parameter.numel()
            for group in self.param_groups
            for parameter in group["params"]
            if id(parameter) in self._offloaded_parameters
        )
        return int(weights * 3 * torch.float32.itemsize)

    def reset_master_weights(self) -> None:
        """Copy the model's weights, which have been loaded, to the master weights."""
        for parameter, state in self.state.items():
            _copy_in_pieces(state[MASTER], parameter)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor of a parameter's state; megatron.core's checkpoints read it."""
        tensor: torch.Tensor = self.state[parameter][name]
        return tensor

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Overwrite a tensor of a parameter's state with that of a checkpoint."""
        if parameter not in self.state:
            self._initialize_state(parameter)
        self.state[parameter][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load parameter groups and states. A state stays on its device and in fp32."""
        for group, loaded_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded_group.items() if key != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, tensors in state_dict["state"].items():
            for name, value in tensors.items():
                if value is not self.state.get(parameters[index], {}).get(name):
                    self.set_scaled_state(parameters[index], name, value)

    @cached_property
    def _offloaded_parameters(self) -> set[int]:
        """Return the ids of the parameters whose state is in host memory.

        They are the first ones, until they have ``offload_fraction`` of the weights.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        remaining = self._offload_fraction * sum(parameter.numel() for parameter in parameters)
        offloaded = set()
        for parameter in parameters:
            if remaining <= 0:
                break
            offloaded.add(id(parameter))
            remaining -= parameter.numel()
        return offloaded

    # -- step --------------------------------------------------------------------------------------

    def _update_group(self, group: dict[str, Any]) -> None:
        host_parameters: list[Any] = []
        device_parameters: list[Any] = []
        for parameter in group["params"]:
            if getattr(parameter, "decoupled_grad", None) is None:
                continue
            if parameter not in self.state:
                self._initialize_state(parameter)
            is_host = self.state[parameter][MASTER].device.type == "cpu"
            (host_parameters if is_host else device_parameters).append(parameter)
        if device_parameters:
            self._update_on_device(group, device_parameters)
        if host_parameters:
            self._update_on_host(group, host_parameters)

    def _update_on_device(self, group: dict[str, Any], parameters: list[Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        masters = [state[MASTER] for state in states]
        self._run_kernel(
            group,
            masters,
            [parameter.decoupled_grad.float() for parameter in parameters],
            [state[FIRST_MOMENT] for state in states],
            [state[SECOND_MOMENT] for state in states],
        )
        torch._foreach_copy_(parameters, masters)

    def _update_on_host(self, group: dict[str, Any], parameters: list[Any]) -> None:
        """Update states in host memory, piece by piece.

        While a piece is updated, the gradients of the next pieces are copied to the host and the
        weights of the previous ones to the device.
        """
        if self._staging is None:
            self._staging = _Staging(parameters[0].device)
        pieces = list(_cut_in_pieces(parameters))
        with _all_host_threads():
            self._update_pieces(group, pieces, self._staging)

    def _update_pieces(
        self, group: dict[str, Any], pieces: Sequence[_Piece], staging: _Staging
    ) -> None:
        staging.begin()
        for index, piece in enumerate(pieces[:_STAGED_PIECES]):
            staging.start_gradient(index, piece)
        for index, piece in enumerate(pieces):
            state, part = self.state[piece.parameter], piece.part
            master = state[MASTER][part]
            gradient = staging.wait_for_gradient(index, piece)
            self._run_kernel(
                group, [master], [gradient], [state[FIRST_MOMENT][part]],
                [state[SECOND_MOMENT][part]],
            )  # fmt: skip
            if index + _STAGED_PIECES < len(pieces):
                staging.start_gradient(index + _STAGED_PIECES, pieces[index + _STAGED_PIECES])
            staging.start_weights(index, piece, master)
        staging.finish()


@contextmanager
def _all_host_threads() -> Iterator[None]:
    """Return a context manager in which torch uses this rank's share of the host's cores.

    Otherwise it uses ``OMP_NUM_THREADS``, which torchrun sets to 1.
    """
    threads = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(threads, len(os.sched_getaffinity(0)) // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Piece(NamedTuple):
    """A part of a parameter, which is flat."""

    parameter: Any
    part: slice

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(self.part.stop - self.part.start)


def _cut_in_pieces(parameters: Iterable[torch.Tensor]) -> Iterator[_Piece]:
    for parameter in parameters:
        size = parameter.numel()
        for begin in range(0, size, _PIECE_WEIGHTS):
            yield _Piece(parameter, slice(begin, min(begin + _PIECE_WEIGHTS, size)))


def _copy_in_pieces(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy weights to fp32 without a second copy of all of them on either side."""
    for piece in _cut_in_pieces([parameter.detach()]):
        master[piece.part].copy_(piece.parameter[piece.part])


class _Staging:
    """Buffers for copies between device and host. They are used in turn.

    On a host without a device the copies are plain ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._gradients = torch.empty(
            (_STAGED_PIECES, _PIECE_WEIGHTS), dtype=torch.float32, pin_memory=not self._is_host
        )
        self._weights: dict[torch.dtype, torch.Tensor] = {}
        if not self._is_host:
            module: Any = torch.get_device_module(device)
            self._module = module
            self._to_host, self._to_device = module.Stream(device), module.Stream(device)
            self._gradient_events = [module.Event() for _ in range(_STAGED_PIECES)]
            self._weight_events = [module.Event() for _ in range(_STAGED_PIECES)]

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

    def start_gradient(self, index: int, piece: _Piece) -> None:
        """Start to copy the gradient of piece ``index`` to the host."""
        slot = index % _STAGED_PIECES
        gradient = piece.parameter.decoupled_grad[piece.part]
        if self._is_host:
            self._gradients[slot, : piece.size].copy_(gradient)
            return
        with self._module.stream(self._to_host):
            self._gradients[slot, : piece.size].copy_(gradient, non_blocking=True)
            self._gradient_events[slot].record()

    def wait_for_gradient(self, index: int, piece: _Piece) -> torch.Tensor:
        """Return the gradient of piece ``index`` in host memory, fp32."""
        slot = index % _STAGED_PIECES
        if not self._is_host:
            self._gradient_events[slot].synchronize()
        return self._gradients[slot, : piece.size]

    def start_weights(self, index: int, piece: _Piece, master: torch.Tensor) -> None:
        """Cast the new weights of piece ``index``, and start to copy them to the device."""
        weights = piece.parameter[piece.part]
        if self._is_host:
            weights.copy_(master)
            return
        if weights.dtype not in self._weights:
            self._weights[weights.dtype] = torch.empty_like(
                self._gradients, dtype=weights.dtype, pin_memory=True
            )
        slot = index % _STAGED_PIECES
        self._weight_events[slot].synchronize()  # the copy of an earlier piece from this buffer
        staged = self._weights[weights.dtype][slot, : piece.size].copy_(master)
        with self._module.stream(self._to_device):
            weights.copy_(staged, non_blocking=True)
            self._weight_events[slot].record()
