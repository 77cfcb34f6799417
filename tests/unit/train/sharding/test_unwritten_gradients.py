"""Accumulators without values: the first gradient is written to them, later ones are added."""

from __future__ import annotations

import pytest
import torch

from flagscale.train.layers import wgrad_accumulation
from flagscale.train.layers.wgrad_accumulation import (
    add_product,
    add_rows,
    add_tensor,
    is_uninitialized,
    mark_unwritten,
    pop_unwritten,
)
from flagscale.train.sharding.deferred import DeferredAllocation, lacks_memory

pytestmark = pytest.mark.torch

GRADIENT, INPUT = torch.randn(5, 3), torch.randn(5, 4)
VALUE = torch.randn(3, 4)
ADDITIONS = {
    "product": (lambda total: add_product(total, GRADIENT, INPUT), GRADIENT.t() @ INPUT),
    "product of 16 bits": (
        lambda total: add_product(total, GRADIENT.bfloat16(), INPUT.bfloat16()),
        (GRADIENT.bfloat16().t() @ INPUT.bfloat16()).float(),
    ),
    "tensor": (lambda total: add_tensor(total, VALUE), VALUE),
    "rows": (
        lambda total: add_rows(total, torch.tensor([2, 0, 2]), INPUT[:3]),
        torch.stack([INPUT[1], torch.zeros(4), INPUT[0] + INPUT[2]]),
    ),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_first_gradient_is_written_and_the_next_is_added(name: str) -> None:
    add, expected = ADDITIONS[name]
    total = torch.full((3, 4), float("nan"))
    mark_unwritten(total, is_zero=False)
    add(total)
    torch.testing.assert_close(total, expected)
    add(total)
    torch.testing.assert_close(total, 2 * expected)
    assert not pop_unwritten(total)


def test_gradient_that_goes_elsewhere_is_noticed() -> None:
    total = torch.zeros(3, 4)
    mark_unwritten(total, is_zero=True)
    add_product(total.clone(), GRADIENT, INPUT)
    assert not is_uninitialized(total)
    assert pop_unwritten(total)
    assert not wgrad_accumulation._unwritten


def test_matrices_of_a_deferred_model_have_no_memory() -> None:
    with DeferredAllocation():
        matrix, vector = torch.empty(4, 5, device="cpu"), torch.empty(5, device="cpu")
        elsewhere = torch.empty(4, 5)
    assert lacks_memory(matrix) and matrix.shape == (4, 5)
    assert not lacks_memory(vector) and not lacks_memory(elsewhere)
