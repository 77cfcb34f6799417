"""Layers with norms on both sides of attention and MLP, and with rotary positions of their own.

megatron.core adds the output of attention, or of the MLP, to what it was made of as it is. Gemma 2
normalises it first ("sandwich" norms; Ding et al., "CogView", 2021). And in Gemma 3 layers with a
window turn queries and keys by other frequencies than the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from flagscale.train.layers.rotary import half_of_pair
from flagscale.train.models.norm import norm_class

Add = Callable[[Any, torch.Tensor, float], torch.Tensor]
"""Adds an output, and its bias, to what it was made of, after dropout."""


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """megatron.core's layer; with ``sandwich_norm`` it has two norms more, and with
    ``window_rotary_base`` it takes its half of the pair of rotary positions that it gets."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        if config.sandwich_norm:
            norm: Any = norm_class(config)
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
            )
            self.self_attn_bda = _behind(self.post_self_attn_layernorm, self.self_attn_bda)
            self.mlp_bda = _behind(self.post_mlp_layernorm, self.mlp_bda)

    def _forward_attention(
        self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **options: Any
    ) -> Any:
        if rotary_pos_emb is not None and self.config.window_rotary_base:
            rotary_pos_emb = half_of_pair(rotary_pos_emb, second=self._windowed)
        return super()._forward_attention(*args, rotary_pos_emb=rotary_pos_emb, **options)


def _behind(norm: torch.nn.Module, adding: Callable[..., Add]) -> Callable[..., Add]:
    """megatron.core's choice of how to add an output, which is normalised first."""

    def choose(*given: Any) -> Add:
        add = adding(*given)

        def normalise_and_add(output: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            hidden, bias = output
            hidden = norm(hidden if bias is None else hidden + bias)
            return add((hidden, None), residual, dropout)

        return normalise_and_add

    return choose
