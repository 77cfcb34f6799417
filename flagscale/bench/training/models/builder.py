"""Construction of the model under test, with its batches and optimizer: the same for every arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flagscale.bench.training.models import language, vgg
from flagscale.bench.training.models.names import ModelChoice, Size

_VGG: dict[Size, tuple[int, int, int]] = {
    "tiny": (32, 8, 256),
    "base": (32, 1, 4096),
    "large": (224, 1, 4096),
}
"""Pixels, divisor of the widths, width of the hidden layers."""
_LEARNING_RATE = {"tiny": 1e-3, "base": 1e-4, "large": 5e-5}
_SEQUENCE: dict[Size, int] = {"tiny": 64, "base": 128, "large": 384}
_SEED_STEPS = 1_000_003
"""A prime, so that steps and ranks do not share seeds."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A model in training. ``module``, called with a batch, returns the loss, a scalar."""

    module: nn.Module
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    learning_rate: float

    def batch(self, seed: int, step: int, rank: int) -> dict[str, Tensor]:
        """Return the batch of a rank in a step. It depends on the arguments alone."""
        number = (seed * _SEED_STEPS + step) * _SEED_STEPS + rank
        return self.draw(torch.Generator().manual_seed(number % 2**63))

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.module.parameters(), lr=self.learning_rate)


def build_model(
    choice: ModelChoice, *, seed: int, batch: int, sequence: int | None = None
) -> ModelUnderTest:
    """Build a model with weights and batches drawn by ``seed``.

    Args:
        choice: family and size.
        seed: seed of weights and data.
        batch: samples per rank and step.
        sequence: tokens of a sample; None: the size's default. Images have none.
    """
    torch.manual_seed(seed)
    family, size = choice.family, choice.size
    if family == "vgg19":
        pixels, divisor, hidden = _VGG[size]
        module: nn.Module = vgg.Vgg19(pixels, divisor, hidden)
        return ModelUnderTest(module, partial(vgg.draw_images, pixels, batch), _LEARNING_RATE[size])
    length = sequence or _SEQUENCE[size]
    module = language.build_language_model(family, size)
    return ModelUnderTest(
        module, partial(language.batch_source(family, size), batch, length), _LEARNING_RATE[size]
    )
