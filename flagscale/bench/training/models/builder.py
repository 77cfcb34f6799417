"""Construction of the model under test, with its batches and optimizer: the same for every arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flagscale.bench.training.models import language, vgg
from flagscale.bench.training.models.names import ModelChoice, Size

_VGG_SIZES: dict[Size, tuple[int, int, int]] = {
    "tiny": (32, 8, 256),
    "base": (32, 1, 4096),
    "large": (224, 1, 4096),
}
"""Height and width of images in pixels, divisor of the widths of convolutions, and width of the
hidden layers.
"""
_LEARNING_RATE = {"tiny": 1e-3, "base": 1e-4, "large": 5e-5}
_SEQUENCE_LENGTHS: dict[Size, int] = {"tiny": 64, "base": 128, "large": 384}
_SEED_FACTOR = 1_000_003
"""Factor that separates the seeds of different steps and ranks; a prime."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A model in training. ``module``, called with a batch, returns the loss, a scalar."""

    module: nn.Module
    draw_batch: Callable[[torch.Generator], dict[str, Tensor]]
    """Draw a batch, the keyword arguments of ``module``."""
    learning_rate: float

    def batch(self, seed: int, step: int, rank: int) -> dict[str, Tensor]:
        """Return the batch of a rank in a step. It depends on the arguments alone."""
        number = (seed * _SEED_FACTOR + step) * _SEED_FACTOR + rank
        return self.draw_batch(torch.Generator().manual_seed(number % 2**63))

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
        pixels, divisor, hidden = _VGG_SIZES[size]
        module: nn.Module = vgg.Vgg19(pixels, divisor, hidden)
        return ModelUnderTest(module, partial(vgg.draw_images, pixels, batch), _LEARNING_RATE[size])
    length = sequence or _SEQUENCE_LENGTHS[size]
    module = language.build_language_model(family, size)
    return ModelUnderTest(
        module, partial(language.batch_source(family, size), batch, length), _LEARNING_RATE[size]
    )
