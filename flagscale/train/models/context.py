"""Context parallelism: the ranks of a group each have a part of every sequence.

A sequence is cut into twice as many pieces as there are ranks, and a rank has one from the front
and the one as far from the end (Megatron-LM's order), so that causal attention is as much work for
each. Everything but attention works on tokens by themselves. Keys and values are gathered, which
with grouped queries are few; a rank's queries attend to the keys up to their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.models.documents import attend_masked, visible


def own_pieces(tensor: torch.Tensor, dimension: int, rank: int, size: int) -> torch.Tensor:
    """The two pieces of ``tensor`` that a rank has, one after the other."""
    pieces = tensor.chunk(2 * size, dimension)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dimension)


def own_batch(
    batch: Mapping[str, torch.Tensor], rank: int, size: int
) -> Mapping[str, torch.Tensor]:
    """A rank's part of a micro-batch, whose tensors are ``[micro-batch, sequence]``."""
    if size == 1:
        return batch
    return {name: own_pieces(tensor, 1, rank, size) for name, tensor in batch.items()}


def in_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """What was gathered, rank after rank, along the first dimension, in the sequence's order."""
    pieces = gathered.chunk(2 * size)
    first = [pieces[2 * rank] for rank in range(size)]
    return torch.cat([*first, *(pieces[2 * rank + 1] for rank in reversed(range(size)))])


class _Gather(torch.autograd.Function):
    """The whole sequence of every rank's part; gradients of a part are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group = size, group
        return collectives.wait(collectives.start_all_gather(own, size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        summed = collectives.start_reduce_scatter(gradient, ctx.size, ctx.group)
        return collectives.wait(summed), None, None


def attend(
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
    """Attention of a rank's queries to the whole sequence.

    Args:
        query: ``[sequence of this rank, batch, heads, width]``.
        key: as ``query``, with as many heads as there are query groups.
        value: as ``key``.
        group: the ranks that share sequences.
        causal: whether a query attends to nothing that comes after it.
        scale: of the scores; one over the root of ``width`` if None.
        dropout: share of the scores that is dropped.
        documents: numbers of the whole sequences' documents, ``[batch, sequence]``, where a query
            is to attend to its own alone.

    Returns:
        ``[batch, heads, sequence of this rank, width]``.
    """
    size, rank, name = group.size(), group.rank(), collectives.name_of(group)
    both = torch.cat((key, value), -1)
    gathered: torch.Tensor = _Gather.apply(both, size, name)  # type: ignore[no-untyped-call]
    whole, width = in_order(gathered, size).permute(1, 2, 0, 3), key.shape[-1]
    keys, values = whole[..., :width], whole[..., width:]
    queries = query.permute(1, 2, 0, 3)
    if not causal:
        return functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, scale=scale, enable_gqa=True
        )
    piece = query.shape[0] // 2
    outputs = []
    for own, number in zip(queries.chunk(2, 2), (rank, 2 * size - 1 - rank), strict=True):
        until = (number + 1) * piece
        near = keys[:, :, :until], values[:, :, :until]
        if documents is None:
            outputs.append(_up_to_the_end(own, *near, scale, dropout))
            continue
        mask = visible(documents[:, until - piece : until], documents[:, :until])
        outputs.append(attend_masked(own, *near, mask, scale=scale, dropout=dropout))
    return torch.cat(outputs, 2)


def _up_to_the_end(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Causal attention in which the last query belongs to the last key."""
    if query.device.type == "cuda" and query.dtype != torch.float32:
        # With fewer queries than keys torch's function is causal from the first ones on. Its
        # kernel, which it has for CUDA alone, is from the last ones, and needs no mask.
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal=True, scale=scale
        )
        output: torch.Tensor = found[0]
        return output
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
