"""Core attention with a sliding window or with soft-capped scores.

With a sliding window (Beltagy et al., "Longformer", 2020) a token attends to itself and a number of
previous tokens. ``window_attn_skip_freq`` selects the layers with a window; the others use full
causal attention. Scores are soft-capped to ``c tanh(s / c)`` (``attn_logit_softcapping``).
``scaled_dot_product_attention`` does not do that, so scores, softmax and output are computed
separately.

In long sequences, attention within a window is computed in blocks of queries, each with its own
keys and those of the block before it. Time is then proportional to sequence x window, and so is
memory, except for a document mask, which has all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn import functional

from flagscale.errors import ConfigError
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.document_mask import attend_masked, visible_mask
from flagscale.train.models.gathered_attention import attend_chunks

_BLOCK_MULTIPLE = 128
"""Multiple of the number of queries in a block. Kernels compute tiles of up to 128 x 128 scores."""
_MIN_BLOCKS = 4
"""Least number of blocks. Fewer gain little: a block computes the scores of two blocks of keys,
which are copied.
"""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries to keys and values with a mask that is True for visible keys."""


def uses_standard_attention(config: Any) -> bool:
    """Return whether no layer has a sliding window or soft-capped scores.

    :class:`SDPAttention` is sufficient then.
    """
    return not config.window_size and not config.attn_logit_softcapping


class SlidingWindowAttention(SDPAttention):
    """Causal attention of a model in which layers have a sliding window or soft-capped scores.

    Attributes:
        window: number of previous tokens that a token attends to; None if this layer has no window.
        cap: bound of the scores; None without.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
        """Create the attention of a layer; ``layer_number`` counts from 1 over the whole model."""
        super().__init__(config, layer_number, *args, **options)
        if not self.causal:
            raise ConfigError("attention with a sliding window or soft-capping must be causal")
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] if has_window else None
        self.cap: float | None = config.attn_logit_softcapping
        # A ring cannot apply a mask. All layers gather keys, as the check of the arguments says.
        self._has_ring = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of whole sequences.

        Args:
            query: [s, b, heads, d].
            key: [s, b, query groups, d].
            value: as ``key``.
            attention_mask: None, or the document mask [b, 1, s, s], True for visible keys.

        Returns:
            [s, b, heads · d].
        """
        if not self._needs_mask(len(query)):
            return super().attend(query, key, value, attention_mask)
        dropout = self.dropout if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._dropout_rng(dropout):
            output = self._attend_visible(q, k, v, attention_mask, dropout)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _attend_to_sequence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention to the whole sequence; see the base class.

        With gathered keys, ``attention_mask`` is None or the document numbers of the whole
        sequences, [b, s].
        """
        group, window, documents = self._sequence_group, self.window, attention_mask
        if group is None or not self._needs_mask(len(query) * group.size()):
            return super()._attend_to_sequence(query, key, value, attention_mask)
        dropout = self.dropout if self.training else 0.0

        def attend_chunk(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, end = q.shape[2], k.shape[2]
            begin = 0 if window is None else max(end - queries - window, 0)
            if begin:
                # Views would keep all gathered keys in memory until the backward pass.
                k, v = (x[:, :, begin:].clone() for x in (k, v))
            visible = None
            if documents is not None:
                visible = visible_mask(documents[:, end - queries : end], documents[:, begin:end])
            return self._attend_visible(q, k, v, visible, dropout)

        with self._dropout_rng(dropout):
            output = attend_chunks(query, key, value, group, attend_chunk)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _needs_mask(self, sequence: int) -> bool:
        """Return whether attention in sequences of this length differs from causal attention."""
        has_window = self.window is not None and self.window < sequence - 1
        return has_window or self.cap is not None

    def _attend_visible(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Compute attention in which the last query aligns with the last key.

        Args:
            query: [b, heads, queries, d].
            key: [b, query groups, keys, d].
            value: as ``key``.
            visible: document mask [b, 1, queries, keys], or None.
            dropout: dropout probability of the attention weights.

        Returns:
            [b, heads, queries, d].
        """
        attend = partial(attend_masked, scale=self.scale, dropout=dropout)
        if self.cap is not None:
            attend = partial(attend_softcapped, cap=self.cap, scale=self.scale, dropout=dropout)
        if self.window is not None:
            return attend_in_window(query, key, value, self.window, attend, visible)
        mask = window_mask(query.shape[2], key.shape[2], None, query.device)
        return attend(query, key, value, _intersect(mask, visible))


