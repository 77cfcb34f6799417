"""FP8 quantization of a weight of which every rank has a part.

The scales of a whole weight follow from the largest magnitudes in it: one with ``tensorwise``
scaling, one per square of 128 x 128 with ``blockwise``. So each rank measures its part, the ranks
take the maxima of what they measured, and each rank quantizes its part. The parts together are
equal to the whole weight quantized. ``rowwise`` scaling has other values in the transpose of a
weight, so that both would have as many bytes as the 16-bit weight; it is not supported here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flagscale.train.layers import fp8_blockwise
from flagscale.train.layers.fp8 import FORWARD_DTYPE, Scaling, compute_factor
from flagscale.train.layers.fp8_blockwise import BLOCK_SIZE
from flagscale.train.layers.jit import compiled_if_faster

_scale_values = compiled_if_faster(dynamic=True)(fp8_blockwise.scale_values)


class WeightPart(NamedTuple):
    """Consecutive elements of a weight.

    Attributes:
        elements: the elements, flat; maybe none.
        begin: index of the first one in the flat weight.
        rows: rows of the weight.
        columns: columns of the weight.
    """

    elements: torch.Tensor
    begin: int
    rows: int
    columns: int


def can_quantize_parts(scaling: Scaling) -> bool:
    """Return whether parts of weights can be quantized with a granularity of scales."""
    return scaling != "rowwise"


def count_magnitudes(part: WeightPart, scaling: Scaling) -> int:
    """Return the number of magnitudes of the weight."""
    return math.prod(_magnitude_shape(part, scaling))


def _magnitude_shape(part: WeightPart, scaling: Scaling) -> tuple[int, ...]:
    if scaling == "tensorwise":
        return ()
    return math.ceil(part.rows / BLOCK_SIZE), math.ceil(part.columns / BLOCK_SIZE)


@torch.no_grad()
def measure_part(part: WeightPart, scaling: Scaling) -> torch.Tensor:
    """Return the largest magnitudes in a part of a weight, flat and in fp32; zero for what the part
    does not contain.
    """
    elements = part.elements
    shape = _magnitude_shape(part, scaling)
    magnitudes = torch.zeros(shape, dtype=torch.float32, device=elements.device)
    if elements.numel() == 0:
        return magnitudes.view(-1)
    if scaling == "tensorwise":
        magnitudes.copy_(elements.abs().amax())
        return magnitudes.view(-1)
    squares, _ = _covering_squares(part)
    magnitudes[squares] = fp8_blockwise.measure_squares(_cover(part))
    return magnitudes.view(-1)


@torch.no_grad()
def quantize_part(part: WeightPart, magnitudes: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Return the FP8 values of a part of a weight.

    Args:
        part: at least one element.
        magnitudes: the maxima of what :func:`measure_part` returned on all ranks.
        scaling: granularity of scales.
    """
    if scaling == "tensorwise":
        factor = compute_factor(magnitudes.view(()), FORWARD_DTYPE)
        return _scale_values(part.elements, factor, FORWARD_DTYPE)
    squares, skipped = _covering_squares(part)
    grid = magnitudes.view(_magnitude_shape(part, scaling))
    values = fp8_blockwise.quantize_squares(_cover(part), grid[squares], FORWARD_DTYPE)
    return values[:, : part.columns].reshape(-1)[skipped : skipped + part.elements.numel()]


def compute_scales(
    part: WeightPart, magnitudes: torch.Tensor, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the weight and of its transpose, as :func:`.fp8.quantize_weight` does.

    The arguments are as for :func:`quantize_part`, but the part may be empty.
    """
    if scaling == "tensorwise":
        scale = compute_factor(magnitudes.view(()), FORWARD_DTYPE).reciprocal()
        return scale, scale.clone()
    grid = magnitudes.view(_magnitude_shape(part, scaling))
    return fp8_blockwise.compute_square_scales(grid, FORWARD_DTYPE)


def _covering_squares(part: WeightPart) -> tuple[slice, int]:
    """Return the rows of squares that contain a part, and the number of elements in them before the
    part.
    """
    end = part.begin + part.elements.numel()
    first = part.begin // part.columns // BLOCK_SIZE
    last = math.ceil(math.ceil(end / part.columns) / BLOCK_SIZE)
    return slice(first, last), part.begin - first * BLOCK_SIZE * part.columns


def _cover(part: WeightPart) -> torch.Tensor:
    """Return the rows of the weight whose squares contain a part, zero outside of it."""
    squares, skipped = _covering_squares(part)
    rows = (squares.stop - squares.start) * BLOCK_SIZE
    cover = part.elements.new_zeros(rows * part.columns)
    cover[skipped : skipped + part.elements.numel()] = part.elements
    return cover.view(rows, part.columns)
