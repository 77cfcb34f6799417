"""Attention over a sequence that context-parallel ranks share, in a ring (``cp_comm_type: p2p``).

A rank r of n holds the chunks r and 2n - 1 - r of the sequence (:mod:`.context_parallel`). Keys and
values go around a ring of the ranks (Liu et al., "Ring Attention with Blockwise Transformers",
2023): in step i a rank has those of rank (r - i) mod n, and sends them on to rank r + 1 while it
attends to them. As in :mod:`.gathered_attention`, all queries attend to the first chunk of a rank
before this one, and the queries of the second chunk to both chunks of a rank after it. Each step
takes all ranks the same time, and a rank has received keys and values of at most two others at a
time, whatever n is.

In the backward pass keys and values go around again. Their gradients follow one step behind, and
each rank adds its part. After n - 1 steps they arrive at the rank whose keys and values they belong
to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.models.partial_attention import (
    attend_part,
    compute_gradients_of_part,
    merge_parts,
    split_heads,
)


def attend_in_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    scale: float | None,
) -> torch.Tensor:
    """Compute causal attention of a rank's queries to the whole sequence.

    Args:
        query: [s/cp, b, heads, d].
        key: [s/cp, b, query groups, d].
        value: as ``key``, with a head dimension of at most d.
        group: context-parallel group of at least two ranks.
        scale: factor of the scores; 1/sqrt(d) if None.

    Returns:
        [b, heads, s/cp, head dimension of values].
    """
    width, value_width = query.shape[-1], value.shape[-1]
    value = functional.pad(value, (0, width - value_width))
    output: torch.Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query,
        torch.cat((key, value), 2),
        group.size(),
        group.rank(),
        collectives.get_group_name(group),
        width**-0.5 if scale is None else scale,
    )
    return output[..., :value_width]


class _RingAttention(torch.autograd.Function):
    """Attention as in this module's description.

    ``key_value`` has keys and values as heads: [s/cp, b, 2 · query groups, d].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key_value: torch.Tensor,
        cp_size: int,
        rank: int,
        group: str,
        scale: float,
    ) -> torch.Tensor:
        ctx.cp_size, ctx.rank, ctx.group, ctx.scale = cp_size, rank, group, scale
        pending = collectives.start_ring_shift(key_value, rank, cp_size, group)
        queries, chunk_length = query.permute(1, 2, 0, 3), len(query) // 2
        # Output and log-sum-exp of the queries of both chunks.
        first, second = _split_chunks(
            attend_part(queries, *split_heads(key_value), causal=True, scale=scale), chunk_length
        )
        for step in range(1, cp_size):
            received = collectives.wait(pending)
            if step < cp_size - 1:
                pending = collectives.start_ring_shift(received, rank, cp_size, group)
            source = (rank - step) % cp_size
            if source < rank:  # only its first chunk is visible
                part = attend_part(
                    queries, *split_heads(received[:chunk_length]), causal=False, scale=scale
                )
                first_part, second_part = _split_chunks(part, chunk_length)
                first = merge_parts(*first, *first_part)
            else:
                second_part = attend_part(
                    queries[:, :, chunk_length:], *split_heads(received), causal=False, scale=scale
                )
            second = merge_parts(*second, *second_part)
        output = torch.cat((first[0].to(query.dtype), second[0].to(query.dtype)), 2)
        log_sum_exp = torch.cat((first[1], second[1]), 2)
        # The layout in memory is that of the queries: [s/cp, b, heads, d].
        output = output.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key_value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key_value, output, log_sum_exp = ctx.saved_tensors
        cp_size, rank, group, scale = ctx.cp_size, ctx.rank, ctx.group, ctx.scale
        pending = collectives.start_ring_shift(key_value, rank, cp_size, group)
        queries, chunk_length = query.permute(1, 2, 0, 3), len(query) // 2
        gradient = gradient.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        query_gradient, own_kv_gradient = compute_gradients_of_part(
            gradient, queries, key_value, output, log_sum_exp, causal=True, scale=scale
        )
        pending_kv_gradient: torch.Tensor | None = None
        for step in range(1, cp_size):
            received = collectives.wait(pending)
            if step < cp_size - 1:
                pending = collectives.start_ring_shift(received, rank, cp_size, group)
            source = (rank - step) % cp_size
            if source < rank:  # only its first chunk is visible
                part_query_gradient, part_kv_gradient = compute_gradients_of_part(
                    gradient,
                    queries,
                    received[:chunk_length],
                    output,
                    log_sum_exp,
                    causal=False,
                    scale=scale,
                )
                query_gradient = query_gradient + part_query_gradient
                part_kv_gradient = torch.cat((part_kv_gradient, torch.zeros_like(part_kv_gradient)))
            else:
                part_query_gradient, part_kv_gradient = compute_gradients_of_part(
                    gradient[:, :, chunk_length:],
                    queries[:, :, chunk_length:],
                    received,
                    output[:, :, chunk_length:],
                    log_sum_exp[:, :, chunk_length:].contiguous(),
                    causal=False,
                    scale=scale,
                )
                second_query_gradient = query_gradient[:, :, chunk_length:] + part_query_gradient
                query_gradient = torch.cat(
                    (query_gradient[:, :, :chunk_length], second_query_gradient), 2
                )
            # What arrives is the sum of other ranks' parts for the same source.
            if pending_kv_gradient is not None:
                part_kv_gradient = part_kv_gradient + collectives.wait(pending_kv_gradient)
            pending_kv_gradient = collectives.start_ring_shift(
                part_kv_gradient, rank, cp_size, group
            )
        assert pending_kv_gradient is not None  # a ring has at least two ranks
        key_value_gradient = own_kv_gradient + collectives.wait(pending_kv_gradient)
        return (
            query_gradient.to(query.dtype).permute(2, 0, 1, 3),
            key_value_gradient.to(key_value.dtype),
            *(None,) * 4,
        )


def _split_chunks(
    part: tuple[torch.Tensor, torch.Tensor], length: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return output and log-sum-exp of the first ``length`` queries, and of the others."""
    output, log_sum_exp = part
    return (
        (output[:, :, :length], log_sum_exp[:, :, :length]),
        (output[:, :, length:], log_sum_exp[:, :, length:]),
    )
