"""Norms that work under sequence parallelism.

megatron.core's fallback without Transformer Engine and Apex refuses sequence parallelism. Each
rank then normalises its part of the sequence, so the gradients of the norm's weights are partial
sums; ``sequence_parallel`` on a weight is how megatron.core knows to add them up.
"""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension, as a module of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension, as a module of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """The norm that ``normalization`` (``RMSNorm`` or ``LayerNorm``) names."""
    return RMSNorm if normalization == "RMSNorm" else LayerNorm
