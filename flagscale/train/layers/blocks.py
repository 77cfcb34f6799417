"""8-bit products whose operands have a scale for every block of 128 numbers.

Of activations and gradients a block is 128 numbers of a row, of weights a square of 128 x 128
(DeepSeek-AI, "DeepSeek-V3", 2024), so that an outlier costs the precision of its neighbours alone.
A weight's gradient sums over tokens: for it blocks of both sides are 128 tokens of a feature. A
square's scale serves a weight and its transpose. Sizes that are not multiples of 128 are filled up
with zeros. Scales are fp32, in the order in which cuBLAS takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flagscale.accelerators.registry import every
from flagscale.train.layers.jit import compiled_if_faster

BLOCK = 128
WEIGHTS = 64
"""Sizes of weights that are enough: latent attention and shared experts have 11 of them."""
_ALIGNMENT = 4
"""Of which the scales of a row of squares have to be a multiple, whatever fills them up."""
_TINY = 1e-30
_LIBRARY: Any = torch.library.Library("flagscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "multiply_blocks(Tensor left, Tensor left_scale, Tensor right, Tensor right_scale, "
    "bool squares, ScalarType dtype) -> Tensor",
    # A compiler may not choose another order for scales.
    tags=(torch.Tag.needs_exact_strides,),
)


def along_rows(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``tensor [rows, columns]`` with a scale for 128 numbers of a row.

    Returns:
        Values ``[rows, columns]``, filled up to whole blocks, and scales ``[rows, blocks]``, column
        after column.
    """
    blocks = _filled(tensor, 0, BLOCK).reshape(len(tensor), -1, BLOCK)
    values, scale = _scaled(blocks, dtype, 2)
    return values.flatten(1), scale.squeeze(2).t().contiguous().t()


def along_columns(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``tensor [rows, columns]`` transposed, with a scale for 128 numbers of a column.

    Returns:
        Values ``[columns, rows]``, filled up to whole blocks, and scales ``[columns, blocks]``,
        column after column.
    """
    blocks = _filled(tensor, BLOCK, 0).reshape(-1, BLOCK, tensor.shape[1])
    values, scale = _scaled(blocks, dtype, 1)
    return values.flatten(0, 1).t().contiguous(), scale.squeeze(1).t()


@compiled_if_faster(sizes=WEIGHTS)
def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """``weight [out, in]`` with a scale for each square.

    Returns:
        Values ``[out, in]``, of which rows are filled up to whole blocks, and scales
        ``[squares down, squares across]``, rows of which are filled up for cuBLAS; then both of the
        transpose, which are the same numbers.
    """
    rows, columns = weight.shape
    whole = _filled(weight, BLOCK, BLOCK)
    across = whole.shape[1] // BLOCK
    values, scale = _scaled(whole.reshape(-1, BLOCK, across, BLOCK), dtype, (1, 3))
    whole, scale = values.flatten(2).flatten(0, 1), scale[:, 0, :, 0]
    return (
        whole[:rows].contiguous(),
        _filled(scale, 0, _ALIGNMENT).contiguous(),
        whole.t()[:columns].contiguous(),
        _filled(scale.t(), 0, _ALIGNMENT).contiguous(),
    )


def _scaled(
    blocks: torch.Tensor, dtype: torch.dtype, within: int | tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``blocks`` in 8 bits and their scales, of which there is one for the numbers that lie
    ``within`` these dimensions."""
    greatest = torch.finfo(dtype).max
    largest = blocks.abs().amax(within, keepdim=True).float()
    factor = greatest / largest.clamp(min=_TINY)
    values = (blocks.float() * factor).clamp(-greatest, greatest).to(dtype)
    return values, factor.reciprocal()


def _filled(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``tensor`` with zeros behind, up to multiples of ``rows`` and ``columns``; 0 leaves a
    dimension as it is."""
    more = [-size % of if of else 0 for size, of in zip(tensor.shape, (rows, columns), strict=True)]
    return functional.pad(tensor, (0, more[1], 0, more[0])) if any(more) else tensor


def multiply(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    squares: bool,
) -> torch.Tensor:
    """``left [m, k] x right [n, k]^T``, with sums in fp32.

    Args:
        left: with ``left_scale`` by :func:`along_rows` or :func:`along_columns`.
        right: with ``right_scale`` by the same; a weight's by :func:`cast_weight` with ``squares``.
        dtype: of the result.
    """
    made: torch.Tensor = torch.ops.flagscale.multiply_blocks(
        left, left_scale, right, right_scale, squares, dtype
    )
    return made


def _by_kernel(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, square = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    # The older torch._scaled_mm takes squares' scales as if rows of them were not filled up.
    return functional.scaled_mm(
        left,
        right.t(),
        left_scale,
        rows,
        right_scale.t() if squares else right_scale,
        square if squares else rows,
        output_dtype=dtype,
    )


def _by_their_values(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """For CPUs, which have no such kernel: the product of the fp32 numbers that the 8-bit ones
    stand for."""
    if squares:
        right_scale = right_scale.repeat_interleave(BLOCK, 0)[: len(right)]
    return (_meant(left, left_scale) @ _meant(right, right_scale).t()).to(dtype)


def _meant(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.float() * scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def _shape_alone(
    left: torch.Tensor,
    _left_scale: torch.Tensor,
    right: torch.Tensor,
    _right_scale: torch.Tensor,
    _squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


for _key in {kind.dispatch_key for kind in every()}:
    _LIBRARY.impl("multiply_blocks", _by_their_values if _key == "CPU" else _by_kernel, _key)
_LIBRARY.impl("multiply_blocks", _shape_alone, "Meta")
