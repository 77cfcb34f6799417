"""Resolution of a config.json to the values that transformers reads from it.

A config.json leaves out what equals the defaults of its model type, and keys have older names. This
module has the defaults and names of every supported model type; the families read resolved values
only. The tests compare both with the classes of transformers, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYER_TYPES = SLIDING, FULL = "sliding_attention", "full_attention"
"""Values of ``layer_types`` in config.json: layers with a sliding window, and without."""
THETA_FULL, THETA_SLIDING = 1e6, 1e4
"""Bases of the rotary positions of Gemma 3, by kind of layer."""
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_SCALED_FROM_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of scaling that depend on the length before it, which a key outside of it may give."""

_COMMON: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_LLAMA: Mapping[str, Any] = {
    **_COMMON,
    **_BIASES,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
}
_QWEN: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN2: Mapping[str, Any] = {**_QWEN, "max_window_layers": 28, "layer_types": None}
_MISTRAL: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
_GEMMA2: Mapping[str, Any] = {
    **{name: value for name, value in _GEMMA.items() if name != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_COMMON,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
    "mistral": _MISTRAL,
    "ministral": {**_MISTRAL, "layer_types": None},
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window_pattern": 6,
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "mlp_bias": False,
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
}
"""Values of keys that a config.json leaves out, by ``model_type``, if they matter here."""
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}
"""Other names of keys by ``model_type``. Where a file has both, transformers takes the other."""


def resolve_model_type(config: Mapping[str, Any]) -> Any:
    """Return the model type that transformers uses for a config.json.

    A Mistral model with ``layer_types`` is loaded as Ministral, whose layers differ.
    """
    kind = config.get("model_type")
    return "ministral" if kind == "mistral" and "layer_types" in config else kind


def resolve_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the values that transformers reads from a config.json of a supported model type.

    Missing keys have the defaults of the model type. Settings of rotary positions are complete, and
    in ``rope_parameters`` alone. Values are not checked.
    """
    defaults, other_names = DEFAULTS[model_type], _OTHER_NAMES.get(model_type, {})
    values = {**defaults, **{name: config[name] for name in defaults if name in config}}
    values |= {
        other_names.get(name, name): value for name, value in config.items() if name not in defaults
    }
    if "rope_theta" not in defaults:
        return values
    resolve = _resolve_both_ropes if model_type == "gemma3_text" else _resolve_rope
    values["rope_parameters"] = resolve(config, values)
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        values.pop(name, None)
    return values


def _resolve_rope(config: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the settings of rotary positions.

    ``rope_scaling`` replaces ``rope_parameters`` as a whole. Keys outside of both complete them;
    only the original length outside has priority.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return given
    outside = {"rope_theta": values["rope_theta"]}
    if config.get("partial_rotary_factor") is not None:
        outside["partial_rotary_factor"] = config["partial_rotary_factor"]
    settings = {"rope_type": given.get("type", "default"), **outside, **given}
    if settings["rope_type"] in _SCALED_FROM_LENGTH:
        settings.setdefault(_ORIGINAL_LENGTH, values["max_position_embeddings"])
        if _ORIGINAL_LENGTH in config:
            settings[_ORIGINAL_LENGTH] = config[_ORIGINAL_LENGTH]
    return settings


def _resolve_both_ropes(config: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the settings of rotary positions of Gemma 3, by kind of layer.

    ``rope_scaling`` and ``rope_theta`` belong to the layers with full attention.
    """
    given = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    if not isinstance(given or {}, dict) or not isinstance(scaling or {}, dict):
        return given or scaling
    by_type = dict(given or {})
    if not all(isinstance(by_type.get(name) or {}, dict) for name in LAYER_TYPES):
        return given
    thetas = {
        FULL: config.get("rope_theta", THETA_FULL),
        SLIDING: config.get("rope_local_base_freq", THETA_SLIDING),
    }
    for name in LAYER_TYPES:
        settings = by_type.get(name) or {"rope_type": "default"}
        settings = {**settings, **(scaling or {})} if name == FULL else settings
        outside = {"rope_theta": thetas[name]}
        if config.get("partial_rotary_factor") is not None:
            outside["partial_rotary_factor"] = config["partial_rotary_factor"]
        settings = {"rope_type": settings.get("type", "default"), **outside, **settings}
        if settings["rope_type"] in _SCALED_FROM_LENGTH:
            settings.setdefault(_ORIGINAL_LENGTH, values["max_position_embeddings"])
        by_type[name] = settings
    return by_type
