"""Rules of number formats (fp32, bf16, fp16, fp8), and of the layers and devices that support them.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.accelerators.registry import explain_unusable_kind
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

_COMPILED_ONLY: Mapping[str, str] = {
    "gradient_accumulation_fusion": "megatron.core's own layers need Apex's CUDA extension for it",
    "apply_rope_fusion": "megatron.core's own layers need Transformer Engine or Apex for it",
    "fp8": "megatron.core's own layers need Transformer Engine for it",
    "tp_comm_overlap": "megatron.core's own layers need Transformer Engine for it",
}
"""Features of this project's compiled layers that megatron.core's own layers lack, with the
reason."""


def check_compiled_only(values: Values) -> Iterator[Violation]:
    """Check that features of the compiled layers are not used with megatron.core's own layers."""
    if values["transformer_impl"] == "local":
        for name, reason in _COMPILED_ONLY.items():
            if values[name]:
                yield (
                    name,
                    f"{format_value(values[name])} requires transformer_impl: auto or compiled; "
                    f"{reason}",
                )


_FP8_RECIPES = ("tensorwise", "rowwise", "blockwise")
_FP8_MULTIPLE = 16
"""Dimensions of an fp8 GEMM must be multiples of this."""


def check_fp8(values: Values) -> Iterator[Violation]:
    """Check that linear layers can be computed by fp8 GEMMs."""
    if not values["fp8"]:
        return
    if not values["bf16"]:
        yield "fp8", f"{values['fp8']} requires bf16: true for the rest of the model"
    recipe = values["fp8_recipe"]
    if recipe not in _FP8_RECIPES:
        yield "fp8_recipe", f"expected {' or '.join(_FP8_RECIPES)}, found {recipe}"
    if (recipe, values["fp8"]) == ("blockwise", "hybrid"):
        yield (
            "fp8",
            f"hybrid is not supported with fp8_recipe: {recipe}, because torch has no blockwise "
            "GEMM for e5m2 gradients; use e4m3",
        )
    yield from _check_fp8_tokens(values)
    yield from _check_fp8_widths(values)
    first, last = values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"]
    if values["first_last_layers_bf16"] and first + last >= values["num_layers"]:
        yield (
            "first_last_layers_bf16",
            f"num_layers_at_start_in_bf16 {first} and num_layers_at_end_in_bf16 {last} leave no "
            f"fp8 layer of {values['num_layers']}",
        )


def _check_fp8_tokens(values: Values) -> Iterator[Violation]:
    """Check the number of tokens of a micro-batch on one rank."""
    ranks = values["context_parallel_size"]
    tokens = values["seq_length"] * values["micro_batch_size"] // ranks
    if tokens % _FP8_MULTIPLE:
        divisor_text = f" / context_parallel_size {ranks}" if ranks > 1 else ""
        yield (
            "micro_batch_size",
            f"{values['micro_batch_size']} x seq_length {values['seq_length']}{divisor_text} = "
            f"{tokens} tokens, but fp8 requires a multiple of {_FP8_MULTIPLE}",
        )


def _check_fp8_widths(values: Values) -> Iterator[Violation]:
    """Check the widths of linear layers on one rank. Ranks of heterogeneous devices check their
    own mesh."""
    ranks, reported = values["tensor_model_parallel_size"], set[str]()
    if values["enable_hetero"]:
        return
    for name, text, size in _weight_sizes(values):
        # Sizes that the ranks do not divide are reported by check_tensor_parallel.
        if size % _FP8_MULTIPLE and not size % 1 and name not in reported:
            reported.add(name)
            actual = text if text.isdigit() else f"{text} = {size:g} per rank"
            hint = _suggest_width(values, name, _FP8_MULTIPLE * ranks)
            yield name, f"{actual} is not a multiple of {_FP8_MULTIPLE}, as fp8 requires; {hint}"


def _suggest_width(values: Values, name: str, max_increase: int) -> str:
    """Suggest the next larger value of an argument that fp8 supports."""
    current = values[name]
    for value in range(current + 1, current + max_increase + 1) if current else ():
        sizes = [size for key, _, size in _weight_sizes({**values, name: value}) if key == name]
        if not any(size % _FP8_MULTIPLE for size in sizes):
            return f"use {value}, or leave fp8 out"
    return "leave fp8 out"


def _weight_sizes(values: Values) -> Iterator[tuple[str, str, float]]:
    """Yield the dimensions of weights on one rank that follow from arguments: the argument, how the
    dimension is computed, and the dimension. It is fractional if the ranks do not divide it."""
    tp = values["tensor_model_parallel_size"]
    divisor_text = f" / tensor_model_parallel_size {tp}" if tp > 1 else ""
    whole: list[Width] = [("hidden_size", "", values["hidden_size"])]
    split = list((_latent_widths if values["multi_latent_attention"] else _head_widths)(values))
    if values["multi_latent_attention"]:
        whole += [(name, "", values[name] or 0) for name in ("q_lora_rank", "kv_lora_rank")]
    if not values["num_moe_experts"]:
        split.append(("ffn_hidden_size", "", values["ffn_hidden_size"] or 0))
    shared_width = "moe_shared_expert_intermediate_size"
    split.append((shared_width, "", values[shared_width] or 0))
    yield from ((name, f"{values[name]}{text}", size) for name, text, size in whole)
    yield from (
        (name, f"{values[name]}{text}{divisor_text}", size / tp) for name, text, size in split
    )


Width = tuple[str, str, int]
"""An argument, the other factors of a dimension as text, and the dimension over all ranks."""


def _head_widths(values: Values) -> Iterator[Width]:
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    if width := values["kv_channels"]:
        yield "kv_channels", f" x num_attention_heads {heads}", width * heads
        if groups:
            yield "kv_channels", f" x 2 x num_query_groups {groups}", width * 2 * groups
    elif groups:
        width = values["hidden_size"] // heads
        text = f" / num_attention_heads {heads} x 2 x num_query_groups {groups}"
        yield "hidden_size", text, width * 2 * groups


def _latent_widths(values: Values) -> Iterator[Width]:
    heads, rotary_width = values["num_attention_heads"], values["qk_pos_emb_head_dim"]
    yield "q_lora_rank", "", values["q_lora_rank"] or 0
    text = f" + qk_pos_emb_head_dim {rotary_width}"
    yield "kv_lora_rank", text, values["kv_lora_rank"] + rotary_width
    # A weight that concatenates keys and values is a multiple if both parts are.
    for name in ("qk_head_dim", "v_head_dim"):
        yield name, f" x num_attention_heads {heads}", values[name] * heads


def check_precision(values: Values) -> Iterator[Violation]:
    """Check number formats of weights, gradients and loss."""
    if values["bf16"] and values["fp16"]:
        yield "fp16", "cannot be combined with bf16; leave one out"
    if values["cross_entropy_loss_fusion"] and not values["bf16"]:
        yield (
            "cross_entropy_loss_fusion",
            "requires bf16, because megatron.core rounds the gradient of the fused loss to bf16",
        )
    if values["swiglu"] and values["squared_relu"]:
        yield "swiglu", "cannot be combined with squared_relu; leave one out"


def check_device(values: Values) -> Iterator[Violation]:
    """Check that the device kind has an accelerator adapter that can be loaded. The preflight
    checks whether a host has such devices."""
    if problem := explain_unusable_kind(values["device"]):
        yield "device", problem
