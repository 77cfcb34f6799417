"""Blockwise FP8 GEMMs: memory order of the scales, accuracy, and the effect of outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.train.layers import fp8, fp8_blockwise
from flagscale.train.layers.fp8_blockwise import BLOCK_SIZE

pytestmark = pytest.mark.torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(16, 128, 128), (48, 144, 80), (128, 640, 16), (272, 384, 512), (512, 16, 688)]
"""Tokens, input and output features: multiples of 16, some of 128 and of 4 x 128."""


def random_numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers whose magnitude varies along rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * torch.logspace(-1, 1, rows)[:, None] * torch.logspace(1, -1, columns)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def count_blocks(size: int) -> int:
    return -(-size // BLOCK_SIZE)


def strides_match(strides: tuple[int, ...], shape: torch.Size, expected: tuple[int, int]) -> bool:
    """Compare strides, except those of dimensions of size 1."""
    pairs = zip(shape, strides, expected, strict=True)
    return all(
        stride == expected_stride or size == stride == 1 for size, stride, expected_stride in pairs
    )


@pytest.mark.parametrize(("rows", "columns"), [size[1:] for size in SIZES])
def test_scales_have_the_memory_order_of_cublas(rows: int, columns: int) -> None:
    """cuBLAS expects column-major scales of rows, and padded rows of scales of squares."""
    tensor = random_numbers(rows, columns)
    for values, scale, outer, inner in (
        (*fp8_blockwise.quantize_rows(tensor, E5M2), rows, columns),
        (*fp8_blockwise.quantize_columns(tensor, E5M2), columns, rows),
    ):
        assert values.shape == (outer, BLOCK_SIZE * count_blocks(inner))
        assert values.stride() == (values.shape[1], 1)
        assert scale.shape == (outer, count_blocks(inner))
        assert strides_match(scale.stride(), scale.shape, (1, outer))
        assert scale.dtype == torch.float32
    quantized_weight = fp8_blockwise.quantize_weight(tensor, E4M3)
    for values, scale, outer, inner in (
        (*quantized_weight[:2], rows, columns),
        (*quantized_weight[2:], columns, rows),
    ):
        padded_blocks = -(-count_blocks(inner) // 4) * 4
        assert values.shape == (outer, BLOCK_SIZE * count_blocks(inner))
        assert values.stride() == (values.shape[1], 1)
        assert scale.shape == (count_blocks(outer), padded_blocks)
        assert strides_match(scale.t().stride(), scale.t().shape, (1, padded_blocks))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("rows", "columns", "out_features"), SIZES)
def test_gemms_are_close_to_fp32(
    rows: int, columns: int, out_features: int, dtype: torch.dtype
) -> None:
    """The GEMMs of the forward pass, of the input gradient and of the weight gradient."""
    left, weight = random_numbers(rows, columns), random_numbers(out_features, columns, seed=1)
    gradient = random_numbers(rows, out_features, seed=2)
    quantized_weight = fp8_blockwise.quantize_weight(weight, E4M3)
    tolerance = 0.05 if dtype == E4M3 else 0.08
    for operands, expected, square_blocks in (
        (
            (*fp8_blockwise.quantize_rows(left, dtype), *quantized_weight[:2]),
            left @ weight.t(),
            True,
        ),
        (
            (*fp8_blockwise.quantize_rows(gradient, dtype), *quantized_weight[2:]),
            gradient @ weight,
            True,
        ),
        (
            (
                *fp8_blockwise.quantize_columns(gradient, dtype),
                *fp8_blockwise.quantize_columns(left, E4M3),
            ),
            gradient.t() @ left,
            False,
        ),
    ):
        actual = fp8_blockwise.multiply_blockwise(
            *operands, torch.float32, square_blocks=square_blocks
        )
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < tolerance


def test_transposed_weight_has_equal_values() -> None:
    values, scale, transposed, transposed_scale = fp8_blockwise.quantize_weight(
        random_numbers(144, 272), E4M3
    )
    assert torch.equal(values[:, :272].float(), transposed.float().t()[:144])
    assert torch.equal(scale[:, :3], transposed_scale[:, :2].t())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_blocks_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    tensor = random_numbers(128, 384)
    tensor[:, 128:256] = 0
    for values, scale in (
        fp8_blockwise.quantize_rows(tensor, dtype),
        fp8_blockwise.quantize_weight(tensor, dtype)[:2],
    ):
        assert not values[:, 128:256].float().any()
        assert torch.isfinite(scale).all()
    values, scale = fp8_blockwise.quantize_columns(torch.zeros(128, 32), dtype)
    assert not values.float().any()
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_rows_of_any_magnitude_are_precise(exponent: int) -> None:
    tensor = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    values, scale = fp8_blockwise.quantize_rows(tensor.bfloat16(), E4M3)
    dequantized = values.float() * scale.repeat_interleave(BLOCK_SIZE, 1)
    assert relative_error(dequantized, tensor) < 0.04


OPERANDS = {
    "output": ("input", "weight"),
    "input": ("gradient", "weight"),
    "weight": ("gradient", "input"),
}
"""Operands of the three GEMMs of a layer, by their result."""
TOKENS, FEATURES = 16, 3 * BLOCK_SIZE
LAYER_SHAPES = {
    "input": (TOKENS, FEATURES),
    "weight": (FEATURES, FEATURES),
    "gradient": (TOKENS, FEATURES),
}
"""Shapes of a layer's tensors. Most output features are outside the outlier's block of a weight.
Few tokens, because a CPU multiplies FP8 numbers one by one.
"""


@pytest.mark.parametrize("outlier_tensor", ["input", "weight", "gradient"])
def test_outlier_affects_its_own_block_only(outlier_tensor: str) -> None:
    """An outlier is a million times larger than the other numbers. With one scale per tensor these
    are rounded to zero.
    """
    tensors = {
        name: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        for seed, (name, shape) in enumerate(LAYER_SHAPES.items())
    }
    tensors[outlier_tensor][3, 5] = 1e6
    fp32_results = compute_fp32_results(*tensors.values())
    results = {
        scaling: run_fp8_layer(*tensors.values(), scaling)
        for scaling in ("tensorwise", "blockwise")
    }
    for name, expected in fp32_results.items():
        # The median ignores the sums that include the outlier.
        median_errors = {
            scaling: float(
                ((values[name].float() - expected).abs() / expected.abs().clamp(min=1)).median()
            )
            for scaling, values in results.items()
        }
        assert median_errors["blockwise"] < 0.1, name
        if outlier_tensor in OPERANDS[name]:
            assert median_errors["tensorwise"] > 5 * median_errors["blockwise"], name


def compute_fp32_results(
    input_: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return output and gradients of input and weight, computed exactly."""
    input_gradient, weight_gradient = gradient @ weight, gradient.t() @ input_
    return {"output": input_ @ weight.t(), "input": input_gradient, "weight": weight_gradient}


def run_fp8_layer(
    input_: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, scaling: Any
) -> dict[str, torch.Tensor]:
    """Return output and gradients of input and weight, computed in FP8."""
    input_, weight = (tensor.bfloat16().requires_grad_() for tensor in (input_, weight))
    quantized_weight = fp8.quantize_weight(weight.detach(), scaling)
    output = fp8.Fp8Linear.apply(
        input_, weight, None, *quantized_weight, "e4m3", scaling, True, "none", 1, ""
    )
    output.backward(gradient.bfloat16())
    assert input_.grad is not None
    assert weight.grad is not None
    return {"output": output.detach(), "input": input_.grad, "weight": weight.grad}
