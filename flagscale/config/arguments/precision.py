"""Which precisions go together, with each other and with the layers that are built.

Pure, and free of torch; see :mod:`flagscale.config.arguments.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.config.arguments.values import shown

Values = Mapping[str, Any]
Broken = tuple[str, str]

_COMPILED_ONLY: Mapping[str, str] = {
    "gradient_accumulation_fusion": "megatron.core's own layers need Apex's CUDA extension for it",
    "apply_rope_fusion": "megatron.core's own layers need Transformer Engine or Apex for it",
    "fp8": "megatron.core's own layers need Transformer Engine for it",
}
"""What this project's layers do and the plain ones do not."""


def compiled_only(values: Values) -> Iterator[Broken]:
    """What the plain layers cannot do."""
    if values["transformer_impl"] == "local":
        for name, reason in _COMPILED_ONLY.items():
            if values[name]:
                message = (
                    f"{shown(values[name])} needs transformer_impl: auto or compiled; {reason}"
                )
                yield name, message


_FP8_RECIPES = ("tensorwise", "rowwise")


def eight_bits(values: Values) -> Iterator[Broken]:
    """Matrix products of 8-bit numbers."""
    if not values["fp8"]:
        return
    if not values["bf16"]:
        yield "fp8", f"{values['fp8']} needs bf16: the rest of the model is in 16 bits"
    recipe = values["fp8_recipe"]
    if recipe not in _FP8_RECIPES:
        message = f"{recipe} is not built; take {' or '.join(_FP8_RECIPES)}"
        yield "fp8_recipe", message
    tokens = values["seq_length"] * values["micro_batch_size"]
    if tokens % 16:
        yield (
            "micro_batch_size",
            f"{values['micro_batch_size']} x seq_length {values['seq_length']} = {tokens} tokens: "
            "8-bit matrix products take multiples of 16",
        )
    first, last = values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"]
    if values["first_last_layers_bf16"] and first + last >= values["num_layers"]:
        yield (
            "first_last_layers_bf16",
            f"num_layers_at_start_in_bf16 {first} and num_layers_at_end_in_bf16 {last} leave none "
            f"of {values['num_layers']} layers to fp8 {values['fp8']}",
        )


def precision(values: Values) -> Iterator[Broken]:
    """Of weights, gradients and loss."""
    if values["bf16"] and values["fp16"]:
        yield "fp16", "excludes bf16"
    if values["cross_entropy_loss_fusion"] and not values["bf16"]:
        yield (
            "cross_entropy_loss_fusion",
            "needs bf16: megatron.core rounds the fused loss's gradient to bf16 whatever the "
            "precision is",
        )
    if values["swiglu"] and values["squared_relu"]:
        yield "swiglu", "excludes squared_relu"
