"""Adam that keeps master weights and moments in a chosen format, on the device or the host.

Master weights are the weights that Adam updates; Megatron-LM calls their format main_params. The
model's weights are the same values in the model's dtype. If both formats are equal, they are the
same tensor.

With ``use_precision_aware_optimizer`` master weights and moments take fewer bytes
(:mod:`.state_formats`). Such states are called lean.

With ``optimizer_cpu_offload`` the states of some weights are in host memory: 12 bytes a weight if
they are in fp32. They are updated piece by piece, in two ways:

- by the device, bound by the bandwidth of PCIe: states are copied to the device and back;
- by the host's cores, bound by the bandwidth of its memory: gradients are copied to the host, and
  new weights to the device (Ren et al., "ZeRO-Offload", 2021).

Of fp32 states the cores update some while the device updates the others. Lean ones are all updated
by the device, which copies few bytes of them. The cores alone update states in memory that cannot
be pinned, and those of which other ranks hold copies in other shards.

megatron.core's distributed optimizer treats this class as Transformer Engine's ``FusedAdam`` with
``use_precision_aware_optimizer``: the parameters are this rank's shards of the model's weights,
their gradients are in ``decoupled_grad``, and a step updates the weights in place.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flagscale.accelerators.device import Device
from flagscale.config.arguments.rules.optimizer_states import FP32_STATES, StateFormats
from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.lean_update import (
    AdamFormats,
    AdamTensors,
    get_update,
    hyperparameters,
    rounding_key,
)
from flagscale.train.optim.offload_staging import (
    PIECES_IN_FLIGHT,
    WEIGHTS_PER_PIECE,
    DeviceUpdatePipeline,
    HostUpdateStaging,
    Piece,
    cut_in_pieces,
)
from flagscale.train.optim.state_formats import (
    DEVICE_PART,
    FIRST_MOMENTS,
    HOST_PART,
    NEAREST,
    SECOND_MOMENTS,
    Format,
    InPlaceWeights,
    Plain,
    RemainderWeights,
    SeparateWeights,
    Tensors,
    WeightFormat,
    as_rows,
    block_parts,
)
from flagscale.train.optim.states import FIRST_MOMENT, SECOND_MOMENT

MASTER = "master_param"
"""Name of the master weights in a parameter's state, next to the moments."""
_DEVICE_FRACTION = 0.6
"""Fraction of the offloaded weights with fp32 states that the device updates. Balanced on 16 cores
and an H100: the cores took as long for the rest. It is not tuned at run time, because a CPU and a
GPU round differently: another split would change the results.
"""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL_FORMATS = {dtype: name for name, dtype in _DTYPES.items()}


class StoredState(NamedTuple):
    """Master weights of a parameter, or one of its moments: a format and its tensors.

    The first tensor of master weights is the parameter itself, that is, the model's weights. With
    :class:`InPlaceWeights` it is the only one.
    """

    form: Format
    tensors: Tensors

    @property
    def is_fp32(self) -> bool:
        """True if the last tensor has the values in fp32. Torch's fused kernel can update it.

        That includes an fp32 model's own weights, because ``InPlaceWeights`` is a ``Plain`` format.
        """
        is_plain = isinstance(self.form, (Plain, SeparateWeights))
        return is_plain and self.tensors[-1].dtype == torch.float32

    def to_fp32(self) -> torch.Tensor:
        """Return the values in fp32, to be read only.

        If the state is in fp32, this is its own tensor. Otherwise it is a copy in host memory: a
        checkpoint is written from there, and the device may have no space for it.
        """
        if self.is_fp32:
            return self.tensors[-1]
        values = torch.empty(self.tensors[0].numel(), dtype=torch.float32)
        device = self.tensors[-1].device
        for part in self._parts():
            # The model's weights may be on the device, and what they lack in host memory.
            rows = tuple(tensor.to(device) for tensor in self._rows(part))
            values[part].copy_(self.form.read(rows).view(-1))
        return values

    def overwrite(self, values: torch.Tensor) -> None:
        """Overwrite the values, rounded to nearest."""
        device = self.tensors[-1].device
        for part in self._parts():
            piece = as_rows(values[part]).to(device, torch.float32)
            self.form.write(self._rows(part), piece, NEAREST)

    def _parts(self) -> Iterator[slice]:
        """Yield parts that are converted one after the other, which limits temporary memory."""
        is_on_host = self.tensors[-1].device.type == "cpu"
        return block_parts(self.tensors[0].numel(), HOST_PART if is_on_host else DEVICE_PART)

    def _rows(self, part: slice) -> Tensors:
        return self.form.rows(self.form.cut(self.tensors, part))


