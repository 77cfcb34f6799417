"""A model ready to be trained: its module, its batches, its optimizer; alike under every arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flagscale.bench.training.models import language, vgg
from flagscale.bench.training.models.names import Choice, Size

_VGG: dict[Size, tuple[int, int, int]] = {
    "tiny": (32, 8, 256),
    "base": (32, 1, 4096),
    "large": (224, 1, 4096),
}
"""Pixels, what widths are divided by, width of the hidden layers."""
_LEARNING_RATE = {"tiny": 1e-3, "base": 1e-4, "large": 5e-5}
_SEQUENCE: dict[Size, int] = {"tiny": 64, "base": 128, "large": 384}
_SEED_STEPS = 1_000_003
"""A prime, so that steps and ranks do not share seeds."""


@dataclass(frozen=True)
class Trainee:
    """A model in training. ``module`` called with a batch gives the loss, a scalar."""

    module: nn.Module
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    learning_rate: float

    def batch(self, seed: int, step: int, rank: int) -> dict[str, Tensor]:
        """The batch of one rank in one step, the same whenever it is asked for."""
        number = (seed * _SEED_STEPS + step) * _SEED_STEPS + rank
        return self.draw(torch.Generator().manual_seed(number % 2**63))

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.module.parameters(), lr=self.learning_rate)


def make(choice: Choice, *, seed: int, batch: int, sequence: int | None = None) -> Trainee:
    """A model with weights and batches by ``seed``.

    Args:
        choice: which.
        seed: of weights and data.
        batch: samples of a rank and step.
        sequence: tokens of a sample; the size's own where it is None. Images have none.
    """
    torch.manual_seed(seed)
    family, size = choice.family, choice.size
    if family == "vgg19":
        pixels, divisor, hidden = _VGG[size]
        module: nn.Module = vgg.Vgg19(pixels, divisor, hidden)
        return Trainee(module, partial(vgg.images, pixels, batch), _LEARNING_RATE[size])
    length = sequence or _SEQUENCE[size]
    module = language.build(family, size)
    return Trainee(
        module, partial(language.data(family, size), batch, length), _LEARNING_RATE[size]
    )
