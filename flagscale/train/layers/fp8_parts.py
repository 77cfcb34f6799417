"""FP8 quantization of a weight whose elements are split over the data-parallel ranks.

There is one scale per weight (``tensorwise``) or per square of 128 x 128 (``blockwise``), which
follows from the largest magnitude of what it scales. So each rank measures its part of the weight,
the caller takes the maxima over the ranks, and each rank quantizes its part. Concatenated, the
quantized parts are the values of :func:`.fp8.quantize_weight`.

``rowwise`` is not supported: the transpose has scales and values of its own, and both have as many
bytes as the 16-bit weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flagscale.train.layers import fp8_blockwise
from flagscale.train.layers.fp8 import FORWARD_DTYPE, Scaling, compute_factor
from flagscale.train.layers.fp8_blockwise import BLOCK_SIZE
from flagscale.train.layers.jit import compiled_if_faster

# Uncompiled, each operation would read and write the part in fp32.
_scale_values = compiled_if_faster(dynamic=True)(fp8_blockwise.scale_values)
_quantize_squares = compiled_if_faster(dynamic=True, max_shapes=fp8_blockwise.MAX_WEIGHT_SHAPES)(
    fp8_blockwise.quantize_squares
)


class WeightPart(NamedTuple):
    """Consecutive elements of a weight, which may begin and end within a row.

    Attributes:
        elements: the elements, flat; maybe none.
        begin: index of the first one in the flat weight, if there are any.
        weight_rows: rows of the whole weight.
        weight_columns: columns of the whole weight.
    """

    elements: torch.Tensor
    begin: int
    weight_rows: int
    weight_columns: int


def can_quantize_parts(scaling: Scaling) -> bool:
    """Return whether ranks can quantize their parts of weights with this scaling."""
    return scaling != "rowwise"


def count_magnitudes(part: WeightPart, scaling: Scaling) -> int:
    """Return how many magnitudes :func:`measure_part` returns: one per scale of the weight."""
    return math.prod(_scale_shape(part, scaling))


def _scale_shape(part: WeightPart, scaling: Scaling) -> tuple[int, ...]:
    if scaling == "tensorwise":
        return ()
    return (
        math.ceil(part.weight_rows / BLOCK_SIZE),
        math.ceil(part.weight_columns / BLOCK_SIZE),
    )


@torch.no_grad()
def measure_part(part: WeightPart, scaling: Scaling) -> torch.Tensor:
    """Return the largest magnitude per scale of the weight, flat and in fp32.

    Scales without an element in the part get zero, which a maximum over the ranks ignores.
    """
    magnitudes = torch.zeros(
        _scale_shape(part, scaling), dtype=torch.float32, device=part.elements.device
    )
    if part.elements.numel():
        if scaling == "tensorwise":
            magnitudes.copy_(part.elements.abs().amax())
        else:
            square_rows, _ = _find_square_rows(part)
            magnitudes[square_rows] = fp8_blockwise.measure_squares(_place_in_square_rows(part))
    return magnitudes.view(-1)


@torch.no_grad()
def quantize_part(part: WeightPart, magnitudes: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Quantize the elements of a part.

    Args:
        part: must not be empty.
        magnitudes: the maxima of what :func:`measure_part` returned on all ranks.
        scaling: the scaling.

    Returns:
        FP8 values in the order of the elements, flat.
    """
    if scaling == "tensorwise":
        factor = compute_factor(magnitudes.view(()), FORWARD_DTYPE)
        return _scale_values(part.elements, factor, FORWARD_DTYPE)
    square_rows, preceding = _find_square_rows(part)
    part_magnitudes = magnitudes.view(_scale_shape(part, scaling))[square_rows]
    values = _quantize_squares(_place_in_square_rows(part), part_magnitudes, FORWARD_DTYPE)
    # Without the padding of the columns, and without what precedes and follows the part.
    values = values[:, : part.weight_columns].reshape(-1)
    return values[preceding : preceding + part.elements.numel()]


@torch.no_grad()
def compute_scales(
    part: WeightPart, magnitudes: torch.Tensor, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``scale`` and ``transposed_scale`` of the whole weight as in :class:`.fp8.Fp8Weight`.

    Args:
        part: a part of the weight; maybe empty.
        magnitudes: see :func:`quantize_part`.
        scaling: the scaling.
    """
    if scaling == "tensorwise":
        scale = compute_factor(magnitudes.view(()), FORWARD_DTYPE).reciprocal()
        return scale, scale
    return fp8_blockwise.compute_square_scales(
        magnitudes.view(_scale_shape(part, scaling)), FORWARD_DTYPE
    )


def _find_square_rows(part: WeightPart) -> tuple[slice, int]:
    """Return the range of square rows, 128 rows of the weight each, that a part touches, and the
    number of elements in them that precede it.
    """
    end = part.begin + part.elements.numel()
    start = part.begin // part.weight_columns // BLOCK_SIZE
    stop = math.ceil(end / part.weight_columns / BLOCK_SIZE)
    return slice(start, stop), part.begin - start * BLOCK_SIZE * part.weight_columns


def _place_in_square_rows(part: WeightPart) -> torch.Tensor:
    """Return a part in its place among the whole square rows that it touches, zero elsewhere."""
    square_rows, preceding = _find_square_rows(part)
    rows = (square_rows.stop - square_rows.start) * BLOCK_SIZE
    matrix = part.elements.new_zeros(rows, part.weight_columns)
    matrix.view(-1)[preceding : preceding + part.elements.numel()] = part.elements
    return matrix
