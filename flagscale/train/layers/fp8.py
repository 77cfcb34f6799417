"""FP8 linear layers.

Operands are scaled just before each GEMM (current scaling), so that the largest magnitude maps to
the maximum of the format. There is one scale per tensor (``tensorwise``), per row (``rowwise``) or
per block of 128 numbers (``blockwise``, :mod:`flagscale.train.layers.fp8_blockwise`). Activations
and weights are e4m3. Gradients are e5m2 with ``hybrid``, for more range and less precision, and
e4m3 with ``e4m3``. Formats and terms follow Micikevicius et al., "FP8 formats for deep learning",
2022. Accumulation is fp32, results are 16-bit, and weights are quantized once per step.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from flagscale.train.layers import collectives, fp8_blockwise
from flagscale.train.layers.jit import compiled_if_faster
from flagscale.train.layers.wgrad_accumulation import (
    accumulate_gradient,
    accumulate_wgrad_gemm,
    flatten_tokens,
)

Scaling = Literal["tensorwise", "rowwise", "blockwise"]

FORWARD_DTYPE = torch.float8_e4m3fn
GRADIENT_DTYPES = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
DIMENSION_MULTIPLE = 16
"""Every dimension of an FP8 GEMM must be a multiple of this number."""

_MIN_MAGNITUDE = 1e-12
"""Lower bound of the largest magnitude, so that the scale of zeros is finite."""


class Fp8Recipe(NamedTuple):
    """FP8 settings of a linear layer.

    Attributes:
        gradient_format: format of gradients, ``hybrid`` (e5m2) or ``e4m3``.
        scaling: granularity of scales.
        fp8_weight_gradient: whether the GEMM of the weight gradient is FP8 too, or 16-bit.
    """

    gradient_format: str
    scaling: Scaling
    fp8_weight_gradient: bool


class Fp8Weight(NamedTuple):
    """FP8 weight and its transpose, for the forward and the backward pass.

    Attributes:
        weight: values [out, in].
        scale: scales of ``weight``, as :func:`quantize` or, with ``blockwise``,
            :func:`.fp8_blockwise.quantize_weight` returns them.
        transposed: values [in, out].
        transposed_scale: scales of ``transposed``.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor


