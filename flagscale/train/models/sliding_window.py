"""Core attention with a sliding window or with soft-capped scores.

With a sliding window (Beltagy et al., "Longformer", 2020) a token attends to itself and a number of
previous tokens. ``window_attn_skip_freq`` selects the layers with a window; the others use full
causal attention. Scores are soft-capped to ``c tanh(s / c)`` (``attn_logit_softcapping``). torch
has no kernel for that, so scores, softmax and output are computed separately.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from flagscale.errors import ConfigError
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.document_mask import attend_masked


def uses_standard_attention(config: Any) -> bool:
    """Return whether no layer has a sliding window or soft-capped scores.

    :class:`SDPAttention` is sufficient then.
    """
    return not config.window_size and not config.attn_logit_softcapping


class SlidingWindowAttention(SDPAttention):
    """Causal attention with a sliding window or soft-capped scores."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
        """Create the attention of a layer; ``layer_number`` counts from 1 over the whole model."""
        super().__init__(config, layer_number, *args, **options)
        if not self.causal:
            raise ConfigError("sliding-window attention must be causal")
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] if has_window else None
        self.cap: float | None = config.attn_logit_softcapping

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention; shapes as in :class:`SDPAttention`.

        ``attention_mask`` is None or the document mask [b, 1, s, s], True for visible keys.
        """
        if self.window is None and self.cap is None:
            return super().attend(query, key, value, attention_mask)
        sequence, batch = query.shape[:2]
        mask = window_mask(sequence, self.window, query.device)
        if attention_mask is not None:
            mask = mask & attention_mask
        dropout = self.dropout if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._dropout_rng(dropout):
            if self.cap is None:
                output = attend_masked(q, k, v, mask, scale=self.scale, dropout=dropout)
            else:
                output = attend_softcapped(
                    q, k, v, mask, self.cap, scale=self.scale, dropout=dropout
                )
        return output.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def window_mask(sequence: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the causal mask [s, s]: each token attends to itself and ``window`` previous tokens.

    None means all previous tokens.
    """
    causal_mask = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()
    return causal_mask if window is None else causal_mask.triu(-window)


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
        query: [b, heads, s, d].
        key: [b, query groups, s, d].
        value: as ``key``.
        mask: True for visible keys, [s, s] or [b, 1, s, s].
        cap: bound of the scores.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, s, d].
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
