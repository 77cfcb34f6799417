"""Selection of the parameters that Muon trains, and their place in megatron.core's optimizers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import distrib_optimizer, get_standard_config_overrides
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey

from flagscale.config.arguments.rules.muon import is_muon_parameter
from flagscale.train.checkpoint.gather_plan import locate_parts
from flagscale.train.optim.matrices import MatrixLayout
from flagscale.train.optim.members import list_members
from flagscale.train.optim.muon import USES_MUON, Matrix, Muon
from flagscale.train.optim.states import MUON_STATES, mark_states

_GROUP_KEYS = base_optimizer.param_group_identifier_keys
"""Keys by which megatron.core identifies the groups of a checkpoint."""
_QKV = "linear_qkv.weight"


def mark_parameters(chunks: Iterable[Any]) -> None:
    """Mark the parameters of the model that Muon trains."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_matrix = is_muon_parameter(name, parameter.dim())
            setattr(parameter, USES_MUON, is_matrix)
            if is_matrix:
                mark_states(parameter, MUON_STATES)


def group_overrides(config: OptimizerConfig) -> dict[Any, Any]:
    """Return megatron.core's overrides of parameter groups, with groups of their own for Muon's
    parameters.
    """
    overrides: dict[Any, Any] = get_standard_config_overrides(config)
    return {**overrides, ParamKey(attr=USES_MUON): {USES_MUON: True}}


def identify_groups(optimizer: Any, *, has_muon: bool) -> None:
    """Let megatron.core distinguish groups of Muon from those of Adam that are otherwise equal."""
    keys = (*_GROUP_KEYS, USES_MUON) if has_muon else _GROUP_KEYS
    for module in (base_optimizer, distrib_optimizer):
        module.param_group_identifier_keys = keys
    for group in optimizer.param_groups if has_muon else ():
        group.setdefault(USES_MUON, False)


def connect_members(args: argparse.Namespace, optimizer: Any, chunks: Sequence[Any]) -> None:
    """Give each :class:`Muon` in megatron.core's optimizer its matrices."""
    layouts = {
        parameter: _layout_of(args, name, parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if getattr(parameter, USES_MUON, False) and parameter.requires_grad
    }
    for member in list_members(optimizer):
        if not isinstance(member.optimizer, Muon):
            continue  # this rank has no parameters of this member
        if isinstance(member, distrib_optimizer.DistributedOptimizer):
            matrices = list(_list_shards(member, layouts))
            member.optimizer.set_matrices(matrices, member.data_parallel_group)
        else:
            member.optimizer.set_matrices(list(_list_whole(member, layouts)))


def _layout_of(args: argparse.Namespace, name: str, parameter: Any) -> MatrixLayout:
    row_blocks = None
    if args.muon_split_qkv and name.endswith(_QKV):
        heads = args.num_attention_heads
        groups = args.num_query_groups or heads
        width = args.kv_channels or args.hidden_size // heads
        row_blocks = (heads // groups * width, width, width)
    dimension: int = getattr(parameter, "partition_dim", -1)
    group = None
    if getattr(parameter, "tensor_model_parallel", False) and dimension >= 0:
        if getattr(parameter, "allreduce", True):
            group = parallel_state.get_tensor_model_parallel_group()
        else:
            group = parallel_state.get_expert_tensor_parallel_group()
    if group is None or group.size() == 1:
        return MatrixLayout(parameter.shape, row_blocks=row_blocks)
    return MatrixLayout(parameter.shape, group, dimension - parameter.dim(), row_blocks)


def _list_shards(member: Any, layouts: dict[Any, MatrixLayout]) -> Iterator[Matrix]:
    """Yield the matrices of a distributed optimizer, equally on all its ranks."""
    ranks = member.data_parallel_group.size()
    for buffer in member.buffers:
        for weight, (start, end, bucket_index) in buffer.param_index_map.items():
            if weight not in layouts:
                continue
            bucket = buffer.buckets[bucket_index]
            shard_size = bucket.grad_data.numel() // ranks
            parts = locate_parts(start, end, offset=bucket.offset, shard_size=shard_size)
            group, parameter = 0, None
            if weight in member.model_param_group_index_map:
                group, order = member.model_param_group_index_map[weight]
                parameter = member.optimizer.param_groups[group]["params"][order]
            yield Matrix(layouts[weight], group, parameter, tuple(parts))


def _list_whole(member: Any, layouts: dict[Any, MatrixLayout]) -> Iterator[Matrix]:
    """Yield the matrices of an optimizer that is not sharded."""
    groups = {
        parameter: index
        for index, group in enumerate(member.optimizer.param_groups)
        for parameter in group["params"]
    }
    for weight, layout in layouts.items():
        parameter: torch.Tensor = getattr(weight, "main_param", weight)
        if parameter in groups:
            yield Matrix(layout, groups[parameter], parameter)
