"""Norms that support sequence parallelism.

megatron.core's norms without Transformer Engine and Apex do not support it. With sequence
parallelism each rank normalizes its part of the sequence, so the gradients of norm weights are
partial sums. The attribute ``sequence_parallel`` of a weight makes megatron.core reduce them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension, with the constructor of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with zero-centered weights (``layernorm_zero_centered_gamma``).

    Weights start at zero. The factor is one plus the weight, added in fp32 because 16 bits would
    round.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalized, with the same shape and dtype."""
        weight = self.weight.float() + 1
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm over the last dimension, with the constructor of a megatron.core spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def select_norm_class(config: Any) -> type[torch.nn.Module]:
    """Return the norm class for ``normalization`` and ``layernorm_zero_centered_gamma``."""
    if config.normalization != "RMSNorm":
        return LayerNorm
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
