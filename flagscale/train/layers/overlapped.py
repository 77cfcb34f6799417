"""Products of sequence parallelism that hide what ranks exchange for them (``tp_comm_overlap``).

A rank multiplies its own part of the sequence while it fetches the next one from a peer (gathered
inputs), and fetches summands of its part while it computes others (scattered outputs), on devices
that read each other's memory (:mod:`flagscale.train.layers.symmetric`). Elsewhere one comes after
the other. Each product is one operator with its exchange, since a compiler moves what a graph
starts now and waits for later. The sum over ranks is left to the graph, where it is one kernel with
what comes next.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from flagscale.accelerators.registry import every
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.layers import collectives, symmetric
from flagscale.train.layers.accumulating import (
    add_product,
    flat,
    product_gradient,
    stand_in,
)

_LIBRARY: Any = torch.library.Library("flagscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS: Any = torch.ops.flagscale
_DEFINITIONS = (
    "gathered_product(Tensor part, Tensor factor, int size, str group, bool wanted) "
    "-> (Tensor, Tensor)",
    "scattered_product(Tensor input, Tensor factor, int size, str group) -> Tensor",
    "shared_gradients(Tensor gradient, Tensor weight, Tensor part, int size, str group) "
    "-> (Tensor, Tensor)",
    "add_shared_gradients(Tensor(a!) sum, Tensor gradient, Tensor weight, Tensor part, int size, "
    "str group) -> Tensor",
)


class _InTurn:
    """The operators where nothing is hidden."""

    @staticmethod
    def gathered_product(
        part: torch.Tensor, factor: torch.Tensor, size: int, group: str, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ranks' parts ``[sequence of a rank, ..., in]`` along the first dimension, or nothing
        if they are not ``wanted``, and their product with ``factor [in, out]``."""
        whole = _gathered(part, size, group)
        return whole if wanted else part.new_empty(0), whole @ factor

    @staticmethod
    def scattered_product(
        input_: torch.Tensor, factor: torch.Tensor, size: int, group: str
    ) -> torch.Tensor:
        """What, summed over its first dimension, is this rank's part of the sum over ranks of
        ``input_ [sequence, ..., in] x factor [in, out]``: ``[ranks, sequence of a rank, ...,
        out]``."""
        return collectives.exchanged(input_ @ factor, size, group)

    @staticmethod
    def shared_gradients(
        gradient: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, size: int, group: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a layer that gathers its input: the summands of this rank's part of the input's
        gradient, as :meth:`scattered_product` has them, and the gradient of ``weight [out, in]``,
        to which all parts contribute."""
        of_weight = flat(gradient).t() @ flat(_gathered(part, size, group))
        return collectives.exchanged(gradient @ weight, size, group), of_weight

    @staticmethod
    def add_shared_gradients(
        total: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        size: int,
        group: str,
    ) -> torch.Tensor:
        """:meth:`shared_gradients` with the weight's added to ``total``."""
        add_product(total, gradient, _gathered(part, size, group))
        return collectives.exchanged(gradient @ weight, size, group)


class _Shapes:
    """What the operators return, for a compiler."""

    @staticmethod
    def gathered_product(
        part: torch.Tensor, factor: torch.Tensor, size: int, group: str, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, *inner = part.shape
        whole = part.new_empty((size * rows, *inner) if wanted else 0)
        return whole, part.new_empty(size * rows, *inner[:-1], factor.shape[1])

    @staticmethod
    def scattered_product(
        input_: torch.Tensor, factor: torch.Tensor, size: int, group: str
    ) -> torch.Tensor:
        rows, *inner = input_.shape
        return input_.new_empty(size, rows // size, *inner[:-1], factor.shape[1])

    @staticmethod
    def shared_gradients(
        gradient: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, size: int, group: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return part.new_empty(size, *part.shape), torch.empty_like(weight)

    @staticmethod
    def add_shared_gradients(
        total: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        part: torch.Tensor,
        size: int,
        group: str,
    ) -> torch.Tensor:
        return part.new_empty(size, *part.shape)


def _gathered(part: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return collectives.wait(collectives.start_all_gather(part, size, group))


def _register() -> None:
    by_key = {
        kind.dispatch_key: symmetric if kind.symmetric_memory else _InTurn for kind in every()
    }
    for definition in _DEFINITIONS:
        # A compiler may not choose another order for what is exchanged.
        _LIBRARY.define(definition, tags=(torch.Tag.needs_exact_strides,))
        name = definition.partition("(")[0]
        for key, made in {**by_key, "Meta": _Shapes}.items():
            _LIBRARY.impl(name, getattr(made, name), key)


_register()


def why_not(args: argparse.Namespace, device: Device) -> str | None:
    """Why no exchange is hidden on ``device``; None where some are."""
    if not device.symmetric_memory:
        return f"torch has no symmetric memory for the {device.name}"
    return "8-bit products are not done by parts of the sequence" if args.fp8 else None


def hide_exchanges(model: torch.nn.Module, device: Device) -> None:
    """Have the parallel linear layers of ``model`` whose input or output is a part of the sequence
    hide the exchange. All ranks have to call this.

    Raises:
        ConfigError: the devices of a tensor-parallel group do not read each other's memory.
    """
    linears: list[Any] = [part for part in model.modules() if hasattr(part, "exchanges_hidden")]
    chosen = [linear for linear in linears if linear.exchanges()]
    if device.symmetric_memory:
        for name in dict.fromkeys(collectives.name_of(linear.tp_group) for linear in chosen):
            _try_memory(name, device)
    for linear in chosen:
        linear.exchanges_hidden = True


def _try_memory(group: str, device: Device) -> None:
    try:
        symmetric.workspace(group, symmetric.LEAST, device.torch_device)
    except RuntimeError as error:
        raise ConfigError(
            "tp_comm_overlap: the devices of a tensor-parallel group do not share their memory: "
            f"{str(error).strip().splitlines()[0]}",
            hint="leave tp_comm_overlap out, or lay tensor parallelism out within a host",
        ) from error


class GatheredLinear(torch.autograd.Function):
    """``input x weight [out, in]^T`` of all parts ``[sequence of a rank, ..., in]``. Of them only
    this rank's is kept for the backward pass, which gathers the others once more."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.place = size, group
        product: torch.Tensor = _OPERATORS.gathered_product(
            input_.contiguous(), weight.t(), size, group, False
        )[1]
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        gradient, input_ = gradient.contiguous(), input_.contiguous()
        of_weight = None
        if not ctx.needs_input_grad[1]:  # frozen
            summands = _OPERATORS.scattered_product(gradient, weight, *ctx.place)
        elif accumulator is None:
            summands, of_weight = _OPERATORS.shared_gradients(gradient, weight, input_, *ctx.place)
        else:
            summands = _OPERATORS.add_shared_gradients(
                accumulator, gradient, weight, input_, *ctx.place
            )
            of_weight = stand_in(weight)
        return summands.sum(0), of_weight, None, None, None


class ScatteredLinear(torch.autograd.Function):
    """Of the sum over ranks of ``input [sequence, ..., in] x weight [out, in]^T`` this rank's part
    of the sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.place = size, group
        summands: torch.Tensor = _OPERATORS.scattered_product(
            input_.contiguous(), weight.t(), size, group
        )
        return summands.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        whole, found = _OPERATORS.gathered_product(
            gradient.contiguous(), weight, *ctx.place, trained
        )
        of_weight = product_gradient(accumulator, weight, whole, input_) if trained else None
        return found, of_weight, None, None, None
