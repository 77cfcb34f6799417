"""How a vocabulary is padded, so that every tensor-parallel rank holds as much of it."""

from __future__ import annotations

import math

from flagscale.config.arguments.meshes import Meshes
from flagscale.config.arguments.precision import Values


def padded_vocabulary(size: int, values: Values) -> int:
    """The embedding's rows: ``size`` rounded up so that each tensor-parallel rank holds a multiple
    of ``make_vocab_size_divisible_by`` of them, whichever mesh it is in."""
    multiple = values["make_vocab_size_divisible_by"] * vocabulary_parts(values)
    return int(-(-size // multiple) * multiple)


def vocabulary_parts(values: Values) -> int:
    """In how many equal parts the vocabulary can be cut, so that every mesh can cut it."""
    meshes: Meshes | None = values["meshes"]
    if meshes is None:
        return int(values["tensor_model_parallel_size"])
    return math.lcm(*(mesh.tp for mesh in meshes.meshes))
