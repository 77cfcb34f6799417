"""Operators that add to a gradient accumulator in place, and the parameters they serve.

They are declared without a rule for autograd and write without raising the accumulator's version.
All accumulators are views of one buffer: a version that counts would make the first write spoil
every accumulator that another layer, or a second forward pass before the first backward one, has
saved. ``torch.library.custom_op`` counts, so this is the layer below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch

from flagscale.accelerators.registry import every
from flagscale.train.layers.jit import compiled_if_faster

_LIBRARY: Any = torch.library.Library("flagscale", "DEF")  # type: ignore[no-untyped-call]
_keeping_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
_LIBRARY.define("add_product(Tensor(a!) sum, Tensor gradient, Tensor input) -> ()")
_LIBRARY.define("add_tensor(Tensor(a!) sum, Tensor value) -> ()")
_LIBRARY.define("add_rows(Tensor(a!) sum, Tensor rows, Tensor value) -> ()")


def _add_product(total: torch.Tensor, gradient: torch.Tensor, input_: torch.Tensor) -> None:
    """``total [out, in] += gradient [tokens, out]^T x input [tokens, in]``."""
    with _keeping_version(total):
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), input_)
        elif total.device.type == "cuda":
            # 16-bit factors, fp32 sum: one kernel that reads and writes the accumulator once, which
            # torch has for CUDA alone.
            torch.addmm(total, gradient.t(), input_, out_dtype=total.dtype, out=total)
        else:
            total.add_(gradient.t() @ input_)


@compiled_if_faster(dynamic=True)
def _add_in_place(total: torch.Tensor, value: torch.Tensor) -> None:
    # torch's own kernel for two precisions takes nearly twice as long.
    total.add_(value)


def _add_tensor(total: torch.Tensor, value: torch.Tensor) -> None:
    with _keeping_version(total):
        _add_in_place(total.view(-1), value.view(-1))


def _add_rows(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """``total[rows[i]] += value[i]``."""
    with _keeping_version(total):
        total.index_add_(0, rows, value.to(total.dtype))


for _name, _function in (
    ("add_product", _add_product),
    ("add_tensor", _add_tensor),
    ("add_rows", _add_rows),
):
    for _key in {kind.dispatch_key for kind in every()}:
        _LIBRARY.impl(_name, _function, _key)
    _LIBRARY.impl(_name, lambda *_: None, "Meta")


def add_product(total: torch.Tensor, gradient: torch.Tensor, input_: torch.Tensor) -> None:
    """Add the gradient of a weight.

    Args:
        total: ``[out, in]``, in the accumulators' precision.
        gradient: ``[..., out]``, of the output.
        input_: ``[..., in]``, as many rows as ``gradient``.
    """
    torch.ops.flagscale.add_product(total, flat(gradient), flat(input_))


def add_tensor(total: torch.Tensor, value: torch.Tensor) -> None:
    """Add ``value``, of the shape of ``total`` and any precision."""
    torch.ops.flagscale.add_tensor(total, value)


def add_rows(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """Add ``value [..., width]`` to those rows of ``total [rows, width]`` that ``rows`` names."""
    torch.ops.flagscale.add_rows(total, rows.reshape(-1), flat(value))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a matrix: all dimensions but the last are one."""
    return tensor.reshape(-1, tensor.shape[-1])


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """What autograd is given for a gradient that has been added already.

    Data parallelism learns from the arrival of a gradient that a weight is done. Nobody reads it,
    so it is not written either.
    """
    return torch.empty_like(weight)


def product_gradient(
    accumulator: torch.Tensor | None,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    input_: torch.Tensor,
) -> torch.Tensor:
    """What autograd gets for ``weight``: ``gradient^T x input``, or, added to the accumulator where
    there is one, a stand-in."""
    if accumulator is None:
        return flat(gradient).t() @ flat(input_)
    add_product(accumulator, gradient, input_)
    return stand_in(weight)


def whole_gradient(
    accumulator: torch.Tensor | None, weight: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """What autograd gets for ``weight``: ``value``, or, added to the accumulator where there is
    one, a stand-in."""
    if accumulator is None:
        return value
    add_tensor(accumulator, value)
    return stand_in(weight)


class Accumulating(Protocol):
    """A module that adds the gradient of its weight itself, once :func:`bind` has been called."""

    accumulator: torch.Tensor | None

    def accumulated_weight(self) -> torch.nn.Parameter | None: ...


def accumulating_modules(model: torch.nn.Module) -> Iterator[Accumulating]:
    """The modules of ``model`` that can add their gradients themselves."""
    for module in model.modules():
        if hasattr(module, "accumulated_weight"):
            yield cast("Accumulating", module)


def bind(model: Any) -> list[torch.nn.Parameter]:
    """Give modules the accumulators that data parallelism has made for their weights.

    Args:
        model: the bare model, after it has been wrapped: ``main_grad`` exists and stays.

    Returns:
        The weights whose gradients no longer come through autograd. Whoever zeroes the
        accumulators has to set ``grad_added_to_main_grad`` on each of them again.
    """
    weights = []
    for module in accumulating_modules(model):
        weight: Any = module.accumulated_weight()
        if weight is None:  # the output layer of a model that shares the embedding's weight
            weight = model.shared_embedding_or_output_weight()
        if weight.requires_grad:
            # .data has a version counter of its own.
            module.accumulator = weight.main_grad.data
            # megatron.core means to add one use's gradient of a shared weight from autograd; here
            # both uses add their own.
            weight.zero_out_wgrad = False
            weights.append(weight)
    return list({id(weight): weight for weight in weights}.values())
