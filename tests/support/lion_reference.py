"""Record the weights that emerging-optimizers' Lion reaches, for test_lion.py.

usage: lion_reference.py > tests/golden/train/lion.json

It requires the packages torch and emerging-optimizers (0.3.0 was used), which needs Python 3.12.
Weights and gradients are those of muon_reference.py.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from support.muon_reference import draw

SHAPE, STEPS = (5, 6), 4
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2, "betas": (0.95, 0.98), "weight_decay": 0.1},
    "other": {"lr": 3e-2, "betas": (0.5, 0.9), "weight_decay": 0.0},
}
"""Options of each case."""


def train(optimizer: Any, weight: Any) -> None:
    """Take some steps with gradients from a formula."""
    for step in range(1, STEPS + 1):
        weight.grad = draw(SHAPE, step)
        optimizer.step()


def main() -> None:
    from emerging_optimizers.scalar_optimizers import Lion

    results = {}
    for name, options in CASES.items():
        weight = torch.nn.Parameter(draw(SHAPE, 0))
        train(Lion([weight], **options), weight)
        results[name] = weight.tolist()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
