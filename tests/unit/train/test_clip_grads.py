"""Gradient norm and clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flagscale.train.optim.clip_grads import clip_grads_by_norm, compute_grad_norm

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("single_process_group")]


def parameters_with_gradients(*gradients: list[float]) -> list[Any]:
    parameters = [torch.nn.Parameter(torch.zeros(len(values))) for values in gradients]
    for parameter, values in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(values)
    return parameters


@pytest.mark.parametrize(
    ("order", "expected"), [(2, 13.0), (1, 19.0), (math.inf, 12.0)], ids=["2", "1", "inf"]
)
def test_norm_over_all_gradients(order: float, expected: float) -> None:
    # sqrt(3² + 4² + 12²) = 13, 3 + 4 + 12 = 19, and the maximum is 12.
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([[0.0], [12.0]])]
    assert compute_grad_norm(grads, order).item() == pytest.approx(expected)


def test_norm_of_a_single_tensor_and_of_no_gradients() -> None:
    assert compute_grad_norm(torch.tensor([3.0, 4.0])).item() == pytest.approx(5.0)
    assert compute_grad_norm([]).item() == 0.0


def test_norm_of_16_bit_gradients_is_fp32() -> None:
    norm = compute_grad_norm([torch.ones(1001, dtype=torch.bfloat16)])
    assert norm.item() == pytest.approx(math.sqrt(1001), rel=1e-6)  # bf16 has 31.625


@pytest.mark.parametrize("convert", [float, torch.tensor], ids=["number", "tensor"])
def test_clipping_scales_gradients_to_the_maximum_norm(convert: Any) -> None:
    parameters = parameters_with_gradients([3.0, 4.0], [12.0])
    # The maximum is half of the norm.
    clip_grads_by_norm(parameters, 6.5, convert(13.0))
    assert parameters[0].grad.tolist() == pytest.approx([1.5, 2.0])
    assert parameters[1].grad.tolist() == pytest.approx([6.0])


def test_small_gradients_are_unchanged() -> None:
    parameters = parameters_with_gradients([3.0, 4.0])
    clip_grads_by_norm(parameters, 10.0, 5.0)
    assert parameters[0].grad.tolist() == [3.0, 4.0]


def test_parameters_without_gradients_are_skipped() -> None:
    clip_grads_by_norm([torch.nn.Parameter(torch.zeros(2))], 1.0, 5.0)


def test_nan_is_propagated() -> None:
    assert math.isnan(compute_grad_norm([torch.tensor([1.0, math.nan])]).item())
