"""Linear layers whose matrix products take 8-bit floating point numbers.

Values are scaled just before each product ("current scaling"), so that the largest magnitude is
the greatest number of the format: one scale a tensor (``tensorwise``), one a row (``rowwise``), or
one for every block of 128 numbers (``blockwise``, :mod:`flagscale.train.layers.blocks`).
Activations and weights are e4m3; gradients e5m2 with ``hybrid``, which has more range and less
precision, and e4m3 with ``e4m3``. Formats and terms: Micikevicius et al., "FP8 formats for deep
learning", 2022. Sums are fp32, results 16-bit, weights are cast once a step.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from flagscale.train.layers import blocks, collectives
from flagscale.train.layers.accumulating import flat, product_gradient, whole_gradient
from flagscale.train.layers.jit import compiled_if_faster

Scaling = Literal["tensorwise", "rowwise", "blockwise"]

FORWARD = torch.float8_e4m3fn
GRADIENTS = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
MULTIPLE = 16
"""Of which every dimension of a product has to be one."""

_TINY = 1e-12


class Recipe(NamedTuple):
    """How products are done; ``weight_gradient``: the weight's gradient in 8 bits too."""

    gradients: str
    scaling: Scaling
    weight_gradient: bool


class Cast(NamedTuple):
    """A weight ``[out, in]`` in 8 bits, as the forward and as the backward pass need it."""

    weight: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor


def quantize(
    tensor: torch.Tensor, dtype: torch.dtype, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """``tensor`` as a matrix of ``dtype``, and the scale that it has to be multiplied by: a
    number, ``[rows, 1]``, or ``[rows, blocks]``; in fp32."""
    if scaling == "blockwise":
        return blocks.along_rows(tensor, dtype)
    greatest = torch.finfo(dtype).max
    magnitude = tensor.abs()
    largest = magnitude.amax() if scaling == "tensorwise" else magnitude.amax(-1, keepdim=True)
    factor = greatest / largest.float().clamp(min=_TINY)
    scaled = (tensor.float() * factor).clamp(-greatest, greatest)
    return scaled.to(dtype), factor.reciprocal()


def cast_weight(weight: torch.Tensor, scaling: Scaling) -> Cast:
    """``weight [out, in]`` in 8 bits."""
    if scaling == "blockwise":
        return Cast(*blocks.cast_weight(weight, FORWARD))
    return Cast(*(_cast_whole(weight) if scaling == "tensorwise" else _cast_rows(weight)))


@compiled_if_faster(sizes=blocks.WEIGHTS)
def _cast_whole(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, scale = quantize(weight, FORWARD, "tensorwise")
    # A tensor of its own: a graph cannot take one tensor twice.
    return values, scale, values.t().contiguous(), scale.clone()


@compiled_if_faster(sizes=blocks.WEIGHTS)
def _cast_rows(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    transposed = quantize(weight.t().contiguous(), FORWARD, "rowwise")
    return *quantize(weight, FORWARD, "rowwise"), *transposed


def _product(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    fast: bool,
) -> torch.Tensor:
    """``left [m, k] x right [n, k]^T``, a weight. ``fast`` adds up with fewer bits, which
    gradients, small beside what they are added to, do not bear; by blocks nothing does."""
    if scaling == "blockwise":
        return blocks.multiply(left, left_scale, right, right_scale, dtype, squares=True)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class Fp8Linear(torch.autograd.Function):
    """``input [..., in] x weight [out, in]^T``; see :mod:`flagscale.train.layers.linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        *settings: Any,
    ) -> torch.Tensor:
        """``settings``: a :class:`Cast`, a :class:`Recipe`, and how the input is shared."""
        cast, scale, transposed, transposed_scale = settings[:4]
        ctx.gradients, scaling, ctx.weight_gradient = settings[4:7]
        sharing, size, group = settings[7:]
        ctx.save_for_backward(input_, weight, accumulator, transposed, transposed_scale)
        ctx.scaling, ctx.sharing, ctx.size, ctx.group = scaling, sharing, size, group
        if sharing == "gather":
            input_ = collectives.wait(collectives.start_all_gather(input_, size, group))
        values, input_scale = quantize(flat(input_), FORWARD, scaling)
        output = _product(values, input_scale, cast, scale, input_.dtype, scaling, fast=True)
        # No view: in evaluation megatron.core adds to it in place and then insists on none.
        whole: torch.Tensor = torch.ops.aten._unsafe_view(
            output, [*input_.shape[:-1], output.shape[-1]]
        )
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator, transposed, transposed_scale = ctx.saved_tensors
        values, scale = quantize(flat(gradient), GRADIENTS[ctx.gradients], ctx.scaling)

        def of_input() -> torch.Tensor:
            settings = (gradient.dtype, ctx.scaling)
            found = _product(values, scale, transposed, transposed_scale, *settings, fast=False)
            return found.view(*gradient.shape[:-1], -1)

        def of_weight(whole: torch.Tensor) -> torch.Tensor:
            return _weight_gradient(ctx, gradient, values, scale, whole, weight, accumulator)

        both = collectives.gradients(input_, of_input, of_weight, ctx.sharing, ctx.size, ctx.group)
        return *both, *[None] * 11


def _weight_gradient(
    ctx: Any,
    gradient: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    input_: torch.Tensor,
    weight: torch.Tensor,
    accumulator: torch.Tensor | None,
) -> torch.Tensor:
    """``gradient^T x input``, added to the accumulator where there is one. ``values`` and
    ``scale`` are the gradient in 8 bits, by rows of tokens."""
    if not ctx.weight_gradient:
        return product_gradient(accumulator, weight, gradient, input_)
    dtype = GRADIENTS[ctx.gradients]
    if ctx.scaling == "blockwise":
        of_gradient = blocks.along_columns(flat(gradient), dtype)
        of_input = blocks.along_columns(flat(input_), FORWARD)
        product = blocks.multiply(*of_gradient, *of_input, gradient.dtype, squares=False)
        return whole_gradient(accumulator, weight, product)
    if ctx.scaling == "tensorwise":
        left, left_scale = values.t().contiguous(), scale
        right, right_scale = quantize(flat(input_), FORWARD, ctx.scaling)
        right = right.t().contiguous()
    else:  # rows are features now, and have scales of their own
        left, left_scale = quantize(flat(gradient).t().contiguous(), dtype, ctx.scaling)
        right, right_scale = quantize(flat(input_).t().contiguous(), FORWARD, ctx.scaling)
    settings = (gradient.dtype, ctx.scaling)
    product = _product(left, left_scale, right, right_scale, *settings, fast=False)
    return whole_gradient(accumulator, weight, product)
