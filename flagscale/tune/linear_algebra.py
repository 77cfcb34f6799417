"""Linear algebra of small matrices, without packages that the launcher does not need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Matrix = list[list[float]]
"""Rows. A symmetric or triangular matrix may lack what is right of the diagonal."""
_JITTER = 1e-10


def cholesky(matrix: Matrix) -> Matrix:
    """Return the lower triangular factor of a positive semidefinite matrix."""
    factor: Matrix = []
    for i, row in enumerate(matrix):
        entries: list[float] = []
        for j in range(i + 1):
            partner = factor[j] if j < i else entries
            remainder = row[j] - sum(map(mul, entries, partner[:j]))
            entries.append(
                math.sqrt(max(remainder, _JITTER)) if i == j else remainder / factor[j][j]
            )
        factor.append(entries)
    return factor


def solve_both(factor: Matrix, right: Sequence[float]) -> list[float]:
    """Solve ``L L^T x = right`` for a lower triangular matrix."""
    return solve_transposed(factor, solve(factor, right))


def solve(factor: Matrix, right: Sequence[float]) -> list[float]:
    """Solve ``L x = right`` for a lower triangular matrix."""
    solution: list[float] = []
    for row, value in zip(factor, right, strict=True):
        remainder = value - sum(map(mul, row, solution))
        solution.append(remainder / row[-1])
    return solution


def solve_transposed(factor: Matrix, right: Sequence[float]) -> list[float]:
    """Solve ``L^T x = right`` for a lower triangular matrix."""
    solution = list(right)
    for i in reversed(range(len(right))):
        solution[i] /= factor[i][i]
        for j in range(i):
            solution[j] -= factor[i][j] * solution[i]
    return solution
