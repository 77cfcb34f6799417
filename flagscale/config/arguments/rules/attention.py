"""Rules of attention and of layer options: positions, norms, windows, documents, latent attention.

Multi-latent attention is DeepSeek-AI's ("DeepSeek-V2", 2024): queries, keys and values are made of
a few latent numbers per token; one part of a head's queries and keys is rotated by position, and
the keys share this part between all heads. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

_LAYERS_WITHOUT_ROPE = "no_rope_freq"


def check_attention(values: Values) -> Iterator[Violation]:
    """Check positions, norms and scale of attention."""
    scale = values["softmax_scale"]
    if scale is not None and scale <= 0:
        message = (
            f"{format_value(scale)}: expected more than 0; without it one over the root of "
            "a head's "
        )
        yield "softmax_scale", message + "width is taken"
    if values["qk_l2_norm"] and values["qk_layernorm"] and not values["multi_latent_attention"]:
        yield "qk_layernorm", "true with qk_l2_norm: queries and keys have one norm; leave one out"
    yield from _check_layers_without_rope(values)
    if values["position_embedding_type"] == "rope":
        yield from _check_rotary_width(values)


def _check_rotary_width(values: Values) -> Iterator[Violation]:
    """Rotary positions turn pairs of a head's numbers."""
    name, share = "kv_channels", values["rotary_percent"]
    if values["multi_latent_attention"]:
        name, share = "qk_pos_emb_head_dim", 1.0
    width, actual = values[name], format_value(values[name])
    if width is None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if hidden % heads:
            return  # told elsewhere
        width, name = hidden // heads, "hidden_size"
        actual = f"{hidden} / num_attention_heads {heads} = {width}"
    if width % 2 and int(width * share) == width:
        yield (
            name,
            f"{actual}: rotary positions turn pairs of numbers; take an even width of a head",
        )


def _check_layers_without_rope(values: Values) -> Iterator[Violation]:
    """Layers without rotary positions: every so many, or a list."""
    pattern, layers = values[_LAYERS_WITHOUT_ROPE], values["num_layers"]
    if isinstance(pattern, (list, tuple)):
        if pattern and len(pattern) != layers:
            yield _LAYERS_WITHOUT_ROPE, f"{len(pattern)} items, but num_layers is {layers}"
    elif pattern and (pattern < 0 or layers % pattern):
        yield (
            _LAYERS_WITHOUT_ROPE,
            f"{pattern} does not divide num_layers {layers}; a list names every layer",
        )


MLA = "multi_latent_attention"
_EXCLUDED_BY_LATENT: Mapping[str, str] = {
    "qk_l2_norm": "latent projections are normalised by qk_layernorm",
    "softmax_scale": "scores are scaled by the width of a head, and by mscale_all_dim",
    "window_size": "it has no windows here",
    "attn_logit_softcapping": "it bounds no scores here",
    "window_rotary_base": "it has no windows here",
    "rotary_interleaved": "megatron.core turns its positions in halves",
    "attention_output_gate": "megatron.core has no gate for it",
    "use_rope_scaling": "yarn scales its positions (rope_type)",
    "rotary_seq_len_interpolation_factor": "yarn scales its positions (rope_type)",
}
"""What multi-latent attention does not go with, and why."""


def documents_are_separate(values: Values) -> bool:
    """Return whether tokens attend to their own document only. Positions may then start anywhere,
    because attention depends on their differences."""
    return bool(values["reset_attention_mask"] or values["sft"])


def check_latent_attention(values: Values) -> Iterator[Violation]:
    """Check multi-latent attention."""
    if not values[MLA]:
        if values["rope_type"] == "yarn":
            message = "yarn needs multi_latent_attention; use_rope_scaling scales as Llama 3.1 does"
            yield "rope_type", message
        return
    if values["reset_position_ids"] and not documents_are_separate(values):
        message = f"true with {MLA}: each layer counts positions through the sequence; set "
        yield "reset_position_ids", f"{message}reset_attention_mask, with which that is the same"
    for name, reason in _EXCLUDED_BY_LATENT.items():
        if values[name]:
            yield name, f"{format_value(values[name])} with {MLA}: {reason}; leave it out"
    if values["position_embedding_type"] != "rope":
        actual = format_value(values["position_embedding_type"])
        yield "position_embedding_type", f"{actual} with {MLA}: its positions are rotary; take rope"
    if (backend := values["attention_backend"]) in ("local", "flash"):
        message = f"{backend} with {MLA}: its kernel wants values as wide as keys; take auto"
        yield "attention_backend", message
    if values["family"] != "gpt":
        yield MLA, f"true with family {values['family']}: attention there is not latent"
    yield from _check_latent_split(values)


