"""Operators that accumulate weight gradients in place, and the modules that use them.

The accumulator of a weight is ``main_grad``, which megatron.core's DDP creates in fp32.

The operators have no autograd formula and do not increment the version counter of the accumulator.
All accumulators are views of one buffer and would share a version counter. The first write would
then invalidate every accumulator that has been saved for backward: by another layer, or by a second
forward pass that runs before the first backward pass. ``torch.library.custom_op`` increments the
counter, so the lower-level API is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch

from flagscale.accelerators.registry import list_accelerators
from flagscale.train.layers import unaligned_gemm
from flagscale.train.layers.jit import compiled_if_faster

_LIBRARY: Any = torch.library.Library("flagscale", "DEF")  # type: ignore[no-untyped-call]
_preserve_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
_LIBRARY.define("add_product(Tensor(a!) sum, Tensor gradient, Tensor input) -> ()")
_LIBRARY.define("add_tensor(Tensor(a!) sum, Tensor value) -> ()")
_LIBRARY.define("add_rows(Tensor(a!) sum, Tensor rows, Tensor value) -> ()")


_unwritten: dict[int, bool] = {}
"""Addresses of accumulators that nothing has been added to yet, with whether they are zero."""


def mark_unwritten(total: torch.Tensor, *, is_zero: bool) -> None:
    """Take note that an accumulator has no value yet; if it is not zero, it is uninitialized.

    The first value is then written to an uninitialized accumulator, which saves setting it to zero
    and reading it.
    """
    _unwritten[total.data_ptr()] = is_zero


def pop_uninitialized(total: torch.Tensor) -> bool:
    """Return whether an accumulator is uninitialized; the caller then writes its first value."""
    return bool(_unwritten) and not _unwritten.pop(total.data_ptr(), True)


def is_uninitialized(total: torch.Tensor) -> bool:
    """Return whether the first value of an accumulator has not been written yet."""
    return _unwritten.get(total.data_ptr(), True) is False


def pop_unwritten(total: torch.Tensor) -> bool:
    """Return whether nothing has been added to an accumulator since :func:`mark_unwritten`.

    A compiled graph may add to a copy of an accumulator and copy the sum back, which looks the
    same.
    """
    return _unwritten.pop(total.data_ptr(), None) is not None


def _add_product(total: torch.Tensor, gradient: torch.Tensor, input_: torch.Tensor) -> None:
    """Compute ``total [out, in] += gradient [tokens, out]^T · input [tokens, in]``."""
    with _preserve_version(total):
        beta = 0 if pop_uninitialized(total) else 1
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), input_, beta=beta)
        elif unaligned_gemm.needs_split(gradient.t()):
            gradient = unaligned_gemm.align_row_starts(gradient)
            for rows in unaligned_gemm.split_rows(total):
                _add_product_on_cuda(total[rows], gradient[:, rows], input_, beta)
        elif total.device.type == "cuda":
            _add_product_on_cuda(total, gradient, input_, beta)
        elif beta:
            total.add_(gradient.t() @ input_)
        else:
            total.copy_(gradient.t() @ input_)


def _add_product_on_cuda(
    total: torch.Tensor, gradient: torch.Tensor, input_: torch.Tensor, beta: int
) -> None:
    # A GEMM of 16-bit operands that accumulates in fp32, in one kernel, as Megatron's
    # wgrad_gemm_accum_fp32. torch has it only for CUDA. With beta 0, total is not read.
    torch.addmm(total, gradient.t(), input_, beta=beta, out_dtype=total.dtype, out=total)


@compiled_if_faster(dynamic=True)
def _add_in_place(total: torch.Tensor, value: torch.Tensor) -> None:
    # Compiled, because torch's kernel for mixed dtypes takes nearly twice as long.
    total.add_(value)


def _add_tensor(total: torch.Tensor, value: torch.Tensor) -> None:
    with _preserve_version(total):
        if pop_uninitialized(total):
            total.copy_(value)
        else:
            _add_in_place(total.view(-1), value.view(-1))


def _add_rows(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """Compute ``total[rows[i]] += value[i]``."""
    with _preserve_version(total):
        if pop_uninitialized(total):
            total.zero_()
        total.index_add_(0, rows, value.to(total.dtype))


for _name, _function in (
    ("add_product", _add_product),
    ("add_tensor", _add_tensor),
    ("add_rows", _add_rows),
):
    for _key in {kind.dispatch_key for kind in list_accelerators()}:
        _LIBRARY.impl(_name, _function, _key)
    _LIBRARY.impl(_name, lambda *_: None, "Meta")


def add_product(total: torch.Tensor, gradient: torch.Tensor, input_: torch.Tensor) -> None:
    """Compute the gradient of a linear layer's weight and add it to its accumulator.

    Args:
        total: accumulator [out, in].
        gradient: gradient of the output, [..., out].
        input_: [..., in], with as many rows as ``gradient``.
    """
    torch.ops.flagscale.add_product(total, flatten_tokens(gradient), flatten_tokens(input_))


def add_tensor(total: torch.Tensor, value: torch.Tensor) -> None:
    """Add ``value``, with the shape of ``total`` and any dtype, to ``total``."""
    torch.ops.flagscale.add_tensor(total, value)


def add_rows(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """Add ``value`` [..., width] to the selected ``rows`` of ``total`` [rows, width]."""
    torch.ops.flagscale.add_rows(total, rows.reshape(-1), flatten_tokens(value))


def flatten_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a matrix: [..., width] becomes [tokens, width]."""
    return tensor.reshape(-1, tensor.shape[-1])


