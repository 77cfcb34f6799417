"""State of megatron.core's distributed optimizer in checkpoints, without whole copies on a rank.

In the ``fully_reshardable`` format, each parameter has a fp32 weight and states of its own shape:
two moments of Adam, or the momentum of Muon or Lion. megatron.core gathers them of all parameters
on every rank to save them, and allocates them on every rank to load them: 12 bytes a weight and
rank, 770 GB on a host for 8 ranks of an 8B model. Here each parameter is gathered on one rank of
the data-parallel group only, which writes it, and a rank reads only parameters of which its shards
contain a part, a limited number at a time. The files are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from flagscale.accelerators.device import current_device
from flagscale.train.checkpoint.gather_plan import (
    Part,
    Piece,
    choose_owners,
    locate_parts,
    plan_rounds,
)
from flagscale.train.optim.members import list_members
from flagscale.train.optim.states import state_names

_SENT_ELEMENTS = 1 << 25
"""Maximum number of elements that all ranks together send at once."""
_READ_ELEMENTS = 1 << 28
"""Number of elements that a rank reads at once: as many parameters as fit, at least one."""
_DESCRIBE_METHOD = "sharded_param_state_fully_reshardable"
_STATE_KEY, _FORMAT_KEY, _FORMAT = "param_state", "param_state_sharding_type", "fully_reshardable"


@contextmanager
def split_by_owner(optimizer: Any) -> Iterator[None]:
    """Return a context manager in which an optimizer's sharded state dict is one without copies.

    To save, it contains the parameters that this rank owns. To load, it contains those of which
    this rank holds a part, as tensors without memory: see :func:`remove_parameter_states`.
    """
    members = [m for m in list_members(optimizer) if isinstance(m, DistributedOptimizer)]
    for member in members:
        setattr(member, _DESCRIBE_METHOD, partial(_describe_parameter_states, member))
    try:
        yield
    finally:
        for member in members:
            delattr(member, _DESCRIBE_METHOD)  # restores the method of the class


class _Parameter(NamedTuple):
    """A parameter of a distributed optimizer.

    Attributes:
        weight: the model's parameter.
        parts: the parts of it that the ranks hold.
    """

    weight: Any
    parts: list[Part]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of its tensors: the fp32 weight and the optimizer's states."""
        return ("param", *state_names(self.weight))


def _list_parameters(optimizer: Any) -> list[_Parameter]:
    """Return all parameters, in the order of the indices in the sharded state dict."""
    parameters = []
    for buffer in optimizer.buffers:
        ranks = optimizer.data_parallel_group.size()
        for weight, (start, end, bucket_index) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_index]
            shard_size = bucket.grad_data.numel() // ranks
            parts = locate_parts(start, end, offset=bucket.offset, shard_size=shard_size)
            parameters.append(_Parameter(weight, parts))
    return parameters


