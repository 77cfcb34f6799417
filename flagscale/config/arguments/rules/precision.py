"""Rules of precisions, with each other and with the layers and devices. Pure, no torch."""

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
"""What this project's layers do and the plain ones do not."""


def check_compiled_only(values: Values) -> Iterator[Violation]:
    """Check features that megatron.core's own layers lack."""
    if values["transformer_impl"] == "local":
        for name, reason in _COMPILED_ONLY.items():
            if values[name]:
                message = (
                    f"{format_value(values[name])} needs transformer_impl: auto or "
                    f"compiled; {reason}"
                )
                yield name, message


_FP8_RECIPES = ("tensorwise", "rowwise", "blockwise")
_FP8_MULTIPLE = 16
"""Of which the dimensions of 8-bit products have to be."""


def check_fp8(values: Values) -> Iterator[Violation]:
    """Matrix products of 8-bit numbers."""
    if not values["fp8"]:
        return
    if not values["bf16"]:
        yield "fp8", f"{values['fp8']} needs bf16: the rest of the model is in 16 bits"
    recipe = values["fp8_recipe"]
    if recipe not in _FP8_RECIPES:
        message = f"{recipe} is not built; take {' or '.join(_FP8_RECIPES)}"
        yield "fp8_recipe", message
    if (recipe, values["fp8"]) == ("blockwise", "hybrid"):
        message = f"hybrid with fp8_recipe {recipe}: torch multiplies no e5m2 gradients by blocks"
        yield "fp8", message + "; take e4m3, whose range is enough for 128 numbers"
    yield from _check_fp8_tokens(values)
    yield from _check_fp8_widths(values)
    first, last = values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"]
    if values["first_last_layers_bf16"] and first + last >= values["num_layers"]:
        yield (
            "first_last_layers_bf16",
            f"num_layers_at_start_in_bf16 {first} and num_layers_at_end_in_bf16 {last} leave none "
            f"of {values['num_layers']} layers to fp8 {values['fp8']}",
        )


def _check_fp8_tokens(values: Values) -> Iterator[Violation]:
    """Check the number of tokens of a micro-batch on one rank."""
    ranks = values["context_parallel_size"]
    tokens = values["seq_length"] * values["micro_batch_size"] // ranks
    if tokens % _FP8_MULTIPLE:
        shared = f" / context_parallel_size {ranks}" if ranks > 1 else ""
        yield (
            "micro_batch_size",
            f"{values['micro_batch_size']} x seq_length {values['seq_length']}{shared} = {tokens} "
            f"tokens: 8-bit matrix products take multiples of {_FP8_MULTIPLE}",
        )


def _check_fp8_widths(values: Values) -> Iterator[Violation]:
    """Check the widths of linear layers on one rank. Ranks of heterogeneous devices check their
    own."""
    ranks, reported = values["tensor_model_parallel_size"], set[str]()
    if values["enable_hetero"]:
        return
    for name, text, size in _weight_sizes(values):
        if size % _FP8_MULTIPLE and not size % 1 and name not in reported:
            reported.add(name)
            actual = text if text.isdigit() else f"{text} = {size:g} on a rank"
            instead = _suggest_width(values, name, _FP8_MULTIPLE * ranks)
            yield (
                name,
                f"{actual}: 8-bit matrix products take multiples of {_FP8_MULTIPLE}; {instead}",
            )


def _suggest_width(values: Values, name: str, reach: int) -> str:
    """Suggest a width that 8-bit products support."""
    now = values[name]
    for value in range(now + 1, now + reach + 1) if now else ():
        sizes = [size for key, _, size in _weight_sizes({**values, name: value}) if key == name]
        if not any(size % _FP8_MULTIPLE for size in sizes):
            return f"take {value}, or leave fp8 out"
    return "leave fp8 out"


def _weight_sizes(values: Values) -> Iterator[tuple[str, str, float]]:
    """Sizes of weights on a rank as far as arguments say them: each with the argument that it is
    by, and in words. What does not divide by the ranks is told elsewhere."""
    tp = values["tensor_model_parallel_size"]
    split = f" / tensor_model_parallel_size {tp}" if tp > 1 else ""
    whole: list[Width] = [("hidden_size", "", values["hidden_size"])]
    parts = list((_latent_widths if values["multi_latent_attention"] else _head_widths)(values))
    if values["multi_latent_attention"]:
        whole += [(name, "", values[name] or 0) for name in ("q_lora_rank", "kv_lora_rank")]
    if not values["num_moe_experts"]:
        parts.append(("ffn_hidden_size", "", values["ffn_hidden_size"] or 0))
    shared = "moe_shared_expert_intermediate_size"
    parts.append((shared, "", values[shared] or 0))
    yield from ((name, f"{values[name]}{text}", size) for name, text, size in whole)
    yield from ((name, f"{values[name]}{text}{split}", size / tp) for name, text, size in parts)


Width = tuple[str, str, int]
"""An argument, what else is reckoned with, in words, and the size."""


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
    heads, turned = values["num_attention_heads"], values["qk_pos_emb_head_dim"]
    yield "q_lora_rank", "", values["q_lora_rank"] or 0
    text = f" + qk_pos_emb_head_dim {turned}"
    yield "kv_lora_rank", text, values["kv_lora_rank"] + turned
    # What lies side by side in one weight fits if its parts do.
    for name in ("qk_head_dim", "v_head_dim"):
        yield name, f" x num_attention_heads {heads}", values[name] * heads


def check_precision(values: Values) -> Iterator[Violation]:
    """Check number formats of weights, gradients and loss."""
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


def check_device(values: Values) -> Iterator[Violation]:
    """The kind has an adapter, and that loads. Whether a host has such devices is the host's to
    say."""
    if complaint := explain_unusable_kind(values["device"]):
        yield "device", complaint
