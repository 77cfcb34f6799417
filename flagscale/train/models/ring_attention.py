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

from flagscale.train.layers import collectives
from flagscale.train.models.partial_attention import (
    add_gradients_of_second_chunk,
    attend_part,
    compute_gradients_of_part,
    merge_parts,
    split_heads,
)


class RingAttention(torch.autograd.Function):
    """Causal attention as in this module's description, with at least two ranks.

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
                query_gradient, part_kv_gradient = add_gradients_of_second_chunk(
                    query_gradient, gradient, queries, received, output, log_sum_exp, scale=scale
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
