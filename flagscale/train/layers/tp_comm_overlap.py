"""Overlap of sequence-parallel communication with GEMMs (``tp_comm_overlap``).

With gathered inputs, a rank multiplies its part of the sequence while it fetches the next part from
a peer. With scattered outputs, it fetches summands of its own part while it computes those of its
peers. This requires devices that can read each other's memory
(:mod:`flagscale.train.layers.symmetric_memory`); elsewhere communication and GEMM run sequentially.
Each GEMM is one operator together with its communication, because a compiler would move a
separately started collective within the graph. The sum over ranks is left to the graph, which fuses
it with the following operation.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from flagscale.accelerators.registry import list_accelerators
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.layers import collectives, symmetric_memory
from flagscale.train.layers.wgrad_accumulation import (
    accumulate_wgrad_gemm,
    add_product,
    flatten_tokens,
    placeholder_gradient,
)

_LIBRARY: Any = torch.library.Library("flagscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS: Any = torch.ops.flagscale
_DEFINITIONS = (
    "gathered_product(Tensor part, Tensor factor, int size, str group, bool return_gathered) "
    "-> (Tensor, Tensor)",
    "scattered_product(Tensor input, Tensor factor, int size, str group) -> Tensor",
    "shared_gradients(Tensor gradient, Tensor weight, Tensor part, int size, str group) "
    "-> (Tensor, Tensor)",
    "add_shared_gradients(Tensor(a!) sum, Tensor gradient, Tensor weight, Tensor part, int size, "
    "str group) -> Tensor",
)


class _SequentialOperators:
    """Operators without overlap: collective and GEMM one after the other."""

    @staticmethod
    def gathered_product(
        part: torch.Tensor, factor: torch.Tensor, group_size: int, group: str, return_gathered: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather ``part`` and multiply by ``factor``.

        Args:
            part: [s/tp, ..., in].
            factor: [in, out].
            group_size: number of ranks.
            group: name of the process group.
            return_gathered: whether to return the gathered input.

        Returns:
            The gathered input [s, ..., in], or an empty tensor, and the product [s, ..., out].
        """
        whole = _all_gather(part, group_size, group)
        return whole if return_gathered else part.new_empty(0), whole @ factor

    @staticmethod
    def scattered_product(
        input_: torch.Tensor, factor: torch.Tensor, group_size: int, group: str
    ) -> torch.Tensor:
        """Multiply by ``factor`` and exchange the summands of a reduce_scatter.

        Args:
            input_: [s, ..., in].
            factor: [in, out].
            group_size: number of ranks.
            group: name of the process group.

        Returns:
            Summands of this rank's part of the sequence, [ranks, s/tp, ..., out]. Their sum over
            the first dimension is the reduce_scatter of the product.
        """
        return collectives.all_to_all(input_ @ factor, group_size, group)

    @staticmethod
    def shared_gradients(
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        group_size: int,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both gradients of a layer that gathers its input.

        Returns:
            Summands of the input's gradient as in :meth:`scattered_product`, and the gradient of
            ``weight`` [out, in] over the whole sequence.
        """
        weight_gradient = flatten_tokens(gradient).t() @ flatten_tokens(
            _all_gather(part, group_size, group)
        )
        return collectives.all_to_all(gradient @ weight, group_size, group), weight_gradient

    @staticmethod
    def add_shared_gradients(
        total: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        group_size: int,
        group: str,
    ) -> torch.Tensor:
        """Run :meth:`shared_gradients`, with the weight's gradient added to ``total``.

        Returns:
            Summands of the input's gradient.
        """
        add_product(total, gradient, _all_gather(part, group_size, group))
        return collectives.all_to_all(gradient @ weight, group_size, group)


class _MetaOperators:
    """Output shapes of the operators, for the compiler."""

    @staticmethod
    def gathered_product(
        part: torch.Tensor, factor: torch.Tensor, group_size: int, group: str, return_gathered: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, *inner = part.shape
        whole = part.new_empty((group_size * rows, *inner) if return_gathered else 0)
        return whole, part.new_empty(group_size * rows, *inner[:-1], factor.shape[1])

    @staticmethod
    def scattered_product(
        input_: torch.Tensor, factor: torch.Tensor, group_size: int, group: str
    ) -> torch.Tensor:
        rows, *inner = input_.shape
        return input_.new_empty(group_size, rows // group_size, *inner[:-1], factor.shape[1])

    @staticmethod
    def shared_gradients(
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        group_size: int,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return part.new_empty(group_size, *part.shape), torch.empty_like(weight)

    @staticmethod
    def add_shared_gradients(
        total: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        group_size: int,
        group: str,
    ) -> torch.Tensor:
        return part.new_empty(group_size, *part.shape)


def _all_gather(part: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    return collectives.wait(collectives.start_all_gather(part, group_size, group))


def _register_operators() -> None:
    operators_by_key = {
        kind.dispatch_key: symmetric_memory if kind.symmetric_memory else _SequentialOperators
        for kind in list_accelerators()
    }
    for definition in _DEFINITIONS:
        # A compiler must not change the memory order of communicated tensors.
        _LIBRARY.define(definition, tags=(torch.Tag.needs_exact_strides,))
        name = definition.partition("(")[0]
        for key, operators in {**operators_by_key, "Meta": _MetaOperators}.items():
            _LIBRARY.impl(name, getattr(operators, name), key)


_register_operators()


def explain_no_overlap(args: argparse.Namespace, device: Device) -> str | None:
    """Return the reason why communication is not overlapped on ``device``, or None."""
    if not device.symmetric_memory:
        return f"torch has no symmetric memory for the {device.name}"
    return "8-bit GEMMs cannot be divided along the sequence" if args.fp8 else None


def enable_overlap(model: torch.nn.Module, device: Device) -> None:
    """Enable overlap in the sequence-parallel linear layers of ``model``. All ranks call it.

    Raises:
        ConfigError: the devices of a tensor-parallel group cannot read each other's memory.
    """
    linears: list[Any] = [
        part for part in model.modules() if hasattr(part, "overlaps_communication")
    ]
    sequence_parallel = [linear for linear in linears if linear.communicates_sequence()]
    if device.symmetric_memory:
        for name in dict.fromkeys(
            collectives.get_group_name(linear.tp_group) for linear in sequence_parallel
        ):
            _check_symmetric_memory(name, device)
    for linear in sequence_parallel:
        linear.overlaps_communication = True


def _check_symmetric_memory(group: str, device: Device) -> None:
    try:
        symmetric_memory.get_workspace(
            group, symmetric_memory.MIN_WORKSPACE_BYTES, device.torch_device
        )
    except RuntimeError as error:
        raise ConfigError(
            "tp_comm_overlap: the devices of a tensor-parallel group cannot read each other's "
            "memory: "
            f"{str(error).strip().splitlines()[0]}",
            hint="leave tp_comm_overlap out, or lay tensor parallelism out within a host",
        ) from error


class AllGatherLinear(torch.autograd.Function):
    """Compute ``input · weight [out, in]^T`` for inputs [s/tp, ..., in] of all ranks.

    Only this rank's input is saved for the backward pass, which gathers the others again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        group_size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.group_arguments = group_size, group
        output: torch.Tensor = _OPERATORS.gathered_product(
            input_.contiguous(), weight.t(), group_size, group, False
        )[1]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        gradient, input_ = gradient.contiguous(), input_.contiguous()
        weight_gradient = None
        if not ctx.needs_input_grad[1]:  # frozen weight
            summands = _OPERATORS.scattered_product(gradient, weight, *ctx.group_arguments)
        elif accumulator is None:
            summands, weight_gradient = _OPERATORS.shared_gradients(
                gradient, weight, input_, *ctx.group_arguments
            )
        else:
            summands = _OPERATORS.add_shared_gradients(
                accumulator, gradient, weight, input_, *ctx.group_arguments
            )
            weight_gradient = placeholder_gradient(weight)
        return summands.sum(0), weight_gradient, None, None, None


class LinearReduceScatter(torch.autograd.Function):
    """Compute the reduce_scatter of ``input [s, ..., in] · weight [out, in]^T``."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        group_size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.group_arguments = group_size, group
        summands: torch.Tensor = _OPERATORS.scattered_product(
            input_.contiguous(), weight.t(), group_size, group
        )
        return summands.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        needs_weight_gradient = ctx.needs_input_grad[1]
        gathered_gradient, input_gradient = _OPERATORS.gathered_product(
            gradient.contiguous(), weight, *ctx.group_arguments, needs_weight_gradient
        )
        weight_gradient = (
            accumulate_wgrad_gemm(accumulator, weight, gathered_gradient, input_)
            if needs_weight_gradient
            else None
        )
        return input_gradient, weight_gradient, None, None, None
