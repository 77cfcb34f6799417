"""Core attention with a sliding window, or with bounded scores.

A window (Beltagy et al., "Longformer", 2020) leaves each token its own place and a number of places
before it. In a model that has windows in some of its layers alone (``window_attn_skip_freq``) the
others attend to all that stands before a token. Scores are bounded by ``c tanh(s / c)``
(``attn_logit_softcapping``), for which torch has no kernel: these are computed in plain steps.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from flagscale.errors import ConfigError
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.documents import attend_masked


def are_plain(config: Any) -> bool:
    """Whether no layer has a window or bounds its scores."""
    return not config.window_size and not config.attn_logit_softcapping


class WindowedAttention(SDPAttention):
    """Causal attention over the heads of this tensor-parallel rank."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
        """``layer_number``: counted from 1 over the whole model."""
        super().__init__(config, layer_number, *args, **options)
        if not self.causal:
            raise ConfigError("attention to a window is causal here")
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] if windowed else None
        self.cap: float | None = config.attn_logit_softcapping

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend; tensors are as in :class:`SDPAttention`. ``attention_mask``: None, or what each
        token sees of its document, ``[batch, 1, sequence, sequence]``."""
        if self.window is None and self.cap is None:
            return super().forward(query, key, value, attention_mask, **options)
        sequence, batch = query.shape[:2]
        seen = visible(sequence, self.window, query.device)
        if attention_mask is not None:
            seen = seen & attention_mask
        dropout = self.dropout if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_state(dropout):
            if self.cap is None:
                out = attend_masked(q, k, v, seen, scale=self.scale, dropout=dropout)
            else:
                out = attend_bounded(q, k, v, seen, self.cap, scale=self.scale, dropout=dropout)
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def visible(sequence: int, window: int | None, device: torch.device) -> torch.Tensor:
    """What each token attends to, ``[sequence, sequence]``: itself and ``window`` tokens before it,
    or all of them."""
    seen = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(-window)


def attend_bounded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    cap: float,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attention whose scores are at most ``cap``.

    Args:
        query: ``[batch, heads, sequence, width]``.
        key: as ``query``, with as many heads as there are query groups.
        value: as ``key``.
        seen: what each query attends to, as :func:`visible` or for each of the batch.
        cap: the bound.
        scale: of the scores; one over the root of ``width`` if None.
        dropout: share of the probabilities that is dropped.

    Returns:
        ``[batch, heads, sequence, width]``.
    """
    heads = query.shape[1] // key.shape[1]
    if heads > 1:
        key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    scores = torch.tanh(scores / cap) * cap
    scores = scores.float().masked_fill(~seen, float("-inf"))
    shares = torch.softmax(scores, -1).to(query.dtype)
    return torch.nn.functional.dropout(shares, dropout) @ value
