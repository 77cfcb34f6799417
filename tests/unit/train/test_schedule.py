"""How the learning rate goes, by the schedule that training builds from its arguments."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve

pytestmark = pytest.mark.torch

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--global-batch-size 4 --lr 1 --min-lr 0.1"
)
DECAYS = {
    "linear": [0.775, 0.55, 0.325],
    "cosine": [0.1 + 0.45 * (1 + cos) for cos in (0.5**0.5, 0, -(0.5**0.5))],
    "minus_sqrt": [0.1 + 0.9 * (1 - share**0.5) for share in (0.25, 0.5, 0.75)],
    "exponential": [0.1 + 0.9 * (2 * 0.5**share - 1) for share in (0.25, 0.5, 0.75)],
}
"""Of WSD's last four steps the learning rates of the second and those behind it."""


def rates(arguments: str, steps: int) -> list[float]:
    """The learning rate of each step."""
    import torch

    from flagscale.train.optim.setup import build_scheduler

    args = resolve(parse_arguments(f"{RUN} {arguments}".split()), 1)
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = build_scheduler(args, optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(args.global_batch_size)
    return found


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("style", DECAYS)
def test_wsd_warms_up_stays_and_decays(style: str, unit: str) -> None:
    each = 4 if unit == "samples" else 1
    lengths = f"--train-{unit} {10 * each} --lr-warmup-{unit} {2 * each}"
    lengths += f" --lr-decay-style WSD --lr-wsd-decay-{unit} {4 * each}"
    found = rates(f"{lengths} --lr-wsd-decay-style {style}", 12)
    wanted = [0, 0.5, 1, 1, 1, 1, 1, *DECAYS[style], 0.1, 0.1]
    assert found == pytest.approx(wanted)
