"""Attention over a sequence that context-parallel ranks share, with gathered keys and values.

A rank r of n holds the chunks r and 2n - 1 - r of the sequence (:mod:`.context_parallel`). Its
queries attend causally to three sets of keys:

1. Its own keys. The two chunks are in order, so this is plain causal attention. It runs while the
   keys and values of the other ranks are on their way.
2. The first chunks of the ranks before it: all of them are visible to all of its queries.
3. Both chunks of the ranks after it: all of them are visible to the queries of its second chunk.

No kernel computes masked scores, and every rank computes the same number of scores. The results
merge exactly (:mod:`.partial_attention`). For the backward pass a rank keeps only its own keys and
values, and gathers those of the others again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.models.context_parallel import restore_sequence_order
from flagscale.train.models.document_mask import (
    attend_causal_to_end,
    attend_masked,
    attend_to_earlier_keys,
    visible_mask,
)
from flagscale.train.models.partial_attention import (
    add_gradients_of_second_chunk,
    attend_part,
    compute_gradients_of_part,
    merge_parts,
    split_heads,
)
from flagscale.train.models.ring_attention import RingAttention

AttendChunk = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of chunk 0 or 1 of a rank: of its queries [b, heads, s/(2 cp), d] to the keys
and values from the start of the sequence to the end of the chunk, [b, query groups, keys, d].
"""


def attend_gathered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    causal: bool,
    scale: float | None,
    dropout: float,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with dropout, with documents, or in both directions, of a rank's queries to
    the whole sequence, whose keys and values are gathered.

    Args:
        query: [s/cp, b, heads, d].
        key: [s/cp, b, query groups, d].
        value: as ``key``, with a head dimension of at most d.
        group: context-parallel group.
        causal: whether a query attends only to keys up to its own position.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.
        documents: document mask of the form ``document_numbers`` or ``chunk_cu_seqlens``, if a
            query attends only to its own document.

    Returns:
        [b, heads, s/cp, head dimension of values].
    """
    if not causal:
        queries = query.permute(1, 2, 0, 3)
        keys, values = _gather_sequence(key, value, group)
        output = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, scale=scale, enable_gqa=True
        )
        return output[..., : value.shape[-1]]

    def attend_chunk(
        number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if documents is None:
            return attend_causal_to_end(q, k, v, scale=scale, dropout=dropout)
        if documents.dim() == 3:
            return attend_to_earlier_keys(q, k, v, documents[number], scale=scale, dropout=dropout)
        end = k.shape[2]
        mask = visible_mask(documents[:, end - q.shape[2] : end], documents[:, :end])
        return attend_masked(q, k, v, mask, scale=scale, dropout=dropout)

    return attend_chunks(query, key, value, group, attend_chunk)


def attend_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    attend_chunk: AttendChunk,
) -> torch.Tensor:
    """Compute causal attention of a rank's two chunks to the whole sequence, whose keys and values
    are gathered.

    Args:
        query: [s/cp, b, heads, d].
        key: [s/cp, b, query groups, d].
        value: as ``key``, with a head dimension of at most d.
        group: context-parallel group.
        attend_chunk: computes the attention of one chunk.

    Returns:
        [b, heads, s/cp, head dimension of values].
    """
    cp_size, rank = group.size(), group.rank()
    keys, values = _gather_sequence(key, value, group)
    length = len(query) // 2
    ends = ((rank + 1) * length, (2 * cp_size - rank) * length)
    chunks = query.permute(1, 2, 0, 3).chunk(2, 2)
    outputs = [
        attend_chunk(number, queries, keys[:, :, :end], values[:, :, :end])
        for number, (queries, end) in enumerate(zip(chunks, ends, strict=True))
    ]
    return torch.cat(outputs, 2)[..., : value.shape[-1]]


def _gather_sequence(
    key: torch.Tensor, value: torch.Tensor, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the whole sequence, [b, query groups, s, d]."""
    gathered = collectives.all_gather(_join(key, value), group)
    return split_heads(restore_sequence_order(gathered, group.size()))


