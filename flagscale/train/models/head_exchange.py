"""Exchange of heads and sequence between context-parallel ranks (``cp_comm_type: a2a``).

Outside attention a rank has all heads of a part of the sequence. An all_to_all before attention
gives it the whole sequence for a part of the heads, and one after attention reverses this (Jacobs
et al., "DeepSpeed Ulysses", 2023). Attention itself is the same as without context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.models.context_parallel import restore_rank_order, restore_sequence_order


def gather_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the whole sequence of a part of the heads.

    Args:
        query: [s/cp, b, heads, d]; ``heads`` is divisible by the number of ranks.
        key: [s/cp, b, query groups, d]; ``query groups`` is divisible by the number of ranks.
        value: as ``key``, with a head dimension of at most d.
        group: context-parallel group.

    Returns:
        Queries, keys and values; [s, b, heads/cp, d] and so on.
    """
    cp_size, group_name = group.size(), collectives.get_group_name(group)
    value_width = value.shape[-1]
    if missing_width := query.shape[-1] - value_width:
        value = functional.pad(value, (0, missing_width))
    tensors = (query, key, value)
    # [s/cp, b, cp, heads of a rank, d]: each rank gets heads of all three.
    packed = torch.cat(
        [tensor.view(*tensor.shape[:2], cp_size, -1, tensor.shape[3]) for tensor in tensors], 3
    )
    whole: torch.Tensor = _GatherSequence.apply(packed, cp_size, group_name)  # type: ignore[no-untyped-call]
    head_counts = [tensor.shape[2] // cp_size for tensor in tensors]
    queries, keys, values = torch.split(whole, head_counts, 2)
    return queries, keys, values[..., :value_width]


def gather_heads(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Return all heads of this rank's part of the sequence.

    Args:
        output: whole sequence of this rank's heads, [s, b, heads/cp · d].
        group: context-parallel group.

    Returns:
        [s/cp, b, heads · d].
    """
    cp_size, group_name = group.size(), collectives.get_group_name(group)
    heads: torch.Tensor = _GatherHeads.apply(output, cp_size, group_name)  # type: ignore[no-untyped-call]
    return heads.flatten(2)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, cp_size: int, group: str) -> torch.Tensor:
        ctx.cp_size, ctx.group = cp_size, group
        return _to_whole_sequence(packed, cp_size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _to_all_heads(gradient, ctx.cp_size, ctx.group), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, cp_size: int, group: str) -> torch.Tensor:
        ctx.cp_size, ctx.group = cp_size, group
        return _to_all_heads(output, cp_size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _to_whole_sequence(gradient, ctx.cp_size, ctx.group), None, None


def _to_whole_sequence(parts: torch.Tensor, cp_size: int, group: str) -> torch.Tensor:
    """Return [s, b, ...] of this rank's heads from [s/cp, b, cp, ...] of all heads."""
    received = collectives.all_to_all(parts.movedim(2, 0), cp_size, group)
    return restore_sequence_order(received.view(-1, *parts.shape[1:2], *parts.shape[3:]), cp_size)


def _to_all_heads(whole: torch.Tensor, cp_size: int, group: str) -> torch.Tensor:
    """Return [s/cp, b, cp, ...] of all heads from [s, b, ...] of this rank's heads."""
    parts = restore_rank_order(whole, cp_size).view(cp_size, -1, *whole.shape[1:])
    received = collectives.all_to_all(parts, cp_size, group)
    return received.view(parts.shape).movedim(0, 2)
