"""Record the weights that emerging-optimizers' Muon reaches, for test_muon.py.

usage: muon_reference.py > tests/golden/train/muon.json

It requires the packages torch and emerging-optimizers (0.3.0 was used), which needs Python 3.12.
Weights and gradients are small numbers from a formula, the same on every machine.
"""

from __future__ import annotations

import json
from typing import Any

import torch

STEPS = 3
QKV_ROWS = (4, 2, 2)
"""Rows of queries, keys and values of a query group."""
DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "use_nesterov": False,
    "num_ns_steps": 5,
    "scale_mode": "spectral",
    "extra_scale_factor": 1.0,
    "fp32_matmul_prec": "highest",
}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "tall": ((7, 4), {}),
    "wide": ((4, 7), {"use_nesterov": True}),
    "row": ((1, 6), {"use_nesterov": True}),
    "unit-rms-norm": ((4, 6), {"scale_mode": "unit_rms_norm", "num_ns_steps": 3}),
    "shape-scaling": ((6, 4), {"scale_mode": "shape_scaling", "num_ns_steps": 7}),
    "factor": ((5, 5), {"extra_scale_factor": 0.2, "weight_decay": 0.0}),
    "bf16": ((5, 7), {"fp32_matmul_prec": "medium"}),
    "qkv": ((2 * sum(QKV_ROWS), 5), {}),
}
"""Shape and options of each case. The matrix "qkv" has two query groups, whose queries, keys and
values are three matrices.
"""


def draw(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return numbers from -0.5 to 0.5."""
    numbers = [
        (index * 2654435761 + seed * 40503 * 65537) % 2**32 * 2246822519 % 2**32 / 2**32 - 0.5
        for index in range(1, shape[0] * shape[1] + 1)
    ]
    return torch.tensor(numbers).view(shape)


def split_qkv(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices of queries, keys and values."""
    columns = matrix.shape[1]
    groups = matrix.view(-1, sum(QKV_ROWS), columns)
    return [block.reshape(-1, columns) for block in torch.split(groups, QKV_ROWS, dim=1)]


def _train(name: str, shape: tuple[int, int], options: dict[str, Any]) -> list[Any]:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    split = split_qkv if name == "qkv" else lambda matrix: [matrix]
    weights = [torch.nn.Parameter(part.clone()) for part in split(draw(shape, 0))]
    names = {"use_nesterov": "nesterov"}
    optimizer = Muon(weights, **{names.get(key, key): value for key, value in options.items()})
    for step in range(1, STEPS + 1):
        for weight, gradient in zip(weights, split(draw(shape, step)), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.tolist() for weight in weights]


def main() -> None:
    results = {
        name: _train(name, shape, {**DEFAULTS, **options})
        for name, (shape, options) in CASES.items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
