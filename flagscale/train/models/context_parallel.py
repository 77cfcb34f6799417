"""Context parallelism: each rank of a group holds a part of every sequence.

As in Megatron-LM, a sequence of length s is cut into 2·cp chunks. Rank r holds chunk r and chunk
2·cp - 1 - r, which balances the work of causal attention. Only attention depends on other tokens.
Keys and values are all-gathered, which is cheap with grouped-query attention, and the queries of a
rank attend to all keys up to their own positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.models.document_mask import attend_masked, visible_mask


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


class _GatherSequence(torch.autograd.Function):
    """All-gather along the first dimension. The backward pass reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cp_size: int, group: str) -> torch.Tensor:
        ctx.cp_size, ctx.group = cp_size, group
        return collectives.wait(collectives.start_all_gather(local, cp_size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reduced = collectives.start_reduce_scatter(gradient, ctx.cp_size, ctx.group)
        return collectives.wait(reduced), None, None


def attend_context_parallel(
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
    """Compute attention of a rank's queries to the whole sequence.

    Args:
        query: [s/cp, b, heads, d].
        key: [s/cp, b, query groups, d].
        value: as ``key``.
        group: context-parallel group.
        causal: whether a query attends only to keys up to its own position.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.
        documents: document numbers [b, s] of the whole sequences, if a query attends only to its
            own document.

    Returns:
        [b, heads, s/cp, d].
    """
    cp_size, rank, group_name = group.size(), group.rank(), collectives.get_group_name(group)
    key_value = torch.cat((key, value), -1)
    gathered: torch.Tensor = _GatherSequence.apply(key_value, cp_size, group_name)  # type: ignore[no-untyped-call]
    all_key_value = restore_sequence_order(gathered, cp_size).permute(1, 2, 0, 3)
    key_width = key.shape[-1]
    keys, values = all_key_value[..., :key_width], all_key_value[..., key_width:]
    queries = query.permute(1, 2, 0, 3)
    if not causal:
        return functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, scale=scale, enable_gqa=True
        )
    chunk_length = query.shape[0] // 2
    outputs = []
    for chunk_queries, chunk_index in zip(
        queries.chunk(2, 2), (rank, 2 * cp_size - 1 - rank), strict=True
    ):
        end = (chunk_index + 1) * chunk_length
        visible_key_value = keys[:, :, :end], values[:, :, :end]
        if documents is None:
            outputs.append(_attend_causal_to_end(chunk_queries, *visible_key_value, scale, dropout))
            continue
        mask = visible_mask(documents[:, end - chunk_length : end], documents[:, :end])
        outputs.append(
            attend_masked(chunk_queries, *visible_key_value, mask, scale=scale, dropout=dropout)
        )
    return torch.cat(outputs, 2)


def _attend_causal_to_end(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute causal attention in which the last query aligns with the last key."""
    if query.device.type == "cuda" and query.dtype != torch.float32:
        # With fewer queries than keys, torch's function aligns the first query with the first key.
        # The flash kernel, available on CUDA only, aligns the last ones and needs no mask.
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal=True, scale=scale
        )
        output: torch.Tensor = outputs[0]
        return output
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
