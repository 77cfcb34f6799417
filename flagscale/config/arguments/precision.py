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
    "tp_comm_overlap": "megatron.core's own layers need Transformer Engine for it",
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


_FP8_RECIPES = ("tensorwise", "rowwise", "blockwise")
_MULTIPLE = 16
"""Of which the dimensions of 8-bit products have to be."""


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
    if (recipe, values["fp8"]) == ("blockwise", "hybrid"):
        message = f"hybrid with fp8_recipe {recipe}: torch multiplies no e5m2 gradients by blocks"
        yield "fp8", message + "; take e4m3, whose range is enough for 128 numbers"
    yield from _tokens(values)
    yield from _widths(values)
    first, last = values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"]
    if values["first_last_layers_bf16"] and first + last >= values["num_layers"]:
        yield (
            "first_last_layers_bf16",
            f"num_layers_at_start_in_bf16 {first} and num_layers_at_end_in_bf16 {last} leave none "
            f"of {values['num_layers']} layers to fp8 {values['fp8']}",
        )


def _tokens(values: Values) -> Iterator[Broken]:
    """Of a micro-batch, on a rank."""
    ranks = values["context_parallel_size"]
    tokens = values["seq_length"] * values["micro_batch_size"] // ranks
    if tokens % _MULTIPLE:
        shared = f" / context_parallel_size {ranks}" if ranks > 1 else ""
        yield (
            "micro_batch_size",
            f"{values['micro_batch_size']} x seq_length {values['seq_length']}{shared} = {tokens} "
            f"tokens: 8-bit matrix products take multiples of {_MULTIPLE}",
        )


def _widths(values: Values) -> Iterator[Broken]:
    """Of the weights of linear layers, on a rank. Where devices are unlike ranks say it."""
    ranks, told = values["tensor_model_parallel_size"], set[str]()
    if values["enable_hetero"]:
        return
    for name, text, size in _sizes(values):
        if size % _MULTIPLE and not size % 1 and name not in told:
            told.add(name)
            found = text if text.isdigit() else f"{text} = {size:g} on a rank"
            instead = _instead(values, name, _MULTIPLE * ranks)
            yield name, f"{found}: 8-bit matrix products take multiples of {_MULTIPLE}; {instead}"


def _instead(values: Values, name: str, reach: int) -> str:
    """What to write for a width that 8-bit products do not take."""
    now = values[name]
    for value in range(now + 1, now + reach + 1) if now else ():
        sizes = [size for key, _, size in _sizes({**values, name: value}) if key == name]
        if not any(size % _MULTIPLE for size in sizes):
            return f"take {value}, or leave fp8 out"
    return "leave fp8 out"


def _sizes(values: Values) -> Iterator[tuple[str, str, float]]:
    """Sizes of weights on a rank as far as arguments say them: each with the argument that it is
    by, and in words. What does not divide by the ranks is told elsewhere."""
    tp = values["tensor_model_parallel_size"]
    split = f" / tensor_model_parallel_size {tp}" if tp > 1 else ""
    whole: list[Width] = [("hidden_size", "", values["hidden_size"])]
    parts = list((_latent if values["multi_latent_attention"] else _heads)(values))
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


def _heads(values: Values) -> Iterator[Width]:
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    if width := values["kv_channels"]:
        yield "kv_channels", f" x num_attention_heads {heads}", width * heads
        if groups:
            yield "kv_channels", f" x 2 x num_query_groups {groups}", width * 2 * groups
    elif groups:
        width = values["hidden_size"] // heads
        text = f" / num_attention_heads {heads} x 2 x num_query_groups {groups}"
        yield "hidden_size", text, width * 2 * groups


def _latent(values: Values) -> Iterator[Width]:
    heads, turned = values["num_attention_heads"], values["qk_pos_emb_head_dim"]
    yield "q_lora_rank", "", values["q_lora_rank"] or 0
    text = f" + qk_pos_emb_head_dim {turned}"
    yield "kv_lora_rank", text, values["kv_lora_rank"] + turned
    # What lies side by side in one weight fits if its parts do.
    for name in ("qk_head_dim", "v_head_dim"):
        yield name, f" x num_attention_heads {heads}", values[name] * heads


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