class MasterWeightAdam(FusedAdam):
    """Adam, or AdamW with ``adam_w_mode``, of weights of any precision.

    If all states are in fp32, results equal those of :class:`FusedAdam` on separate fp32 weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        offload_fraction: float = 0.0,
        formats: StateFormats = FP32_STATES,
        **options: Any,
    ) -> None:
        """Create the optimizer; its state is allocated by :meth:`initialize_states` or the first
        step, when the parameter groups are final.

        Args:
            params: parameter groups, as torch's optimizers take them.
            offload_fraction: fraction of the weights whose state is in host memory, 0 to 1.
            formats: number formats of the states.
            options: learning rate, betas, eps, weight decay and ``adam_w_mode``.
        """
        super().__init__(params, **options)
        self._offload_fraction = offload_fraction
        self._formats = formats
        # By the parameter's id:
        self._parameter_names: dict[int, str] = {}
        self._replicated_ids: set[int] = set()
        self._staging: HostUpdateStaging | None = None
        self._pipeline: DeviceUpdatePipeline | None = None
        self._device_weight_counts: dict[int, int] = {}
        """Number of leading weights of each offloaded parameter that the device updates."""
        self._pinned_states: dict[int, Tensors] = {}
        """States of these weights in host memory. Memory is pinned as long as the registered
        tensors exist, and these are views, which nothing else refers to.
        """

    # -- state -------------------------------------------------------------------------------------

    def name_parameter(
        self, parameter: torch.Tensor, name: str, *, is_replicated: bool = False
    ) -> None:
        """Name a parameter before it has a state. Stochastic rounding depends on the name, so that
        ranks that hold the same weight round it equally.

        Args:
            parameter: one of the parameters.
            name: name of the weights, equal on tensor-parallel ranks that hold copies of them.
            is_replicated: other ranks hold copies of the weights, in shards that begin elsewhere.
                Rounding depends on the position in a shard, so these weights have states with the
                precision of fp32.
        """
        self._parameter_names[id(parameter)] = name
        if is_replicated:
            self._replicated_ids.add(id(parameter))

    def initialize_states(self) -> None:
        """Allocate the state of each parameter that has none."""
        for parameter in self._parameters():
            if parameter not in self.state:
                self._initialize_state(parameter)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _initialize_state(self, parameter: torch.Tensor) -> None:
        """Allocate the state of a parameter: master weights equal to it, and zero moments."""
        is_on_host = id(parameter) in self._offloaded_ids
        device = torch.device("cpu") if is_on_host else parameter.device
        formats = self._formats_of(parameter)
        size, weights = parameter.numel(), parameter.detach()
        master = _choose_master_format(formats, parameter.dtype)
        first, second = FIRST_MOMENTS[formats.first_moment], SECOND_MOMENTS[formats.second_moment]
        self.state[parameter] = {
            MASTER: StoredState(master, (weights, *master.allocate(size, device))),
            FIRST_MOMENT: StoredState(first, first.allocate(size, device)),
            SECOND_MOMENT: StoredState(second, second.allocate(size, device)),
        }
        self.state[parameter][MASTER].overwrite(weights)
        if is_on_host:
            self._device_weight_counts[id(parameter)] = self._pin_states_for_device(parameter)

    def _pin_states_for_device(self, parameter: torch.Tensor) -> int:
        """Pin the states of the leading weights of an offloaded parameter that the device updates.
        Return the number of these weights.
        """
        size, device = parameter.numel(), Device.from_torch(parameter.device)
        weights = size
        if self._has_fp32_states(parameter):
            pieces = round(_DEVICE_FRACTION * size / WEIGHTS_PER_PIECE)
            weights = min(pieces * WEIGHTS_PER_PIECE, size)
        if not weights or device.is_host:
            return 0
        if id(parameter) in self._replicated_ids:
            # Shards of the copies begin elsewhere. One rank's CPU and another rank's GPU would
            # update the same weight, with different rounding errors.
            return 0
        tensors = self._cut_tensors(Piece(parameter, slice(0, weights)))
        states = tensors.in_host_memory()
        # After a failure the tensors that have been registered are released with this list.
        if not all(map(device.register_host_memory, states)):
            # Python prints it once, not for every parameter.
            warnings.warn(
                "some of the host's memory cannot be pinned: its cores update the states there, "
                "which takes longer and rounds differently",
                stacklevel=2,
            )
            return 0
        self._pinned_states[id(parameter)] = states
        return weights

    def _formats_of(self, parameter: torch.Tensor) -> StateFormats:
        """Return the formats of a parameter's states. Those of replicated parameters have the
        precision of fp32, which needs no stochastic rounding.
        """
        if id(parameter) in self._replicated_ids:
            return StateFormats(remainders=self._formats.remainders)
        return self._formats

    @property
    def host_bytes(self) -> int:
        """Bytes of the states in host memory, allocated or not."""
        return sum(
            math.ceil(
                parameter.numel()
                * self._formats_of(parameter).state_bytes(_MODEL_FORMATS[parameter.dtype])
            )
            for parameter in self._parameters()
            if id(parameter) in self._offloaded_ids
        )

    def reset_master_weights(self) -> None:
        """Copy the model's weights, which have been loaded, to the master weights."""
        for parameter, state in self.state.items():
            state[MASTER].overwrite(parameter.detach())

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the values of a parameter's state in fp32; megatron.core's checkpoints read it."""
        state: StoredState = self.state[parameter][name]
        return state.to_fp32()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Overwrite the values of a parameter's state with those of a checkpoint."""
        if parameter not in self.state:
            self._initialize_state(parameter)
        self.state[parameter][name].overwrite(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load parameter groups, and the states of another optimizer of this class. A state stays
        on its device and in its format.
        """
        for group, loaded_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded_group.items() if key != "params"})
        parameters = self._parameters()
        for index, states in state_dict["state"].items():
            for name, state in states.items():
                # megatron.core may pass this optimizer's own states, which need no copy.
                if state is not self.state.get(parameters[index], {}).get(name):
                    self.set_scaled_state(parameters[index], name, state.to_fp32())

    @cached_property
    def _offloaded_ids(self) -> set[int]:
        """Return the ids of the parameters whose state is in host memory.

        They are the first ones, until they have ``offload_fraction`` of the weights. Replicated
        ones are offloaded with all others only: otherwise their copies could be updated by another
        rank's device. The set stays once it has been read, because states are not moved.
        """
        parameters = self._parameters()
        if self._offload_fraction == 1:
            return {id(parameter) for parameter in parameters}
        remaining = self._offload_fraction * sum(parameter.numel() for parameter in parameters)
        offloaded = set()
        for parameter in parameters:
            if id(parameter) in self._replicated_ids:
                continue
            if remaining <= 0:
                break
            offloaded.add(id(parameter))
            remaining -= parameter.numel()
        return offloaded

    # -- step --------------------------------------------------------------------------------------

    def _update_group(self, group: dict[str, Any]) -> None:
        offloaded_parameters: list[Any] = []
        lean_parameters: list[Any] = []
        fp32_parameters: list[Any] = []
        for parameter in group["params"]:
            if getattr(parameter, "decoupled_grad", None) is None:
                continue
            if parameter not in self.state:
                self._initialize_state(parameter)
            if id(parameter) in self._offloaded_ids:
                offloaded_parameters.append(parameter)
            elif self._has_fp32_states(parameter):
                fp32_parameters.append(parameter)
            else:
                lean_parameters.append(parameter)
        if fp32_parameters:
            self._update_fp32_states(group, fp32_parameters)
        if lean_parameters:
            self._update_lean_states(group, lean_parameters)
        if offloaded_parameters:
            self._update_offloaded(group, offloaded_parameters)

    def _has_fp32_states(self, parameter: torch.Tensor) -> bool:
        """Return True if all states are fp32 tensors, which torch's fused kernel updates."""
        return all(state.is_fp32 for state in self.state[parameter].values())

    def _update_fp32_states(self, group: dict[str, Any], parameters: list[Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        masters = [state[MASTER].tensors[-1] for state in states]
        self._run_kernel(
            group,
            masters,
            [parameter.decoupled_grad.float() for parameter in parameters],
            [state[FIRST_MOMENT].tensors[0] for state in states],
            [state[SECOND_MOMENT].tensors[0] for state in states],
        )
        # Separate master weights are copied to the model's. In-place ones are the model's.
        pairs = [
            (state[MASTER].tensors[0], master)
            for state, master in zip(states, masters, strict=True)
            if len(state[MASTER].tensors) > 1
        ]
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))

    def _update_lean_states(self, group: dict[str, Any], parameters: list[Any]) -> None:
        step_options = self._hyperparameters(group, parameters[0].device)
        for parameter in parameters:
            formats, tensors = self._adam_tensors(parameter)
            key = self._rounding_key(group, parameter)
            update = get_update(formats, is_decoupled=self.adam_w_mode)
            update(tensors, parameter.decoupled_grad, step_options, key)

    def _hyperparameters(self, group: dict[str, Any], device: torch.device) -> torch.Tensor:
        return hyperparameters(group, is_decoupled=self.adam_w_mode, device=device)

    def _adam_tensors(self, parameter: torch.Tensor) -> tuple[AdamFormats, AdamTensors]:
        states = [self.state[parameter][name] for name in (MASTER, FIRST_MOMENT, SECOND_MOMENT)]
        return (
            AdamFormats(*(state.form for state in states)),
            AdamTensors(*(state.tensors for state in states)),
        )

    def _rounding_key(self, group: dict[str, Any], parameter: torch.Tensor) -> int:
        """Return the key from which, with a weight's position, its random thresholds are computed
        in this step. Parameters without a name are known by their number.
        """
        if id(parameter) not in self._parameter_names:
            self._parameter_names.update(
                (id(parameter), str(index))
                for index, parameter in enumerate(self._parameters())
                if id(parameter) not in self._parameter_names
            )
        return rounding_key(self._parameter_names[id(parameter)], group["step"])

    def _update_offloaded(self, group: dict[str, Any], parameters: list[Any]) -> None:
        """Update states in host memory: some on the device, the others on the host."""
        device = parameters[0].device
        if self._staging is None or self._pipeline is None:
            self._staging, self._pipeline = HostUpdateStaging(device), DeviceUpdatePipeline(device)
        step_options = self._hyperparameters(group, device)
        self._pipeline.begin()
        # Both kinds of pieces are updated at the same time: the host queues pieces of the device
        # in between its own.
        device_pieces: deque[Piece] = deque()
        host_pieces: list[Piece] = []
        for piece in cut_in_pieces(parameters):
            is_on_device = piece.part.start < self._device_weight_counts[id(piece.parameter)]
            (device_pieces if is_on_device else host_pieces).append(piece)
        device_count = len(device_pieces)
        with _use_share_of_cores():
            for index, _ in enumerate(self._update_on_host(group, host_pieces, self._staging)):
                # The generator has yielded before piece ``index`` of the host is updated. Device
                # pieces are queued in proportion to the host's progress, and some ahead of it. A
                # queue of all of them could be full, which blocks the host.
                remaining = device_count - device_count * (index + PIECES_IN_FLIGHT) // len(
                    host_pieces
                )
                while len(device_pieces) > max(remaining, 0):
                    self._update_on_device(
                        group, device_pieces.popleft(), self._pipeline, step_options
                    )
        for piece in device_pieces:  # if there are no host pieces
            self._update_on_device(group, piece, self._pipeline, step_options)
        self._pipeline.synchronize()

    def _update_on_device(
        self,
        group: dict[str, Any],
        piece: Piece,
        pipeline: DeviceUpdatePipeline,
        step_options: torch.Tensor,
    ) -> None:
        """Queue the update of states in host memory on the device."""
        tensors = self._cut_tensors(piece)
        gradient = piece.gradient

        def update(copies: Sequence[torch.Tensor]) -> None:
            self._update_piece(group, piece, tensors.replace_host(copies), gradient, step_options)

        pipeline.queue_update(tensors.in_host_memory(), update)

    def _update_on_host(
        self, group: dict[str, Any], pieces: Sequence[Piece], staging: HostUpdateStaging
    ) -> Iterator[None]:
        """Update states in host memory on the host, and yield before each piece, for the caller to
        queue work of the device.

        While a piece is updated, the gradients of the next pieces are copied to the host and the
        weights of the previous ones to the device.
        """
        step_options = self._hyperparameters(group, torch.device("cpu"))
        staging.begin()

        def start_copy_to_host(index: int, piece: Piece) -> None:
            formats, _ = self._adam_tensors(piece.parameter)
            reads_weights = formats.weights.reads_model_weights
            staging.start_copy_to_host(index, piece, with_weights=reads_weights)

        for index, piece in enumerate(pieces[:PIECES_IN_FLIGHT]):
            start_copy_to_host(index, piece)
        for index, piece in enumerate(pieces):
            yield
            gradient = staging.wait_for_gradient(index, piece)
            weights = staging.acquire_weights(index, piece)
            tensors = self._cut_tensors(piece)
            tensors = tensors._replace(weights=(weights, *tensors.weights[1:]))
            self._update_piece(group, piece, tensors, gradient, step_options)
            staging.start_weight_copy(index, piece)
            later = index + PIECES_IN_FLIGHT
            if later < len(pieces):
                start_copy_to_host(later, pieces[later])
        staging.make_current_stream_wait()

    def _cut_tensors(self, piece: Piece) -> AdamTensors:
        formats, tensors = self._adam_tensors(piece.parameter)
        return tensors.cut(formats, piece.part)

    def _update_piece(
        self,
        group: dict[str, Any],
        piece: Piece,
        tensors: AdamTensors,
        gradient: torch.Tensor,
        step_options: torch.Tensor,
    ) -> None:
        """Update a piece of the weights, all of whose tensors are on one device."""
        parameter, part = piece
        weights = tensors.weights[0]
        if self._has_fp32_states(parameter):
            master = tensors.weights[-1]
            self._run_kernel(
                group, [master], [gradient.float()], [tensors.first_moment[0]],
                [tensors.second_moment[0]],
            )  # fmt: skip
            if master is not weights:
                weights.copy_(master)
            return
        formats, _ = self._adam_tensors(parameter)
        # The update combines the key with positions in the piece in the same way. Pieces begin at
        # multiples of a power of two, so where a parameter is cut does not change a weight's key.
        key = self._rounding_key(group, parameter) ^ part.start
        # Models that are trained on a CPU are too small for compilation to pay.
        has_accelerator = parameter.device.type != "cpu"
        update = get_update(
            formats,
            is_decoupled=self.adam_w_mode,
            compiles_on_host=weights.device.type == "cpu" and has_accelerator,
        )
        update(tensors, gradient, step_options, key)


def _choose_master_format(formats: StateFormats, model_dtype: torch.dtype) -> WeightFormat:
    """Return the format of the master weights of a parameter of the model."""
    dtype = torch.float32 if model_dtype == torch.float32 else _DTYPES[formats.main_params]
    if dtype == model_dtype:
        return InPlaceWeights(dtype)
    if formats.remainders and model_dtype == torch.bfloat16:
        return RemainderWeights()
    return SeparateWeights(Plain(dtype))


@contextmanager
def _use_share_of_cores() -> Iterator[None]:
    """Return a context manager in which torch uses this rank's share of the host's cores.

    Otherwise it uses ``OMP_NUM_THREADS``, which torchrun sets to 1.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, _count_cores_per_rank()))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _count_cores_per_rank() -> int:
    """Return the number of cores of each rank of this host.

    A rank may be bound to some of them (torchrun's ``numa_binding``), alone or together with other
    ranks. Its parent, torchrun, may use those of all ranks.
    """
    own_cores = os.sched_getaffinity(0)
    cores_of_all_ranks = own_cores | os.sched_getaffinity(os.getppid())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(len(own_cores), len(cores_of_all_ranks) // ranks)
