"""Learning rates of the schedule that training builds from its arguments."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments

pytestmark = pytest.mark.torch

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--global-batch-size 4 --lr 1 --min-lr 0.1"
)
DECAYS = {
    "linear": [0.775, 0.55, 0.325],
    "cosine": [0.1 + 0.45 * (1 + cos) for cos in (0.5**0.5, 0, -(0.5**0.5))],
    "minus_sqrt": [0.1 + 0.9 * (1 - fraction**0.5) for fraction in (0.25, 0.5, 0.75)],
    "exponential": [0.1 + 0.9 * (2 * 0.5**fraction - 1) for fraction in (0.25, 0.5, 0.75)],
}
"""Learning rates of the last three of four decay steps of the WSD (warmup-stable-decay) schedule,
by decay style: from 1 to 0.1, after 1/4, 1/2 and 3/4 of the decay.
"""


def compute_learning_rates(arguments: str, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    import torch

    from flagscale.train.optim.setup import build_scheduler

    args = derive_arguments(parse_arguments(f"{RUN} {arguments}".split()), 1)
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = build_scheduler(args, optimizer)
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(args.global_batch_size)
    return learning_rates


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("style", DECAYS)
def test_wsd_warms_up_stays_and_decays(style: str, unit: str) -> None:
    samples_per_unit = 4 if unit == "samples" else 1
    lengths = f"--train-{unit} {10 * samples_per_unit} --lr-warmup-{unit} {2 * samples_per_unit}"
    lengths += f" --lr-decay-style WSD --lr-wsd-decay-{unit} {4 * samples_per_unit}"
    # Two steps of warm-up, four at the maximum (and the first of the decay), four of decay.
    learning_rates = compute_learning_rates(f"{lengths} --lr-wsd-decay-style {style}", 12)
    expected = [0, 0.5, 1, 1, 1, 1, 1, *DECAYS[style], 0.1, 0.1]
    assert learning_rates == pytest.approx(expected)