def _describe_parameter_states(
    optimizer: Any,
    model_state_dict: Any,
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return the sharded state of this rank's parameters, by their index.

    It replaces megatron.core's ``sharded_param_state_fully_reshardable``.
    """
    sharded_weights = {
        weight.data: weight
        for weight in nested_values(extract_sharded_tensors_and_factories(model_state_dict)[0])
    }
    parameters = _list_parameters(optimizer)
    weights = [sharded_weights[parameter.weight] for parameter in parameters]
    if is_loading:
        rank = optimizer.data_parallel_group.rank()
        return {
            index: {
                name: _describe_state(
                    weight, name, torch.empty(parameter.weight.shape, device="meta")
                )
                for name in parameter.tensor_names
            }
            for index, (parameter, weight) in enumerate(zip(parameters, weights, strict=True))
            if any(part.rank == rank for part in parameter.parts)
        }
    replica_ids = choose_replica_ids(
        optimizer.data_parallel_group, [weight.replica_id for weight in weights]
    )
    return {
        index: {
            name: replace(
                _describe_state(weights[index], name, tensor), replica_id=replica_ids[index]
            )
            for name, tensor in tensors.items()
        }
        for index, tensors in _gather_states(optimizer, parameters).items()
    }


def _describe_state(weight: Any, name: str, data: torch.Tensor) -> Any:
    """Return the sharded tensor of a parameter's state, which is sharded as its weight is."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{weight.key}", "data": data}
    if not isinstance(weight, ShardedTensorFactory):
        changes["dtype"] = data.dtype
    state = replace(weight, **changes)
    state.validate_metadata_integrity()
    return state


def choose_replica_ids(group: Any, replica_ids: list[Any]) -> list[Any]:
    """Return, for each parameter, the first replica id of the data-parallel ranks. Collective.

    The one rank that contributes the parameter takes the place of the one that has this id.

    Args:
        group: the data-parallel ranks.
        replica_ids: this rank's replica id of each parameter.
    """
    replica_ids_by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(replica_ids_by_rank, replica_ids, group=group)
    return [min(candidates) for candidates in zip(*replica_ids_by_rank, strict=True)]


def _gather_states(
    optimizer: Any, parameters: list[_Parameter]
) -> dict[int, dict[str, torch.Tensor]]:
    """Gather each parameter's state in the host memory of its owner.

    Returns:
        The states of the parameters that this rank owns. States that it holds completely and in
        host memory are the optimizer's own tensors.
    """
    group = optimizer.data_parallel_group
    rank, ranks = group.rank(), group.size()
    owners = choose_owners([parameter.weight.numel() for parameter in parameters], ranks)
    own_tensors, result = {}, {}
    for index, (parameter, owner) in enumerate(zip(parameters, owners, strict=True)):
        if owner != rank:
            continue
        if tensors := _find_own_tensors(optimizer, parameter):
            own_tensors[index] = tensors
        else:
            result[index] = {
                name: torch.empty(parameter.weight.shape, dtype=torch.float32)
                for name in parameter.tensor_names
            }
    round_size = max(_SENT_ELEMENTS // ranks, 1)
    all_parts = [parameter.parts for parameter in parameters]
    names = [parameter.tensor_names for parameter in parameters]
    held: dict[int, _HeldPart] = {}
    for pieces in plan_rounds(all_parts, owners, round_size):
        # A part may be sent in several consecutive rounds, and converting it to fp32 takes time.
        held = {
            index: held[index] if index in held else _hold_part(optimizer, parameters[index])
            for index in {piece.parameter for piece in pieces if piece.source == rank}
            if index not in own_tensors
        }
        device = parameters[pieces[0].parameter].weight.device
        for name in sorted({name for piece in pieces for name in names[piece.parameter]}):
            named_pieces = [piece for piece in pieces if name in names[piece.parameter]]
            _exchange(name, named_pieces, held, result, group, device)
    return {**own_tensors, **result}


def _find_own_tensors(optimizer: Any, parameter: _Parameter) -> dict[str, torch.Tensor] | None:
    """Return the optimizer's own tensors of a parameter if this rank trains all of it in host
    memory, so that they need no copy; None otherwise.
    """
    (part, *other_parts), rank = parameter.parts, optimizer.data_parallel_group.rank()
    if other_parts or part.rank != rank or parameter.weight.device.type != "cpu":
        return None
    tensors = optimizer._get_main_param_and_optimizer_states(parameter.weight)
    own_tensors = {name: tensors[name].detach() for name in parameter.tensor_names}
    if not all(
        tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
        for tensor in own_tensors.values()
    ):
        return None
    return {name: tensor.view(parameter.weight.shape) for name, tensor in own_tensors.items()}


class _HeldPart(NamedTuple):
    """This rank's part of a parameter's state.

    Attributes:
        start: first element in the parameter.
        tensors: the flat tensors, by name.
    """

    start: int
    tensors: Mapping[str, torch.Tensor]


def _hold_part(optimizer: Any, parameter: _Parameter) -> _HeldPart:
    rank = optimizer.data_parallel_group.rank()
    start = next(part.start for part in parameter.parts if part.rank == rank)
    return _HeldPart(start, optimizer._get_main_param_and_optimizer_states(parameter.weight))


def _exchange(
    name: str,
    pieces: list[Piece],
    held: Mapping[int, _HeldPart],
    result: Mapping[int, Mapping[str, torch.Tensor]],
    group: Any,
    device: torch.device,
) -> None:
    """Send pieces of one tensor of the states to their owners.

    All ranks of the group call it with the same pieces.
    """

    def read(piece: Piece) -> torch.Tensor:
        start, tensors = held[piece.parameter]
        return tensors[name].detach().view(-1)[piece.start - start : piece.end - start]

    def write(piece: Piece, elements: torch.Tensor) -> None:
        result[piece.parameter][name].view(-1)[piece.start : piece.end].copy_(elements)

    rank, ranks = group.rank(), group.size()
    for piece in pieces:
        if piece.source == piece.owner == rank and piece.parameter in result:
            write(piece, read(piece))
    sent_pieces = [piece for piece in pieces if piece.source != piece.owner]
    if not sent_pieces:
        return
    # Stable sorting leaves the pieces between two ranks in the same order on both.
    outgoing = sorted(
        (piece for piece in sent_pieces if piece.source == rank), key=lambda piece: piece.owner
    )
    incoming = sorted(
        (piece for piece in sent_pieces if piece.owner == rank), key=lambda piece: piece.source
    )
    sizes_out, sizes_in = [0] * ranks, [0] * ranks
    for piece in outgoing:
        sizes_out[piece.owner] += piece.size
    for piece in incoming:
        sizes_in[piece.source] += piece.size
    sent = torch.empty(sum(sizes_out), dtype=torch.float32, device=device)
    position = 0
    for piece in outgoing:
        sent[position : position + piece.size].copy_(read(piece))
        position += piece.size
    received = torch.empty(sum(sizes_in), dtype=torch.float32, device=device)
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    elements = received.cpu()
    position = 0
    for piece in incoming:
        write(piece, elements[position : position + piece.size])
        position += piece.size


class _LoadedParameter(NamedTuple):
    """A parameter of which this rank holds a part.

    Attributes:
        optimizer: the distributed optimizer.
        parameter: the parameter.
        part: this rank's part.
        tensors: its sharded state, without memory.
    """

    optimizer: Any
    parameter: _Parameter
    part: Part
    tensors: dict[str, Any]

    def find_targets(self) -> dict[str, Any]:
        """Return the sharded state with memory of the host to read it to: that of the optimizer
        itself if possible, otherwise new memory.
        """
        own_tensors, targets = self._find_own_tensors() or {}, {}
        for name, tensor in self.tensors.items():
            data = own_tensors.get(name)
            if data is None:
                data = torch.empty_like(tensor.data, device="cpu")
            targets[name] = replace(tensor, data=data)
        return targets

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of the state, which was read, to the optimizer.

        Nothing is copied if it was read to the optimizer's memory. megatron.core assembles some
        tensors from several, in new memory.
        """
        own_tensors = self._find_own_tensors()
        if own_tensors and all(
            tensors[name].data_ptr() == own.data_ptr() for name, own in own_tensors.items()
        ):
            return
        part = slice(self.part.start, self.part.end)
        self.optimizer._set_main_param_and_optimizer_states(
            self.parameter.weight,
            {name: tensor.reshape(-1)[part] for name, tensor in tensors.items()},
        )

    def _find_own_tensors(self) -> dict[str, torch.Tensor] | None:
        """Return the optimizer's own tensors if the state can be read to them; None otherwise."""
        # Of states that may not be in fp32, the optimizer returns copies.
        if self.optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return None
        return _find_own_tensors(self.optimizer, self.parameter)


class ParameterStates:
    """Sharded states of the parameters of which this rank holds a part, to be read in groups."""

    def __init__(self) -> None:
        """Create it without states."""
        self._groups: list[list[_LoadedParameter]] = []
        self._last_size = _READ_ELEMENTS

    def add(self, optimizer: Any, states: Mapping[int, dict[str, Any]]) -> None:
        """Add the states of one distributed optimizer, by the index of the parameter."""
        parameters, rank = _list_parameters(optimizer), optimizer.data_parallel_group.rank()
        for index, tensors in states.items():
            parameter = parameters[index]
            part = next(part for part in parameter.parts if part.rank == rank)
            size = sum(tensor.data.numel() for tensor in tensors.values())
            if self._last_size + size > _READ_ELEMENTS:
                self._groups.append([])
                self._last_size = 0
            self._groups[-1].append(_LoadedParameter(optimizer, parameter, part, tensors))
            self._last_size += size

    @torch.no_grad()
    def load(self, read: Callable[[dict[Any, Any]], dict[Any, Any]]) -> None:
        """Read the states, and copy this rank's parts of them to the optimizers. Collective.

        Args:
            read: fills a sharded state dict from the checkpoint; collective.
        """
        count = torch.tensor(len(self._groups), device=current_device().torch_device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        for index in range(int(count)):
            group = self._groups[index] if index < len(self._groups) else []
            targets = {i: parameter.find_targets() for i, parameter in enumerate(group)}
            loaded = read(targets)
            for i, parameter in enumerate(group):
                parameter.apply(loaded[i])


def remove_parameter_states(optimizer: Any, sharded_state_dict: Any) -> ParameterStates:
    """Move the states of parameters out of an optimizer's sharded state dict, and return them.

    The sharded state dict must have been built to load, with :func:`split_by_owner`.
    """
    states = ParameterStates()
    for member, member_state in _list_member_states(optimizer, sharded_state_dict):
        states.add(member, member_state.pop(_STATE_KEY))
    return states


def remove_empty_states(optimizer: Any, loaded_state_dict: Any) -> None:
    """Remove the states of parameters from what was read of an optimizer, in place.

    They are those of the rank that wrote what all ranks share, if it owned no parameter of a member
    of the optimizer. Others are read by :class:`ParameterStates`.
    """
    for _, member_state in _list_member_states(optimizer, loaded_state_dict):
        member_state.pop(_STATE_KEY, None)


def _list_member_states(optimizer: Any, state_dict: Any) -> list[tuple[Any, Any]]:
    """Return the distributed optimizers in an optimizer, with their parts of a state dict."""
    members = list_members(optimizer)
    pairs = [
        (member, state_dict if len(members) == 1 else state_dict[index])
        for index, member in enumerate(members)
        if isinstance(member, DistributedOptimizer)
    ]
    return [(member, state) for member, state in pairs if state.get(_FORMAT_KEY) == _FORMAT]
