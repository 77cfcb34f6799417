"""Collectives of tensor parallelism that a compiled layer can start now and wait for later.

torch's functional collectives are traced into the graph. The names of groups stand for the groups,
since a graph cannot hold those.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

_OPERATORS: Any = torch.ops._c10d_functional

Sharing = Literal["none", "reduce", "gather"]
"""How a column-parallel layer shares its input: alone, the input is replicated and its gradient
summed, or each rank has a part of the sequence."""


def name_of(group: Any) -> str:
    """The name under which functional collectives find a process group."""
    return str(group.group_name)


def start_all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Begin to concatenate the ranks' tensors along the first dimension; see :func:`wait`."""
    started: torch.Tensor = _OPERATORS.all_gather_into_tensor(tensor.contiguous(), size, group)
    return started


def start_reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Begin to sum over ranks, each keeping its part of the first dimension; see :func:`wait`."""
    started: torch.Tensor = _OPERATORS.reduce_scatter_tensor(
        tensor.contiguous(), "sum", size, group
    )
    return started


def start_all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Begin to sum over ranks; see :func:`wait`."""
    started: torch.Tensor = _OPERATORS.all_reduce(tensor.contiguous(), "sum", group)
    return started


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective that was started."""
    done: torch.Tensor = _OPERATORS.wait_tensor(tensor)
    return done
