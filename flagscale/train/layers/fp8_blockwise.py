"""Blockwise FP8 GEMMs: operands have one scale per block of 128 numbers.

Blocks of activations and gradients are 128 numbers of a row. Blocks of weights are squares of
128 x 128 (DeepSeek-AI, "DeepSeek-V3", 2024). An outlier thus reduces the precision of its own block
only. A weight gradient sums over tokens, so its operands have blocks of 128 tokens per feature. The
scale of a square serves a weight and its transpose. Sizes that are not multiples of 128 are padded
with zeros. Scales are fp32, in the memory order that cuBLAS expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flagscale.accelerators.registry import list_accelerators
from flagscale.train.layers.jit import compiled_if_faster

BLOCK_SIZE = 128
MAX_WEIGHT_SHAPES = 64
"""Limit of weight shapes per compiled function, with a margin: MLA with shared experts has 11."""
_SCALE_ALIGNMENT = 4
"""cuBLAS requires that the row stride of the scales of squares is a multiple of this number; the
padding is never read."""
_MIN_MAGNITUDE = 1e-30
"""Lower bound of the largest magnitude of a block, so that the scale of zeros is finite."""
_LIBRARY: Any = torch.library.Library("flagscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "multiply_blocks(Tensor left, Tensor left_scale, Tensor right, Tensor right_scale, "
    "bool squares, ScalarType dtype) -> Tensor",
    # A compiler must not change the memory order of the scales.
    tags=(torch.Tag.needs_exact_strides,),
)


def quantize_rows(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``tensor`` with one scale per 128 numbers of a row.

    Args:
        tensor: [rows, columns].
        dtype: FP8 dtype of the values.

    Returns:
        Values [rows, columns], padded to whole blocks, and scales [rows, blocks] in column-major
        order.
    """
    blocks = _pad_to_multiple(tensor, 0, BLOCK_SIZE).reshape(len(tensor), -1, BLOCK_SIZE)
    values, scale = _quantize_blocks(blocks, dtype, 2)
    return values.flatten(1), scale.squeeze(2).t().contiguous().t()


