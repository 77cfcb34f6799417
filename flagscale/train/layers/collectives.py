"""Tensor-parallel collectives that a compiled layer can start and wait for separately.

torch's functional collectives are traced into the graph. A graph cannot hold process groups, so
groups are passed by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

_FUNCTIONAL_OPERATORS: Any = torch.ops._c10d_functional

InputSharing = Literal["none", "reduce", "gather"]
"""Sharing of a column-parallel layer's input by tensor-parallel ranks.

``none``: not shared. ``reduce``: the input is replicated and its gradient all-reduced. ``gather``:
each rank has a part of the sequence (sequence parallelism).
"""


def get_group_name(group: Any) -> str:
    """Return the name by which functional collectives refer to a process group."""
    return str(group.group_name)


def start_all_gather(tensor: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    """Start an all_gather along the first dimension; complete it with :func:`wait`."""
    pending: torch.Tensor = _FUNCTIONAL_OPERATORS.all_gather_into_tensor(
        tensor.contiguous(), group_size, group
    )
    return pending


def start_reduce_scatter(tensor: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    """Start a reduce_scatter (sum) along the first dimension; complete it with :func:`wait`."""
    pending: torch.Tensor = _FUNCTIONAL_OPERATORS.reduce_scatter_tensor(
        tensor.contiguous(), "sum", group_size, group
    )
    return pending


def start_all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Start an all_reduce (sum); complete it with :func:`wait`."""
    pending: torch.Tensor = _FUNCTIONAL_OPERATORS.all_reduce(tensor.contiguous(), "sum", group)
    return pending


def start_ring_shift(tensor: torch.Tensor, rank: int, group_size: int, group: str) -> torch.Tensor:
    """Start to send ``tensor`` to the next rank and to receive that of the rank before, of the same
    shape; complete it with :func:`wait`.
    """
    sent, received = [0] * group_size, [0] * group_size
    sent[(rank + 1) % group_size] = received[(rank - 1) % group_size] = len(tensor)
    pending: torch.Tensor = _FUNCTIONAL_OPERATORS.all_to_all_single(
        tensor.contiguous(), received, sent, group
    )
    return pending


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a started collective and return its result."""
    result: torch.Tensor = _FUNCTIONAL_OPERATORS.wait_tensor(tensor)
    return result


def all_to_all(tensor: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    """Run an all_to_all of ``tensor``, split evenly along the first dimension.

    Returns:
        The parts for this rank, by source rank: [ranks, ...].
    """
    splits = [len(tensor) // group_size] * group_size
    pending = _FUNCTIONAL_OPERATORS.all_to_all_single(tensor.contiguous(), splits, splits, group)
    return wait(pending).view(group_size, -1, *tensor.shape[1:])


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
        ctx.group_size, ctx.group = group_size, group
        return wait(start_reduce_scatter(tensor, group_size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return wait(start_all_gather(gradient, ctx.group_size, ctx.group)), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
        ctx.group_size, ctx.group = group_size, group
        return wait(start_all_gather(tensor, group_size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return wait(start_reduce_scatter(gradient, ctx.group_size, ctx.group)), None, None


def reduce_scatter(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Run a reduce_scatter (sum) along the first dimension, differentiable.

    It replaces megatron.core's function, whose backward pass is compiled incorrectly by torch 2.11:
    in a backward pass the compiled graph reads a tensor before the collective has filled it.
    """
    result: torch.Tensor = _ReduceScatter.apply(  # type: ignore[no-untyped-call]
        tensor, group.size(), get_group_name(group)
    )
    return result


def all_gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Run an all_gather along the first dimension, differentiable.

    Each rank uses the result differently, so gradients are reduced. See :func:`reduce_scatter`.
    """
    result: torch.Tensor = _AllGather.apply(  # type: ignore[no-untyped-call]
        tensor, group.size(), get_group_name(group)
    )
    return result


def reduce_input_gradient(
    gradient: torch.Tensor, sharing: InputSharing, group_size: int, group: str
) -> torch.Tensor:
    """Reduce this rank's contribution to the gradient of a shared input.

    For the arguments see :func:`compute_gradients`.
    """
    if sharing == "gather":
        return wait(start_reduce_scatter(gradient, group_size, group))
    return wait(start_all_reduce(gradient, group)) if sharing == "reduce" else gradient


def compute_gradients(
    input_: torch.Tensor,
    compute_input_gradient: Callable[[], torch.Tensor],
    compute_weight_gradient: Callable[[torch.Tensor], torch.Tensor | None],
    sharing: InputSharing,
    group_size: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute both gradients of a layer with a shared input.

    The collective of one gradient overlaps with the GEMM of the other.

    Args:
        input_: input of the layer; with ``gather`` this rank's part of the sequence.
        compute_input_gradient: computes this rank's contribution to the gradient of the whole
            input.
        compute_weight_gradient: computes the gradient of the weight from the whole input.
        sharing: sharing of the input.
        group_size: number of ranks in the group.
        group: name of the tensor-parallel group.

    Returns:
        Gradient of ``input_``, and gradient of the weight.
    """
    if sharing == "gather":
        gathered_input = start_all_gather(input_, group_size, group)
    input_gradient = compute_input_gradient()
    if sharing == "gather":
        input_ = wait(gathered_input)
        input_gradient = start_reduce_scatter(input_gradient, group_size, group)
    elif sharing == "reduce":
        input_gradient = start_all_reduce(input_gradient, group)
    weight_gradient = compute_weight_gradient(input_)
    return (input_gradient if sharing == "none" else wait(input_gradient)), weight_gradient