def attend_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    scale: float | None,
    in_ring: bool,
) -> torch.Tensor:
    """Compute causal attention of a rank's queries to the whole sequence; arguments and result as
    :func:`attend_gathered`'s. ``in_ring`` selects a ring, and not a gather.
    """
    function = RingAttention if in_ring else _CausalAttention
    output: torch.Tensor = function.apply(  # type: ignore[no-untyped-call]
        query,
        _join(key, value),
        group.size(),
        group.rank(),
        collectives.get_group_name(group),
        query.shape[-1] ** -0.5 if scale is None else scale,
    )
    return output[..., : value.shape[-1]]


def _join(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys and values as heads, [s/cp, b, 2 · query groups, d]; values are padded to d."""
    return torch.cat((key, functional.pad(value, (0, key.shape[-1] - value.shape[-1]))), 2)


class _CausalAttention(torch.autograd.Function):
    """Causal attention in the parts of this module's description.

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
        pending = collectives.start_all_gather(key_value, cp_size, group)
        queries, length = query.permute(1, 2, 0, 3), len(query) // 2
        output, log_sum_exp = attend_part(
            queries, *split_heads(key_value), causal=True, scale=scale
        )
        first_chunks, later_ranks = _split_gathered(collectives.wait(pending), cp_size, rank)
        if rank > 0:
            output, log_sum_exp = merge_parts(
                output,
                log_sum_exp,
                *attend_part(queries, *split_heads(first_chunks), causal=False, scale=scale),
            )
        if rank < cp_size - 1:
            second_output, second_log_sum_exp = merge_parts(
                output[:, :, length:],
                log_sum_exp[:, :, length:],
                *attend_part(
                    queries[:, :, length:], *split_heads(later_ranks), causal=False, scale=scale
                ),
            )
            output = torch.cat((output[:, :, :length].float(), second_output), 2)
            log_sum_exp = torch.cat((log_sum_exp[:, :, :length], second_log_sum_exp), 2)
        # The layout in memory is that of the queries: [s/cp, b, heads, d].
        output = output.permute(2, 0, 1, 3).to(query.dtype).contiguous().permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key_value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key_value, output, log_sum_exp = ctx.saved_tensors
        cp_size, rank, scale = ctx.cp_size, ctx.rank, ctx.scale
        pending = collectives.start_all_gather(key_value, cp_size, ctx.group)
        queries, length = query.permute(1, 2, 0, 3), len(query) // 2
        gradient = gradient.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        query_gradient, own_gradient = compute_gradients_of_part(
            gradient, queries, key_value, output, log_sum_exp, causal=True, scale=scale
        )
        gathered = collectives.wait(pending)
        first_chunks, later_ranks = _split_gathered(gathered, cp_size, rank)
        # Gradients of the gathered keys and values in rank order. That of the own ones is added
        # after the reduction.
        gradients = [torch.zeros_like(key_value)]
        if rank > 0:
            part_query_gradient, part_gradient = compute_gradients_of_part(
                gradient, queries, first_chunks, output, log_sum_exp, causal=False, scale=scale
            )
            query_gradient = query_gradient + part_query_gradient
            first_gradients = part_gradient.view(rank, length, *part_gradient.shape[1:])
            both_gradients = torch.stack((first_gradients, torch.zeros_like(first_gradients)), 1)
            gradients.insert(0, both_gradients.flatten(0, 2))
        if rank < cp_size - 1:
            query_gradient, part_gradient = add_gradients_of_second_chunk(
                query_gradient, gradient, queries, later_ranks, output, log_sum_exp, scale=scale
            )
            gradients.append(part_gradient)
        others_gradient = torch.cat(gradients)
        reduced = collectives.start_reduce_scatter(others_gradient, cp_size, ctx.group)
        key_value_gradient = own_gradient + collectives.wait(reduced)
        return (
            query_gradient.to(query.dtype).permute(2, 0, 1, 3),
            key_value_gradient.to(key_value.dtype),
            *(None,) * 4,
        )


def _split_gathered(
    gathered: torch.Tensor, cp_size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first chunks of the ranks before ``rank``, and both chunks of those after it.

    Args:
        gathered: gathered tensor in rank order, [s, ...].
        cp_size: context-parallel size.
        rank: rank in the context-parallel group.
    """
    chunks = gathered.view(cp_size, 2, -1, *gathered.shape[1:])
    return chunks[:rank, 0].flatten(0, 1), gathered[(rank + 1) * (len(gathered) // cp_size) :]
