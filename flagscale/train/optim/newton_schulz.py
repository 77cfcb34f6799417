"""Orthogonalization of the updates of matrices by Newton-Schulz iterations.

An update G = U S V^T is replaced by nearly U V^T: an odd polynomial, applied several times, brings
all singular values close to 1 (Jordan et al., "Muon: An optimizer for hidden layers in neural
networks", 2024). A polynomial of the singular values needs matrix products only:
``a X + (b A + c A^2) X`` with ``A = X X^T``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients a, b and c of each iteration; then they repeat. They are those that megatron.core
uses (``quintic``), with which five iterations bring singular values from 0.001 to about 1.
"""
_MIN_NORM = 1e-7
"""Norm by which smaller matrices, such as one of zeros, are divided."""


def orthogonalize(
    matrix: torch.Tensor,
    *,
    steps: int,
    precision: str,
    group: dist.ProcessGroup | None = None,
    split_dimension: int | None = None,
) -> torch.Tensor:
    """Return a matrix whose singular vectors are those of ``matrix`` and whose singular values are
    about 1.

    Args:
        matrix: fp32 [rows, columns], or several [matrices, rows, columns].
        steps: number of iterations.
        precision: ``medium``, products of bf16 matrices where they are fast; ``high`` and
            ``highest``, of fp32 matrices with torch's setting of that name.
        group: ranks that have parts of ``matrix`` and share the products; None if it is whole.
        split_dimension: dimension in which it is split over the group, -2 or -1.

    Returns:
        fp32, with the shape of ``matrix``.
    """
    rows, columns = matrix.shape[-2:]
    # The smaller product, or with a group the one that is a sum over its ranks.
    is_transposed = rows > columns if group is None else split_dimension == -2
    x = matrix.mT if is_transposed else matrix
    squares = x.square().sum(dim=(-2, -1), keepdim=True)
    if group is not None:
        dist.all_reduce(squares, group=group)
    x = x / squares.sqrt().clamp_min(_MIN_NORM)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    if precision == "medium" and _multiplies_bf16(matrix.device):
        x = x.bfloat16()
    with _matmul_precision("highest" if precision == "medium" else precision):
        for a, b, c in itertools.islice(itertools.cycle(_COEFFICIENTS), steps):
            gram = x @ x.mT
            if group is not None:
                dist.all_reduce(gram, group=group)
            polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
            x = multiply_add(x, polynomial, x, beta=a)
    return (x.mT if is_transposed else x).float()


def _multiplies_bf16(device: torch.device) -> bool:
    """Return whether products of bf16 matrices are fast: other CPUs take a hundred times as long as
    for fp32.
    """
    if device.type != "cpu":
        return True
    backend: Any = torch.backends.mkldnn
    return bool(backend.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Return a context manager with torch's precision of products of fp32 matrices."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def update_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of the orthogonalized update of a matrix.

    Args:
        rows: outputs of the whole matrix.
        columns: inputs of the whole matrix.
        mode: ``spectral``, with which entries have a mean square of about 1 (Liu et al., "Muon is
            Scalable for LLM Training", 2025); ``unit_rms_norm``, with which outputs change
            by an equal amount whatever the sizes (Pethick et al., "Training Deep Learning Models
            with Norm-Constrained LMOs", 2025); ``shape_scaling``, the first version's.
    """
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    if mode == "unit_rms_norm":
        return float((rows / columns) ** 0.5)
    return float(max(1.0, rows / columns) ** 0.5)