def quantize(
    tensor: torch.Tensor, dtype: torch.dtype, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix.

    Args:
        tensor: [rows, columns].
        dtype: FP8 dtype of the values.
        scaling: granularity of the scales.

    Returns:
        Values of ``dtype``, and the fp32 scales to multiply them by: a scalar for ``tensorwise``,
        [rows, 1] for ``rowwise``, or [rows, blocks] for ``blockwise``, whose columns are padded to
        whole blocks.
    """
    if scaling == "blockwise":
        return fp8_blockwise.quantize_rows(tensor, dtype)
    magnitude = tensor.abs()
    factor = compute_factor(
        magnitude.amax() if scaling == "tensorwise" else magnitude.amax(-1, keepdim=True), dtype
    )
    return fp8_blockwise.scale_values(tensor, factor, dtype), factor.reciprocal()


def compute_factor(max_magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the fp32 factors that map the largest magnitudes of tensors or of rows to the maximum
    of ``dtype``. Their reciprocals are the scales.
    """
    return fp8_blockwise.compute_factor(max_magnitude, dtype, _MIN_MAGNITUDE)


def quantize_weight(weight: torch.Tensor, scaling: Scaling) -> Fp8Weight:
    """Quantize ``weight`` [out, in]."""
    if scaling == "blockwise":
        return Fp8Weight(*fp8_blockwise.quantize_weight(weight, FORWARD_DTYPE))
    return Fp8Weight(
        *(_quantize_tensorwise(weight) if scaling == "tensorwise" else _quantize_rowwise(weight))
    )


@compiled_if_faster(max_shapes=fp8_blockwise.MAX_WEIGHT_SHAPES)
def _quantize_tensorwise(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, scale = quantize(weight, FORWARD_DTYPE, "tensorwise")
    # A copy, because a compiled graph cannot return one tensor twice.
    return values, scale, values.t().contiguous(), scale.clone()


@compiled_if_faster(max_shapes=fp8_blockwise.MAX_WEIGHT_SHAPES)
def _quantize_rowwise(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    transposed = quantize(weight.t().contiguous(), FORWARD_DTYPE, "rowwise")
    return *quantize(weight, FORWARD_DTYPE, "rowwise"), *transposed


def _scaled_matmul(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    fast_accumulation: bool,
) -> torch.Tensor:
    """Compute ``left [m, k] · right [n, k]^T``; ``right`` is a weight.

    ``dtype`` is the dtype of the result. ``fast_accumulation`` accumulates with fewer bits, which
    is too imprecise for gradients. Blockwise GEMMs ignore it.
    """
    if scaling == "blockwise":
        return fp8_blockwise.multiply_blockwise(
            left, left_scale, right, right_scale, dtype, square_blocks=True
        )
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


class Fp8Linear(torch.autograd.Function):
    """FP8 GEMM ``input [..., in] · weight [out, in]^T`` with an accumulated weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        *settings: Any,
    ) -> torch.Tensor:
        """Run the GEMM.

        Args:
            ctx: torch's context for the backward pass.
            input_: [..., in].
            weight: 16-bit weight [out, in].
            accumulator: accumulator of the weight gradient (:mod:`.wgrad_accumulation`), or None.
            *settings: fields of a :class:`Fp8Weight` and of a :class:`Fp8Recipe`, then ``sharing``,
                ``group_size`` and ``group`` as in :func:`.collectives.compute_gradients`.
        """
        weight_values, weight_scale, transposed, transposed_scale = settings[:4]
        ctx.gradient_format, scaling, ctx.fp8_weight_gradient = settings[4:7]
        sharing, group_size, group = settings[7:]
        ctx.save_for_backward(input_, weight, accumulator, transposed, transposed_scale)
        ctx.scaling, ctx.sharing, ctx.group_size, ctx.group = scaling, sharing, group_size, group
        if sharing == "gather":
            input_ = collectives.wait(collectives.start_all_gather(input_, group_size, group))
        values, input_scale = quantize(flatten_tokens(input_), FORWARD_DTYPE, scaling)
        output = _scaled_matmul(
            values,
            input_scale,
            weight_values,
            weight_scale,
            input_.dtype,
            scaling,
            fast_accumulation=True,
        )
        # Not a view: in evaluation megatron.core adds to the output in place, which requires a base
        # tensor.
        reshaped: torch.Tensor = torch.ops.aten._unsafe_view(
            output, [*input_.shape[:-1], output.shape[-1]]
        )
        return reshaped

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator, transposed, transposed_scale = ctx.saved_tensors
        values, scale = quantize(
            flatten_tokens(gradient), GRADIENT_DTYPES[ctx.gradient_format], ctx.scaling
        )

        def compute_input_gradient() -> torch.Tensor:
            settings = (gradient.dtype, ctx.scaling)
            input_gradient = _scaled_matmul(
                values, scale, transposed, transposed_scale, *settings, fast_accumulation=False
            )
            return input_gradient.view(*gradient.shape[:-1], -1)

        def compute_weight_gradient(gathered_input: torch.Tensor) -> torch.Tensor | None:
            if not ctx.needs_input_grad[1]:  # frozen weight
                return None
            return _compute_weight_gradient(
                ctx, gradient, values, scale, gathered_input, weight, accumulator
            )

        input_and_weight_gradients = collectives.compute_gradients(
            input_,
            compute_input_gradient,
            compute_weight_gradient,
            ctx.sharing,
            ctx.group_size,
            ctx.group,
        )
        # No gradients of the accumulator and of the ten settings.
        return *input_and_weight_gradients, *[None] * 11


def _compute_weight_gradient(
    ctx: Any,
    gradient: torch.Tensor,
    fp8_gradient: torch.Tensor,
    gradient_scale: torch.Tensor,
    input_: torch.Tensor,
    weight: torch.Tensor,
    accumulator: torch.Tensor | None,
) -> torch.Tensor:
    """Compute ``gradient^T · input`` and add it to the accumulator, if there is one.

    Args:
        ctx: torch's context with the settings of the layer.
        gradient: 16-bit gradient of the output [..., out].
        fp8_gradient: the same gradient in FP8 [tokens, out].
        gradient_scale: scales of ``fp8_gradient``.
        input_: 16-bit input [..., in].
        weight: 16-bit weight [out, in].
        accumulator: accumulator of the weight gradient, or None.
    """
    if not ctx.fp8_weight_gradient:
        return accumulate_wgrad_gemm(accumulator, weight, gradient, input_)
    dtype = GRADIENT_DTYPES[ctx.gradient_format]
    if ctx.scaling == "blockwise":
        quantized_gradient = fp8_blockwise.quantize_columns(flatten_tokens(gradient), dtype)
        quantized_input = fp8_blockwise.quantize_columns(flatten_tokens(input_), FORWARD_DTYPE)
        weight_gradient = fp8_blockwise.multiply_blockwise(
            *quantized_gradient, *quantized_input, gradient.dtype, square_blocks=False
        )
        return accumulate_gradient(accumulator, weight, weight_gradient)
    if ctx.scaling == "tensorwise":
        left, left_scale = fp8_gradient.t().contiguous(), gradient_scale
        right, right_scale = quantize(flatten_tokens(input_), FORWARD_DTYPE, ctx.scaling)
        right = right.t().contiguous()
    else:  # rowwise: a row of this GEMM is a feature and not a token, so quantize both again
        left, left_scale = quantize(flatten_tokens(gradient).t().contiguous(), dtype, ctx.scaling)
        right, right_scale = quantize(
            flatten_tokens(input_).t().contiguous(), FORWARD_DTYPE, ctx.scaling
        )
    settings = (gradient.dtype, ctx.scaling)
    weight_gradient = _scaled_matmul(
        left, left_scale, right, right_scale, *settings, fast_accumulation=False
    )
    return accumulate_gradient(accumulator, weight, weight_gradient)
