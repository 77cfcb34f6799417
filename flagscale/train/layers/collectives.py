"""Collectives of tensor parallelism that a compiled layer can start now and wait for later.

torch's functional collectives are traced into the graph. The names of groups stand for the groups,
since a graph cannot hold those.
"""

from __future__ import annotations

from collections.abc import Callable
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


def exchanged(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """What every rank has for this one: of ``tensor``, cut along its first dimension into a part
    for each rank; ``[ranks, ...]``."""
    splits = [len(tensor) // size] * size
    started = _OPERATORS.all_to_all_single(tensor.contiguous(), splits, splits, group)
    return wait(started).view(size, -1, *tensor.shape[1:])


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group = size, group
        return wait(start_reduce_scatter(tensor, size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return wait(start_all_gather(gradient, ctx.size, ctx.group)), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group = size, group
        return wait(start_all_gather(tensor, size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return wait(start_reduce_scatter(gradient, ctx.size, ctx.group)), None, None


def reduce_scatter(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks, of which each keeps its part of the first dimension.

    Like megatron.core's function, of whose backward pass torch 2.11 makes a wrong graph: there a
    tensor that a collective fills in a backward pass is read as it was before.
    """
    done: torch.Tensor = _ReduceScatter.apply(  # type: ignore[no-untyped-call]
        tensor, group.size(), name_of(group)
    )
    return done


def all_gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' tensors along the first dimension, each of which is used by every rank in its own
    way: gradients are summed. See :func:`reduce_scatter`."""
    done: torch.Tensor = _AllGather.apply(  # type: ignore[no-untyped-call]
        tensor, group.size(), name_of(group)
    )
    return done


def input_gradient(found: torch.Tensor, sharing: Sharing, size: int, group: str) -> torch.Tensor:
    """The gradient of a shared input, as far as this rank's weights go, summed over the ranks; see
    :func:`gradients`."""
    if sharing == "gather":
        return wait(start_reduce_scatter(found, size, group))
    return wait(start_all_reduce(found, group)) if sharing == "reduce" else found


def gradients(
    input_: torch.Tensor,
    of_input: Callable[[], torch.Tensor],
    of_weight: Callable[[torch.Tensor], torch.Tensor | None],
    sharing: Sharing,
    size: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both gradients of a layer whose input is shared. What is gathered or summed over the ranks
    is on its way while the other matrix product runs.

    Args:
        input_: as the layer was given it; with ``gather`` a part of the sequence.
        of_input: computes the gradient of the whole input, as far as this rank's weights go.
        of_weight: computes the weight's from the whole input.
        sharing: how the input is shared, over the ``size`` ranks of ``group``.
    """
    if sharing == "gather":
        whole = start_all_gather(input_, size, group)
    found = of_input()
    if sharing == "gather":
        input_ = wait(whole)
        found = start_reduce_scatter(found, size, group)
    elif sharing == "reduce":
        found = start_all_reduce(found, group)
    weight = of_weight(input_)
    return (found if sharing == "none" else wait(found)), weight