def window_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the causal mask [queries, keys], in which the last query aligns with the last key.

    Each query attends to the key at its position and to ``window`` previous ones; None means all.
    """
    diagonal = keys - queries
    causal_mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)
    return causal_mask if window is None else causal_mask.triu(diagonal - window)


def _intersect(mask: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return mask if visible is None else mask & visible


def attend_in_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    attend: Attend,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within a window, in which the last query aligns with the last key.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d], with at least as many keys as queries.
        value: as ``key``.
        window: number of previous keys that a query attends to.
        attend: attention with a mask.
        visible: document mask [b, 1, queries, keys], or None.

    Returns:
        [b, heads, queries, d].
    """
    batch, _, queries, _ = query.shape
    earlier_keys = min(key.shape[2] - queries, window)
    key, value = (x[:, :, x.shape[2] - queries - earlier_keys :] for x in (key, value))
    if visible is not None:
        visible = visible[..., visible.shape[3] - queries - earlier_keys :]
    block = -(-max(window, 1) // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
    if queries < _MIN_BLOCKS * block:
        mask = window_mask(queries, key.shape[2], window, query.device)
        return attend(query, key, value, _intersect(mask, visible))
    blocks = -(-queries // block)
    padding = blocks * block - queries

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        """Return [b, n, queries, d], padded at the end, in blocks [b, n, blocks, block, d]."""
        padded = functional.pad(tensor, (0, 0, 0, padding))
        return padded.view(*padded.shape[:2], blocks, block, padded.shape[3])

    query_blocks = cut(query)
    key_blocks, value_blocks = (cut(x[:, :, earlier_keys:]) for x in (key, value))
    # The first block may have fewer keys before it than a block. It has a call and a mask of its
    # own. Views would keep all keys in memory until the backward pass.
    first_keys, first_values = (x[:, :, : block + earlier_keys].clone() for x in (key, value))
    first_mask = window_mask(block, block + earlier_keys, window, query.device)
    mask = window_mask(block, 2 * block, window, query.device)
    if visible is not None:
        first_mask = first_mask & visible[:, :, :block, : block + earlier_keys]
        mask = mask & _cut_mask(visible[..., earlier_keys:], block, blocks)
    first_output = attend(query_blocks[:, :, 0], first_keys, first_values, first_mask)

    def as_batch(tensor: torch.Tensor) -> torch.Tensor:
        """Return [b, n, blocks, length, d] as [b · blocks, n, length, d]."""
        return tensor.transpose(1, 2).flatten(0, 1)

    keys, values = (
        as_batch(torch.cat((x[:, :, :-1], x[:, :, 1:]), 3)) for x in (key_blocks, value_blocks)
    )
    outputs = attend(as_batch(query_blocks[:, :, 1:]), keys, values, mask)
    outputs = outputs.view(batch, blocks - 1, *outputs.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first_output, outputs), 2)[:, :, :queries]


def _cut_mask(visible: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    """Return the document masks of all blocks but the first, which have the keys of the block
    before as well: [b · (blocks - 1), 1, block, 2 · block].

    Args:
        visible: [b, 1, queries, queries].
        block: number of queries in a block.
        blocks: number of blocks.
    """
    padding = blocks * block - visible.shape[2]
    # Padded queries must see a key. Without one, the gradients of their results are no numbers.
    padded = functional.pad(visible, (0, padding, 0, padding), value=1)
    parts = [
        padded[:, :, begin : begin + block, begin - block : begin + block]
        for begin in range(block, blocks * block, block)
    ]
    return torch.stack(parts, 1).flatten(0, 1)


def attend_softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention with scores soft-capped to ``cap``.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d].
        value: as ``key``.
        mask: True for visible keys, broadcastable to [b, heads, queries, keys].
        cap: bound of the scores.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, queries, d].
    """
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1:
        key, value = (x.repeat_interleave(group_size, 1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    scores = torch.tanh(scores / cap) * cap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value
