from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flagscale.train.optim.gradients import clip, gradient_norm

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_rank")]


def owners(*gradients: list[float]) -> list[Any]:
    made = [torch.nn.Parameter(torch.zeros(len(values))) for values in gradients]
    for owner, values in zip(made, gradients, strict=True):
        owner.grad = torch.tensor(values)
    return made


@pytest.mark.parametrize(
    ("order", "expected"), [(2, 13.0), (1, 19.0), (math.inf, 12.0)], ids=["2", "1", "inf"]
)
def test_norm_over_all_gradients(order: float, expected: float) -> None:
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([[0.0], [12.0]])]
    assert gradient_norm(grads, order).item() == pytest.approx(expected)


def test_norm_of_one_tensor_and_of_none() -> None:
    assert gradient_norm(torch.tensor([3.0, 4.0])).item() == pytest.approx(5.0)
    assert gradient_norm([]).item() == 0.0


def test_norm_of_16_bit_gradients_is_fp32() -> None:
    assert gradient_norm([torch.ones(4, dtype=torch.bfloat16)]).dtype == torch.float32


@pytest.mark.parametrize("as_number", [float, torch.tensor], ids=["number", "tensor"])
def test_clipping_scales_to_the_norm(as_number: Any) -> None:
    made = owners([3.0, 4.0], [12.0])
    clip(made, 6.5, as_number(13.0))
    assert made[0].grad.tolist() == pytest.approx([1.5, 2.0])
    assert made[1].grad.tolist() == pytest.approx([6.0])


def test_small_gradients_are_left_alone() -> None:
    made = owners([3.0, 4.0])
    clip(made, 10.0, 5.0)
    assert made[0].grad.tolist() == [3.0, 4.0]


def test_parameters_without_gradients_are_passed_over() -> None:
    clip([torch.nn.Parameter(torch.zeros(2))], 1.0, 5.0)


def test_nan_stays_visible() -> None:
    assert math.isnan(gradient_norm([torch.tensor([1.0, math.nan])]).item())
