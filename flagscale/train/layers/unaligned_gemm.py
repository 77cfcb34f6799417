"""GEMMs of a weight whose number of rows is not a multiple of 8, such as an odd vocabulary.

cuBLAS has no fast kernels for 16-bit matrices whose rows do not begin at multiples of 16 bytes.
With a vocabulary of 128,257 the three GEMMs of the output layer take 5.6 times as long as with
128,256: 99.4 ms instead of 17.7 ms on an H100, for 8,192 tokens of width 2,048. Here such a GEMM is
split into one over the largest multiple of 8 rows and a small one over the remaining rows. The
output, which has a column per row of the weight, is part of a buffer whose rows begin at multiples
of 16 bytes. Weights, checkpoints and results stay as they are.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ALIGNMENT = 8
"""Elements in 16 bytes of 16-bit numbers. Rows begin at multiples of 16 bytes if the number of
columns in memory is a multiple of this one.
"""


def needs_split(weight: torch.Tensor) -> bool:
    """Return whether GEMMs of ``weight`` [out, in] have to be split to be fast."""
    return (
        weight.shape[0] % _ALIGNMENT != 0
        and weight.shape[0] > _ALIGNMENT
        and weight.element_size() == 2
        and weight.device.type == "cuda"
        # A compiler pads matrices by itself.
        and not torch.compiler.is_compiling()
    )


def linear(input_: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``input [..., in] · weight [out, in]^T``."""
    return (
        split_linear(input_, weight) if needs_split(weight) else functional.linear(input_, weight)
    )


def multiply_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input of :func:`linear`: ``gradient [..., out] · weight``."""
    return split_multiply(gradient, weight) if needs_split(weight) else gradient @ weight


def split_linear(input_: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``input [..., in] · weight [out, in]^T`` by two GEMMs.

    The result [..., out] is a view of a buffer with more columns, so that its rows begin at
    multiples of 16 bytes.
    """
    rows, first_rows = _count_rows(weight)
    flat_input = input_.reshape(-1, input_.shape[-1])
    buffer_columns = first_rows + _ALIGNMENT
    buffer = flat_input.new_empty((flat_input.shape[0], buffer_columns))
    torch.mm(flat_input, weight[:first_rows].t(), out=buffer[:, :first_rows])
    torch.mm(flat_input, weight[first_rows:].t(), out=buffer[:, first_rows:rows])
    return buffer[:, :rows].view(*input_.shape[:-1], rows)


def split_multiply(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``gradient [..., out] · weight [out, in]`` by two GEMMs."""
    _, first_rows = _count_rows(weight)
    flat_gradient = align_row_starts(gradient)
    product = flat_gradient[:, :first_rows] @ weight[:first_rows]
    product.addmm_(flat_gradient[:, first_rows:], weight[first_rows:])
    return product.view(*gradient.shape[:-1], weight.shape[1])


def align_row_starts(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix [..., columns] as [rows, columns] whose rows begin at multiples of 16 bytes.

    It is copied if needed.
    The output of :func:`split_linear`, and a gradient that overwrites it, need no copy.
    """
    flat = matrix.reshape(-1, matrix.shape[-1])
    if flat.stride(1) == 1 and flat.stride(0) % _ALIGNMENT == 0:
        return flat
    rows, columns = flat.shape
    padded_columns = -(-columns // _ALIGNMENT) * _ALIGNMENT
    aligned = flat.new_empty((rows, padded_columns))[:, :columns]
    return aligned.copy_(flat)


def split_rows(total: torch.Tensor) -> list[slice]:
    """Return the rows of ``total`` [out, in] that each of the two GEMMs of its gradient writes."""
    rows, first_rows = _count_rows(total)
    return [slice(0, first_rows), slice(first_rows, rows)]


def _count_rows(weight: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows, and the rows of the first GEMM: the largest multiple of 8 that is
    not larger.
    """
    rows = weight.shape[0]
    return rows, rows // _ALIGNMENT * _ALIGNMENT