def placeholder_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized gradient for a weight whose gradient is accumulated already.

    Data parallelism uses the arrival of a gradient from autograd as the signal that a weight is
    complete. The values are never read.
    """
    return torch.empty_like(weight)


def accumulate_wgrad_gemm(
    accumulator: torch.Tensor | None,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    input_: torch.Tensor,
) -> torch.Tensor:
    """Compute the gradient of a linear layer's weight, ``gradient^T · input``.

    If there is an accumulator, add the gradient to it and return a placeholder.
    """
    if accumulator is None:
        return flatten_tokens(gradient).t() @ flatten_tokens(input_)
    add_product(accumulator, gradient, input_)
    return placeholder_gradient(weight)


def accumulate_gradient(
    accumulator: torch.Tensor | None, weight: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return ``value`` as the gradient of ``weight``.

    If there is an accumulator, add ``value`` to it and return a placeholder.
    """
    if accumulator is None:
        return value
    add_tensor(accumulator, value)
    return placeholder_gradient(weight)


class GradientAccumulating(Protocol):
    """Module that accumulates its weight gradient itself after :func:`bind_accumulators`."""

    accumulator: torch.Tensor | None

    def accumulated_weight(self) -> torch.nn.Parameter | None:
        """Return the weight whose gradient the module accumulates; None if it does not."""


def find_accumulating_modules(model: torch.nn.Module) -> Iterator[GradientAccumulating]:
    """Yield the modules of ``model`` that can accumulate their weight gradients."""
    for module in model.modules():
        if hasattr(module, "accumulated_weight"):
            yield cast("GradientAccumulating", module)


def bind_accumulators(model: Any) -> list[torch.nn.Parameter]:
    """Assign to modules the accumulators that data parallelism created for their weights.

    Args:
        model: unwrapped model, after it has been wrapped in DDP: ``main_grad`` exists and is final.

    Returns:
        The weights whose gradients do not come through autograd. ``grad_added_to_main_grad`` must
        be set on each of them whenever the accumulators are zeroed.
    """
    weights = []
    for module in find_accumulating_modules(model):
        weight: Any = module.accumulated_weight()
        if weight is None:  # tied output layer
            weight = model.shared_embedding_or_output_weight()
        if weight.requires_grad:
            # .data has a separate version counter.
            module.accumulator = weight.main_grad.data
            # A tied weight is used by the embedding and by the output layer. With this flag,
            # megatron.core would expect the embedding's gradient from autograd. Here the embedding
            # and the output layer both add their gradients to main_grad by themselves.
            weight.zero_out_wgrad = False
            weights.append(weight)
    return list({id(weight): weight for weight in weights}.values())
