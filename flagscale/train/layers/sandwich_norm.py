"""Transformer layers of Gemma: sandwich norms, and separate rotary positions for window layers.

megatron.core adds the output of attention and MLP to the residual without normalization. Gemma 2
normalizes it first (sandwich norm; Ding et al., "CogView", 2021). In Gemma 3, sliding-window layers
use other rotary frequencies than full-attention layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from flagscale.train.layers.rotary import select_rotary_half
from flagscale.train.models.norm import select_norm_class

BiasDropoutAdd = Callable[[Any, torch.Tensor, float], torch.Tensor]
"""Function that adds an output and its bias to the residual after dropout (bias-dropout-add)."""


class SandwichNormLayer(TransformerLayer):  # type: ignore[misc]
    """megatron.core's layer with the features of Gemma.

    ``sandwich_norm`` adds two norms. With ``window_rotary_base`` the layer selects its half of a
    pair of rotary positions.
    """

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        if config.sandwich_norm:
            norm: Any = select_norm_class(config)
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
            )
            self.self_attn_bda = _normalize_before_add(
                self.post_self_attn_layernorm, self.self_attn_bda
            )
            self.mlp_bda = _normalize_before_add(self.post_mlp_layernorm, self.mlp_bda)

    def _forward_attention(
        self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **options: Any
    ) -> Any:
        if rotary_pos_emb is not None and self.config.window_rotary_base:
            rotary_pos_emb = select_rotary_half(rotary_pos_emb, second=self._has_window)
        return super()._forward_attention(*args, rotary_pos_emb=rotary_pos_emb, **options)


def _normalize_before_add(
    norm: torch.nn.Module, bda_factory: Callable[..., BiasDropoutAdd]
) -> Callable[..., BiasDropoutAdd]:
    """Return a bias-dropout-add factory that normalizes the output first."""

    def build_bda(*args: Any) -> BiasDropoutAdd:
        add = bda_factory(*args)

        def normalize_and_add(output: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            hidden, bias = output
            hidden = norm(hidden if bias is None else hidden + bias)
            return add((hidden, None), residual, dropout)

        return normalize_and_add

    return build_bda
