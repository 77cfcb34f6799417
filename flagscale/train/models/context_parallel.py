"""Context parallelism: each rank of a group holds a part of every sequence.

As in Megatron-LM, a sequence of length s is cut into 2·cp chunks. Rank r holds chunk r and chunk
2·cp - 1 - r, which balances the work of causal attention. Only attention depends on other tokens.
It gathers keys and values (:mod:`flagscale.train.models.gathered_attention`), sends them around a
ring (:mod:`flagscale.train.models.ring_attention`), or exchanges a part of the sequence for a part
of the heads (:mod:`flagscale.train.models.head_exchange`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state


def select_attention_groups(config: Any, group: Any) -> tuple[Any, Any]:
    """Return the ranks that exchange heads, and those that exchange keys and values; None if these
    are one rank.

    With ``a2a+p2p`` neighboring ranks exchange heads. They hold adjacent chunks of the sequence, so
    that a group of them then has two chunks, as a rank would if each group were one rank.

    Args:
        config: the model's configuration.
        group: context-parallel group.
    """
    if group.size() == 1:
        return None, None
    if config.cp_comm_type == "a2a+p2p":
        neighbors, across = parallel_state.get_hierarchical_context_parallel_groups()
        return neighbors if neighbors.size() > 1 else None, across if across.size() > 1 else None
    return (group, None) if config.cp_comm_type == "a2a" else (None, group)


def select_chunks(tensor: torch.Tensor, dimension: int, rank: int, cp_size: int) -> torch.Tensor:
    """Return the two chunks of ``tensor`` that ``rank`` holds, concatenated along ``dimension``.

    ``cp_size`` is the context parallel size.
    """
    chunks = tensor.chunk(2 * cp_size, dimension)
    return torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank]), dimension)


def split_batch(
    batch: Mapping[str, torch.Tensor], rank: int, cp_size: int
) -> Mapping[str, torch.Tensor]:
    """Return the part of ``rank`` of a micro-batch, whose tensors are [b, s].

    ``cp_size`` is the context parallel size.
    """
    if cp_size == 1:
        return batch
    return {name: select_chunks(tensor, 1, rank, cp_size) for name, tensor in batch.items()}


def restore_sequence_order(rank_ordered: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Reorder the first dimension of an all-gathered tensor from rank order to sequence order.

    ``cp_size`` is the context parallel size.
    """
    chunks = rank_ordered.chunk(2 * cp_size)
    first_half = [chunks[2 * rank] for rank in range(cp_size)]
    return torch.cat([*first_half, *(chunks[2 * rank + 1] for rank in reversed(range(cp_size)))])


def restore_rank_order(sequence: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Reorder the first dimension from sequence order to rank order: the inverse of
    :func:`restore_sequence_order`.

    ``cp_size`` is the context parallel size.
    """
    return torch.cat([select_chunks(sequence, 0, rank, cp_size) for rank in range(cp_size)])
