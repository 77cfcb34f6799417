"""8-bit products that are scaled by blocks: the order of scales, and what an outlier costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.train.layers import blocks, fp8
from flagscale.train.layers.blocks import BLOCK

pytestmark = pytest.mark.torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(16, 128, 128), (48, 144, 80), (128, 640, 16), (272, 384, 512), (512, 16, 688)]
"""Tokens, input and output features: multiples of 16, some of them of 128 and of 4 x 128."""


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitude changes along rows and columns."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=draw)
    return made * torch.logspace(-1, 1, rows)[:, None] * torch.logspace(1, -1, columns)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def in_blocks(size: int) -> int:
    return -(-size // BLOCK)


def fits(strides: tuple[int, ...], shape: torch.Size, wanted: tuple[int, int]) -> bool:
    """Strides of dimensions of one do not count, as long as they are 1."""
    pairs = zip(shape, strides, wanted, strict=True)
    return all(stride == want or size == stride == 1 for size, stride, want in pairs)


@pytest.mark.parametrize(("rows", "columns"), [size[1:] for size in SIZES])
def test_scales_lie_as_the_kernel_reads_them(rows: int, columns: int) -> None:
    """cuBLAS: scales of 1 x 128 lie column after column, rows of scales of squares are filled up to
    a multiple of four."""
    tensor = numbers(rows, columns)
    for values, scale, long, wide in (
        (*blocks.along_rows(tensor, E5M2), rows, columns),
        (*blocks.along_columns(tensor, E5M2), columns, rows),
    ):
        assert values.shape == (long, BLOCK * in_blocks(wide))
        assert values.stride() == (values.shape[1], 1)
        assert scale.shape == (long, in_blocks(wide))
        assert fits(scale.stride(), scale.shape, (1, long))
        assert scale.dtype == torch.float32
    cast = blocks.cast_weight(tensor, E4M3)
    for values, scale, long, wide in (
        (*cast[:2], rows, columns),
        (*cast[2:], columns, rows),
    ):
        across = -(-in_blocks(wide) // 4) * 4
        assert values.shape == (long, BLOCK * in_blocks(wide))
        assert values.stride() == (values.shape[1], 1)
        assert scale.shape == (in_blocks(long), across)
        assert fits(scale.t().stride(), scale.t().shape, (1, across))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("rows", "columns", "other"), SIZES)
def test_products_are_those_of_what_is_meant(
    rows: int, columns: int, other: int, dtype: torch.dtype
) -> None:
    """Forward, and backward for both factors, whatever the sizes."""
    left, weight = numbers(rows, columns), numbers(other, columns, seed=1)
    gradient = numbers(rows, other, seed=2)
    cast = blocks.cast_weight(weight, E4M3)
    near = 0.05 if dtype == E4M3 else 0.08
    for operands, expected, squares in (
        ((*blocks.along_rows(left, dtype), *cast[:2]), left @ weight.t(), True),
        ((*blocks.along_rows(gradient, dtype), *cast[2:]), gradient @ weight, True),
        (
            (*blocks.along_columns(gradient, dtype), *blocks.along_columns(left, E4M3)),
            gradient.t() @ left,
            False,
        ),
    ):
        found = blocks.multiply(*operands, torch.float32, squares=squares)
        assert found.shape == expected.shape
        assert error(found, expected) < near


def test_a_transposed_weight_is_the_same_numbers() -> None:
    values, scale, transposed, transposed_scale = blocks.cast_weight(numbers(144, 272), E4M3)
    assert torch.equal(values[:, :272].float(), transposed.float().t()[:144])
    assert torch.equal(scale[:, :3], transposed_scale[:, :2].t())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_blocks_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    tensor = numbers(128, 384)
    tensor[:, 128:256] = 0
    for values, scale in (blocks.along_rows(tensor, dtype), blocks.cast_weight(tensor, dtype)[:2]):
        assert not values[:, 128:256].float().any()
        assert torch.isfinite(scale).all()
    values, scale = blocks.along_columns(torch.zeros(128, 32), dtype)
    assert not values.float().any()
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_blocks_keep_any_magnitude(exponent: int) -> None:
    tensor = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    values, scale = blocks.along_rows(tensor.bfloat16(), E4M3)
    meant = values.float() * scale.repeat_interleave(BLOCK, 1)
    assert error(meant, tensor) < 0.04


FACTORS = {
    "output": ("input", "weight"),
    "input": ("gradient", "weight"),
    "weight": ("gradient", "input"),
}
"""Of what the three products of a layer are made."""


@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_an_outlier_costs_its_own_block_alone(where: str) -> None:
    """One number that is a million times the others: with one scale for all, those are nothing."""
    factors = {
        name: torch.randn(512, 512, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("input", "weight", "gradient"))
    }
    factors[where][3, 5] = 1e6
    exact = products(*factors.values())
    found = {
        scaling: through_a_layer(*factors.values(), scaling)
        for scaling in ("tensorwise", "blockwise")
    }
    for name, expected in exact.items():
        # A product that sums over the outlier is the outlier's; of the others the middle one.
        off = {
            scaling: float(
                ((values[name].float() - expected).abs() / expected.abs().clamp(min=1)).median()
            )
            for scaling, values in found.items()
        }
        assert off["blockwise"] < 0.1, name
        if where in FACTORS[name]:
            assert off["tensorwise"] > 5 * off["blockwise"], name


def products(
    input_: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output, and the gradients of input and weight."""
    of_input, of_weight = gradient @ weight, gradient.t() @ input_
    return {"output": input_ @ weight.t(), "input": of_input, "weight": of_weight}


def through_a_layer(
    input_: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, scaling: Any
) -> dict[str, torch.Tensor]:
    """The same in 8 bits."""
    input_, weight = (factor.bfloat16().requires_grad_() for factor in (input_, weight))
    cast = fp8.cast_weight(weight.detach(), scaling)
    output = fp8.Fp8Linear.apply(input_, weight, None, *cast, "e4m3", scaling, True, "none", 1, "")
    output.backward(gradient.bfloat16())
    assert input_.grad is not None
    assert weight.grad is not None
    return {"output": output.detach(), "input": input_.grad, "weight": weight.grad}
