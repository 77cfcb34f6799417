"""Norms that work under sequence parallelism.

megatron.core's fallback without Transformer Engine and Apex refuses sequence parallelism. Each
rank then normalises its part of the sequence, so the gradients of the norm's weights are partial
sums; ``sequence_parallel`` on a weight is how megatron.core knows to add them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension, as a module of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """The same with weights that count from 1: they start as zeros, and what is multiplied by is
    one more, which 16 bits would round."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` normalised, of the same shape and precision."""
        weight = self.weight.float() + 1
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension, as a module of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(config: Any) -> type[torch.nn.Module]:
    """The norm that a model's configuration names: ``normalization`` (``RMSNorm`` or
    ``LayerNorm``), ``layernorm_zero_centered_gamma``."""
    if config.normalization != "RMSNorm":
        return LayerNorm
    return ZeroCentredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
