"""GEMMs of weights with any number of rows, split into an aligned and a small part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.train.layers import unaligned_gemm
from flagscale.train.layers.linear import _LinearFunction

pytestmark = pytest.mark.torch


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(9, 60),
    width=st.integers(1, 9),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_split_products_are_the_products(rows: int, width: int, shape: list[int]) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + width)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    input_ = torch.randn(*shape, width, generator=generator, dtype=torch.float64)
    output = unaligned_gemm.split_linear(input_, weight)
    torch.testing.assert_close(output, input_ @ weight.t())
    is_matrix = output.numel() > rows  # the stride of a single row means nothing
    assert not is_matrix or output.reshape(-1, rows).stride(0) % 8 == 0
    for gradient in (output, torch.randn(*shape, rows, generator=generator, dtype=torch.float64)):
        product = unaligned_gemm.split_multiply(gradient, weight)
        torch.testing.assert_close(product, gradient @ weight)
        aligned = unaligned_gemm.align_row_starts(gradient)
        assert not is_matrix or aligned.stride(0) % 8 == 0
        torch.testing.assert_close(aligned, gradient.reshape(-1, rows))
    parts = unaligned_gemm.split_rows(weight)
    assert torch.cat([weight[part] for part in parts]).equal(weight)
    assert len(weight[parts[0]]) % 8 == 0


def test_gradients_of_a_linear_layer_with_odd_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unaligned_gemm, "needs_split", lambda weight: weight.shape[0] % 8 != 0)
    weight = torch.randn(37, 5, dtype=torch.float64, requires_grad=True)
    input_ = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)

    def multiply(values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _LinearFunction.apply(  # type: ignore[no-untyped-call]
            values, matrix, None, "none", 1, ""
        )
        return result

    assert torch.autograd.gradcheck(multiply, (input_, weight))