def _check_latent_split(values: Values) -> Iterator[Violation]:
    """Latent numbers are computed in parts by tensor-parallel ranks."""
    tp = values["tensor_model_parallel_size"]
    sizes = {"q_lora_rank": values["q_lora_rank"], "kv_lora_rank": values["kv_lora_rank"]}
    if sizes["kv_lora_rank"]:
        sizes["kv_lora_rank"] += values["qk_pos_emb_head_dim"]
    for name, size in sizes.items():
        if size and size % tp:
            more = f" + qk_pos_emb_head_dim {values['qk_pos_emb_head_dim']} = {size}"
            what = more if name == "kv_lora_rank" else ""
            message = f"{values[name]}{what} is not divisible by tensor_model_parallel_size {tp}"
            yield name, message


def check_layer_options(values: Values) -> Iterator[Violation]:
    """Check options of layers: norms, windows, soft-capping."""
    if values["layernorm_zero_centered_gamma"] and values["normalization"] != "RMSNorm":
        yield (
            "layernorm_zero_centered_gamma",
            f"true with normalization {values['normalization']}: RMSNorm alone has it here",
        )
    if values["window_rotary_base"] and values["position_embedding_type"] != "rope":
        yield (
            "window_rotary_base",
            f"{values['window_rotary_base']} needs position_embedding_type: rope, found "
            f"{format_value(values['position_embedding_type'])}",
        )
    yield from _check_windows(values)
    for name in ("window_size", "attn_logit_softcapping"):
        if values[name]:
            yield from _check_kernels(name, values)


def _check_windows(values: Values) -> Iterator[Violation]:
    window, pattern = values["window_size"], values["window_attn_skip_freq"]
    if not window:
        return
    if len(window) != 2 or window[0] < 0 or window[1] != 0:
        yield (
            "window_size",
            f"{format_value(window)}: expected how many tokens before its own a token attends "
            "to, and 0, "
            "such as [4095, 0]",
        )
    layers = values["num_layers"]
    if isinstance(pattern, list) and len(pattern) != layers:
        message = f"{len(pattern)} items, but num_layers is {layers}"
        yield "window_attn_skip_freq", message
    elif pattern == 0:
        yield "window_attn_skip_freq", "0: expected 2 for every second layer, or a list"


def _check_kernels(name: str, values: Values) -> Iterator[Violation]:
    """Attention that has windows, or bounds its scores."""
    actual, backend = format_value(values[name]), values["attention_backend"]
    cores = backend == "local" and name == "window_size"
    if backend not in ("auto", "unfused") and not cores:
        message = (
            f"{actual} is not possible with attention_backend: {backend}, whose kernel has no "
        )
        yield name, message + "such thing; take auto"
    if values["context_parallel_size"] > 1:
        yield (
            name,
            f"{actual} with context_parallel_size {values['context_parallel_size']}: each rank's "
            "part of a sequence would need a mask of its own; take tensor parallelism",
        )


_LOCAL_ATTENTION: Mapping[str, Any] = {
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
}
"""What torch's scaled_dot_product_attention cannot do, and the values that ask for nothing."""


def check_local_attention(values: Values) -> Iterator[Violation]:
    if values["attention_backend"] == "local":
        return
    for name, nothing in _LOCAL_ATTENTION.items():
        if (values[name] or nothing) != nothing:
            yield (
                name,
                f"{format_value(values[name])} is not possible with scaled_dot_product_attention; "
                "attention_backend: local takes megatron.core's own attention",
            )


def check_documents(values: Values) -> Iterator[Violation]:
    """Check that attention can be restricted to documents."""
    if not values["reset_attention_mask"]:
        return
    if values["window_size"] and values["attention_backend"] == "local":
        yield (
            "window_size",
            f"{format_value(values['window_size'])} with reset_attention_mask: megatron.core's own "
            "attention makes the window's mask itself, and passes over that of documents; take "
            "attention_backend: auto",
        )
    if values["attention_backend"] == "fused":
        yield (
            "attention_backend",
            "fused: cuDNN's kernel takes no documents (reset_attention_mask); take auto or flash",
        )