def quantize_columns(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the transpose of ``tensor`` with one scale per 128 numbers of a column.

    Args:
        tensor: [rows, columns].
        dtype: FP8 dtype of the values.

    Returns:
        Values [columns, rows], padded to whole blocks, and scales [columns, blocks] in column-major
        order.
    """
    blocks = _pad_to_multiple(tensor, BLOCK_SIZE, 0).reshape(-1, BLOCK_SIZE, tensor.shape[1])
    values, scale = _quantize_blocks(blocks, dtype, 1)
    return values.flatten(0, 1).t().contiguous(), scale.squeeze(1).t()


@compiled_if_faster(max_shapes=MAX_WEIGHT_SHAPES)
def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Quantize ``weight`` [out, in] with one scale per square.

    Returns:
        Values [out, in], with ``in`` padded to whole blocks; scales [squares along out, squares
        along in], with the last dimension padded for cuBLAS; then the same values and scales
        transposed.
    """
    rows, columns = weight.shape
    magnitudes = measure_squares(weight)
    values = quantize_squares(weight, magnitudes, dtype)
    scale, transposed_scale = compute_square_scales(magnitudes, dtype)
    return (
        values[:rows].contiguous(),
        scale,
        values.t()[:columns].contiguous(),
        transposed_scale,
    )


def measure_squares(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each square of a matrix, [squares along the rows, squares
    along the columns], in fp32.
    """
    return _split_into_squares(matrix).abs().amax((1, 3)).float()


def quantize_squares(
    matrix: torch.Tensor, magnitudes: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Quantize a matrix with one scale per square.

    Args:
        matrix: [rows, columns].
        magnitudes: largest magnitude of each square, as :func:`measure_squares` returns them.
        dtype: FP8 dtype of the values.

    Returns:
        Values, with both sizes padded to whole squares.
    """
    factor = compute_factor(magnitudes, dtype)[:, None, :, None]
    values = scale_values(_split_into_squares(matrix), factor, dtype)
    return values.flatten(2).flatten(0, 1)


def compute_square_scales(
    magnitudes: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the squares of a weight and of its transpose, with the last dimension
    padded for cuBLAS. ``magnitudes`` is as :func:`measure_squares` returns it.
    """
    scale = compute_factor(magnitudes, dtype).reciprocal()
    return (
        _pad_to_multiple(scale, 0, _SCALE_ALIGNMENT).contiguous(),
        _pad_to_multiple(scale.t(), 0, _SCALE_ALIGNMENT).contiguous(),
    )


def _split_into_squares(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, padded to whole squares, as [squares along the rows, 128, squares along the
    columns, 128].
    """
    padded = _pad_to_multiple(matrix, BLOCK_SIZE, BLOCK_SIZE)
    return padded.reshape(-1, BLOCK_SIZE, padded.shape[1] // BLOCK_SIZE, BLOCK_SIZE)


def compute_factor(
    magnitudes: torch.Tensor, dtype: torch.dtype, min_magnitude: float = _MIN_MAGNITUDE
) -> torch.Tensor:
    """Return the factors that map the largest magnitudes of blocks to the maximum of ``dtype``.

    ``min_magnitude`` is a lower bound of the magnitudes, so that factors are finite.
    """
    return torch.finfo(dtype).max / magnitudes.float().clamp(min=min_magnitude)


def scale_values(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply ``values`` by ``factor``, which must be broadcastable, and convert them to FP8."""
    dtype_max = torch.finfo(dtype).max
    return (values.float() * factor).clamp(-dtype_max, dtype_max).to(dtype)


def _quantize_blocks(
    blocks: torch.Tensor, dtype: torch.dtype, dimension: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``blocks`` in FP8, and one fp32 scale per block, with ``dimension`` of size 1.

    A block consists of all numbers along ``dimension``.
    """
    factor = compute_factor(blocks.abs().amax(dimension, keepdim=True), dtype)
    return scale_values(blocks, factor, dtype), factor.reciprocal()


def _pad_to_multiple(tensor: torch.Tensor, row_multiple: int, column_multiple: int) -> torch.Tensor:
    """Pad the numbers of rows and of columns of a matrix to multiples, with zeros at the end.

    A multiple of 0 means no padding.
    """
    padding = [
        -size % multiple if multiple else 0
        for size, multiple in zip(tensor.shape, (row_multiple, column_multiple), strict=True)
    ]
    return functional.pad(tensor, (0, padding[1], 0, padding[0])) if any(padding) else tensor


def multiply_blockwise(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    square_blocks: bool,
) -> torch.Tensor:
    """Compute ``left [m, k] · right [n, k]^T`` with fp32 accumulation.

    Args:
        left: FP8 values of :func:`quantize_rows` or :func:`quantize_columns`.
        left_scale: scales of ``left``.
        right: as ``left``, or with ``square_blocks`` a weight of :func:`quantize_weight`.
        right_scale: scales of ``right``.
        dtype: dtype of the result.
        square_blocks: whether the blocks of ``right`` are squares of 128 x 128.
    """
    result: torch.Tensor = torch.ops.flagscale.multiply_blocks(
        left, left_scale, right, right_scale, square_blocks, dtype
    )
    return result


def _multiply_cublas(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    row_scaling = functional.ScalingType.BlockWise1x128
    square_scaling = functional.ScalingType.BlockWise128x128
    # torch._scaled_mm ignores the row padding of the squares' scales.
    return functional.scaled_mm(
        left,
        right.t(),
        left_scale,
        row_scaling,
        right_scale.t() if squares else right_scale,
        square_scaling if squares else row_scaling,
        output_dtype=dtype,
    )


def _multiply_dequantized(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply the dequantized fp32 values. For CPUs, on which torch has no FP8 GEMM."""
    if squares:
        right_scale = right_scale.repeat_interleave(BLOCK_SIZE, 0)[: len(right)]
    return (_dequantize(left, left_scale) @ _dequantize(right, right_scale).t()).to(dtype)


def _dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.float() * scale.repeat_interleave(BLOCK_SIZE, 1)[:, : values.shape[1]]


def _multiply_meta(
    left: torch.Tensor,
    _left_scale: torch.Tensor,
    right: torch.Tensor,
    _right_scale: torch.Tensor,
    _squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


for _key in {accelerator.dispatch_key for accelerator in list_accelerators()}:
    _LIBRARY.impl(
        "multiply_blocks", _multiply_dequantized if _key == "CPU" else _multiply_cublas, _key
    )
_LIBRARY.impl("multiply_blocks", _multiply_meta, "Meta")
