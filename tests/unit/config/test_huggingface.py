"""Conversion between Hugging Face's config.json and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.compat.huggingface.families import (
    HUGGINGFACE_FAMILIES,
    UNSUPPORTED_MODEL_TYPES,
)
from flagscale.config.arguments.compat.huggingface.models import (
    MODEL_FUNCTION,
    arguments_of,
    config_of,
    effective,
)
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.checks import experiment_notes
from flagscale.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from conftest import Workspace

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "rope_theta": 1e6,
}
QWEN_EXPERTS = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 48,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "layer_norm_epsilon": 1e-05,
    "activation_function": "gelu_new",
    "vocab_size": 50257,
}
GEMMA2 = {
    **{name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
GEMMA3 = {
    **{k: v for k, v in GEMMA2.items() if not k.endswith("softcapping")},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000,
    "sliding_window_pattern": 6,
}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK2 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

PUBLISHED: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    "Llama 3": (
        LLAMA,
        {
            "num_layers": 32,
            "ffn_hidden_size": 14336,
            "num_query_groups": 8,
            "kv_channels": 128,
            "rotary_base": 500000,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 128256,
        },
    ),
    "Llama 3.1": (
        {**LLAMA, "rope_scaling": LLAMA3},
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    ),
    "Llama 3.1 as v5 writes it": (
        {**LLAMA, "rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"use_rope_scaling": True, "rotary_base": 500000},
    ),
    "Llama 2, without the keys of later ones": (
        {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "num_key_value_heads")},
        {"rotary_base": 10000, "num_query_groups": 32},
    ),
    "linear scaling": (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rotary_seq_len_interpolation_factor": 4},
    ),
    "Qwen2.5": (
        {**QWEN2, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        {"add_qkv_bias": True, "add_bias_linear": False},
    ),
    "Qwen2.5 with windows in its last layers": (
        {**QWEN2, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 30},
        {"window_size": [127, 0], "window_attn_skip_freq": [0] * 30 + [1] * 2},
    ),
    "Qwen2.5 with windows as v5 writes them": (
        {
            **QWEN2,
            "use_sliding_window": True,
            "sliding_window": 128,
            "layer_types": ["full_attention", "sliding_attention"] * 16,
        },
        {"window_attn_skip_freq": [0, 1] * 16},
    ),
    "Qwen3 MoE": (
        QWEN_EXPERTS,
        {
            "qk_layernorm": True,
            "num_moe_experts": 128,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 768,
            "moe_router_pre_softmax": False,
            "moe_layer_freq": [1] * 32,
        },
    ),
    "Qwen3 MoE, some layers dense": (
        {**QWEN_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"moe_layer_freq": [0, 1, 0, 0]},
    ),
    "Qwen3 MoE, probabilities as they are": (
        {**QWEN_EXPERTS, "norm_topk_prob": False},
        {"moe_router_pre_softmax": True},
    ),
    "Mixtral": (MIXTRAL, {"num_moe_experts": 8, "moe_ffn_hidden_size": 14336}),
    "Mistral": ({**MISTRAL, "sliding_window": 4096}, {"window_size": [4095, 0]}),
    "Mistral, without the keys that have defaults": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        {
            "window_size": [4095, 0],
            "num_query_groups": 8,
            "ffn_hidden_size": 14336,
            "layernorm_epsilon": 1e-6,
            "max_position_embeddings": 131072,
        },
    ),
    "Mistral with layer types": (
        {**MISTRAL, "layer_types": ["sliding_attention", "full_attention"] * 16},
        {"window_size": [4095, 0], "window_attn_skip_freq": [1, 0] * 16},
    ),
    "Mixtral, without the keys that have defaults": (
        {"model_type": "mixtral"},
        {"moe_router_topk": 2, "num_moe_experts": 8, "layernorm_epsilon": 1e-5},
    ),
    "Qwen3, whose heads have a default": ({"model_type": "qwen3"}, {"kv_channels": 128}),
    "Llama with an original length next to its scaling": (
        {
            **LLAMA,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096},
            "original_max_position_embeddings": 8192,
        },
        {"use_rope_scaling": True},
    ),
    "Llama with scaling next to parameters": (
        {
            **LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        {"rotary_seq_len_interpolation_factor": 4, "rotary_base": 500000},
    ),
    "Gemma 2": (
        GEMMA2,
        {
            "swiglu": False,
            "gated_linear_unit": True,
            "openai_gelu": True,
            "layernorm_zero_centered_gamma": True,
            "sandwich_norm": True,
            "scale_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "softmax_scale": 1 / 12,
            "window_size": [4095, 0],
            "window_attn_skip_freq": [1, 0] * 16,
            "untie_embeddings_and_output_weights": False,
            "rotary_base": 500000,
        },
    ),
    "Gemma 3": (
        GEMMA3,
        {
            "window_attn_skip_freq": [1, 1, 1, 1, 1, 0, 1],
            "window_rotary_base": 10000,
            "rotary_base": 1000000,
            "qk_layernorm": True,
        },
    ),
    "Gemma 3 as v5 writes it": (
        {**GEMMA3, "rope_theta": None, "rope_local_base_freq": None, "rope_parameters": ROPES},
        {
            "window_rotary_base": 10000,
            "rotary_base": 1000000,
            "rotary_seq_len_interpolation_factor": 8,
        },
    ),
    "DeepSeek-V3": (
        DEEPSEEK,
        {
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "qk_pos_emb_head_dim": 64,
            "moe_layer_freq": [0] * 3 + [1] * 29,
            "moe_shared_expert_intermediate_size": 2048,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_dtype": "fp32",
            "rope_type": "yarn",
            "rotary_scaling_factor": 40.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "DeepSeek-V3 before its sequences were made longer": (
        {**DEEPSEEK, "rope_scaling": None},
        {"rope_type": "rope"},
    ),
    "DeepSeek-V3 that says less than it is": (
        {
            name: value
            for name, value in DEEPSEEK.items()
            if name not in ("n_group", "topk_group", "first_k_dense_replace", "q_lora_rank")
        },
        {
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_layer_freq": [0] * 3 + [1] * 29,
            "q_lora_rank": 1536,
        },
    ),
    "DeepSeek-V2-Lite": (
        DEEPSEEK2,
        {
            "q_lora_rank": None,
            "moe_shared_expert_intermediate_size": 4096,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": None,
        },
    ),
    "GPT-2": (
        GPT2,
        {
            "ffn_hidden_size": 3072,
            "openai_gelu": True,
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": 1024,
            "untie_embeddings_and_output_weights": False,
        },
    ),
}


@pytest.mark.parametrize(("config", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_config_is_converted(config: Mapping[str, Any], expected: dict[str, Any]) -> None:
    values = arguments_of(config)
    assert {name: values[name] for name in expected} == expected


UNSUPPORTED: dict[str, tuple[Mapping[str, Any], list[str]]] = {
    "unknown family": (
        {**LLAMA, "model_type": "lama"},
        ["found 'lama'", "did you mean 'llama'"],
    ),
    "known and impossible": (
        {"model_type": "gemma3"},
        ["'gemma3' is not supported", "images and text"],
    ),
    "DeepSeek-V2, whose groups are ranked by their best": (
        {**DEEPSEEK2, "topk_method": "group_limited_greedy", "topk_group": 3},
        ["n_group: 8 is not supported", "their 1 best expert,", "6 // topk_group 3 = 2"],
    ),
    "DeepSeek-V3 with other groups": (
        {**DEEPSEEK, "topk_group": 2},
        ["n_group: 8 is not supported", "their 2 best experts,", "8 // topk_group 2 = 4"],
    ),
    "DeepSeek-V3 in eight bits": (
        {**DEEPSEEK, "quantization_config": {"quant_method": "fp8"}},
        ["quantization_config", "use the bf16 weights"],
    ),
    "DeepSeek-V3 that does not normalise": (
        {**DEEPSEEK, "norm_topk_prob": False},
        ["norm_topk_prob: false is not supported"],
    ),
    "DeepSeek-V3 otherwise": (
        {
            **DEEPSEEK,
            "rope_interleave": False,
            "rms_norm_eps": 1e-5,
            "moe_layer_freq": 2,
            "rope_scaling": {**YARN, "mscale": None, "truncate": False, "attention_factor": 1.2},
        },
        [
            "rope_interleave: false is not supported",
            "rms_norm_eps: 1e-05 is not supported",
            "moe_layer_freq: 2 is not supported",
            "rope_scaling.mscale_all_dim: 1.0 is not supported: it requires mscale",
            "rope_scaling.truncate: false is not supported",
            "rope_scaling.attention_factor: 1.2 is not supported",
        ],
    ),
    "Gemma 2 with SiLU": (
        {**GEMMA2, "hidden_activation": "silu"},
        ["hidden_activation: 'silu' is not supported", "gelu_pytorch_tanh"],
    ),
    "Gemma 2 that looks ahead": (
        {**GEMMA2, "use_bidirectional_attention": True},
        ["use_bidirectional_attention: true is not supported"],
    ),
    "Gemma 2 with other layers": (
        {**GEMMA2, "layer_types": ["chunked_attention"] * 32},
        ["layer_types", "expected a list of 32 items, sliding_attention or full_attention"],
    ),
    "Gemma 3 with bounded scores": (
        {**GEMMA3, "attn_logit_softcapping": 50.0},
        [
            "attn_logit_softcapping: 50.0 is not supported",
            "transformers ignores it for this family",
        ],
    ),
    "Gemma 3 with scaled positions in windows": (
        {**GEMMA3, "rope_parameters": {"sliding_attention": {**LLAMA3, "rope_theta": 1e4}}},
        ["positions of layers with a sliding window cannot be scaled"],
    ),
    "no family": ({}, ["model_type: expected a text, found nothing"]),
    "another head": (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        ["expected LlamaForCausalLM"],
    ),
    "yarn": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ["rope_scaling: 'yarn' is not supported"],
    ),
    "yarn next to parameters": (
        {
            **LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        ["rope_scaling: 'yarn' is not supported"],
    ),
    "an original length next to the scaling": (
        {**LLAMA, "rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        ["rope_scaling: ", "the constants low_freq_factor 1, high_freq_factor 4"],
    ),
    "types of scaling that contradict each other": (
        {**LLAMA, "rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
        ["rope_scaling.type: 'linear' is not supported: rope_type is 'default'"],
    ),
    "positions by kind of layer": (
        {**LLAMA, "rope_parameters": ROPES},
        ["rope_parameters: ", "this family has the same positions in all layers"],
    ),
    "layer types that transformers ignores": (
        {**MIXTRAL, "layer_types": ["sliding_attention", "full_attention"] * 16},
        ["layer_types: ", "transformers ignores it for this family"],
    ),
    "layer types without a window": (
        {**QWEN2, "layer_types": ["sliding_attention"] * 32},
        ["layer_types: 'sliding_attention' is not supported: the model has no sliding window"],
    ),
    "null where transformers has no null": (
        {**LLAMA, "tie_word_embeddings": None},
        ["tie_word_embeddings: expected true or false, found null"],
    ),
    "layers that differ": (
        {**LLAMA, "per_layer_config": {"0": {"num_attention_heads": 8}}},
        ["per_layer_config: ", "layers that differ are not supported"],
    ),
    "other frequencies": (
        {**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}},
        ["with the constants low_freq_factor 1, high_freq_factor 4"],
    ),
    "half a position": (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 1.5}},
        ["rope_scaling.factor: 1.5 is not supported"],
    ),
    "a base in fractions": ({**LLAMA, "rope_theta": 10000.5}, ["rope_theta: 10000.5 is not"]),
    "a bias alone": (
        {**LLAMA, "attention_bias": True},
        ["attention_bias: true is not supported", "biases of all projections"],
    ),
    "gelu": ({**LLAMA, "hidden_act": "gelu"}, ["hidden_act: 'gelu' is not supported"]),
    "fewer bits": (
        {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
        ["quantization_config", "is not supported"],
    ),
    "everything at once": (
        {**LLAMA, "num_hidden_layers": "x", "vocab_size": None, "rms_norm_eps": -1},
        [
            "num_hidden_layers: expected a whole number from 1 to 65536, found 'x'",
            "vocab_size: expected a whole number from 1, found null",
            "rms_norm_eps: expected a number above 0, found -1",
        ],
    ),
    "heads": ({**LLAMA, "num_key_value_heads": 5}, ["it does not divide num_attention_heads 32"]),
    "endless layers": ({**LLAMA, "num_hidden_layers": 10**11}, ["num_hidden_layers: expected"]),
    "no number that a float holds": ({**LLAMA, "rope_theta": 10**400}, ["rope_theta: 1000"]),
    "infinity": ({**LLAMA, "rms_norm_eps": float("inf")}, ["rms_norm_eps: expected a number"]),
    "GPT-2 with scaled scores": (
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
        ["scale_attn_by_inverse_layer_idx: true is not supported"],
    ),
    "GPT-2 with ReLU": ({**GPT2, "activation_function": "relu"}, ["'relu' is not supported"]),
}


@pytest.mark.parametrize(("config", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_config_is_rejected_with_reason(
    config: Mapping[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        arguments_of(config)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(
    config=st.sampled_from(
        [
            {**LLAMA, "rope_scaling": LLAMA3},
            MIXTRAL,
            QWEN_EXPERTS,
            MISTRAL,
            GPT2,
            GEMMA2,
            GEMMA3,
            DEEPSEEK,
            DEEPSEEK2,
        ]
    ),
    data=st.data(),
)
@settings(deadline=None, max_examples=300)
def test_random_config_is_converted_or_rejected(
    config: dict[str, Any], data: st.DataObject
) -> None:
    changed = dict(config)
    for _ in range(2):
        changed[data.draw(st.sampled_from(sorted(config)))] = data.draw(_VALUES)
    if "rope_scaling" in config and isinstance(changed["rope_scaling"], dict):
        scaling = dict(changed["rope_scaling"])
        scaling[data.draw(st.sampled_from(sorted(LLAMA3)))] = data.draw(_VALUES)
        changed["rope_scaling"] = scaling
    try:
        effective(arguments_of(changed))
    except CheckpointError as error:
        assert str(error)


def test_no_model_type_is_both_supported_and_unsupported() -> None:
    assert not HUGGINGFACE_FAMILIES.keys() & UNSUPPORTED_MODEL_TYPES.keys()
    assert set(MODEL_FUNCTION) <= set(arguments())


_SIZES = {
    "num_layers": st.integers(1, 6),
    "hidden_size": st.sampled_from([32, 64]),
    "ffn_hidden_size": st.integers(8, 99),
    "num_query_groups": st.sampled_from([1, 2, 4]),
    "kv_channels": st.sampled_from([8, 20]),
    "layernorm_epsilon": st.sampled_from([1e-5, 1e-6]),
    "rotary_base": st.integers(1, 10**8),
    "vocab_size": st.integers(2, 10**6),
    "max_position_embeddings": st.integers(1, 10**6),
    "untie_embeddings_and_output_weights": st.booleans(),
}
_ROPE: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        {"rotary_seq_len_interpolation_factor": 4},
    ]
)
_GEMMA = {
    "swiglu": False,
    "gated_linear_unit": True,
    "openai_gelu": True,
    "layernorm_zero_centered_gamma": True,
    "scale_embeddings": True,
}
_LATENT = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "moe_layer_freq": 1,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
}
_GEMMA2 = {
    "sandwich_norm": True,
    "softmax_scale": 1 / 12,
    "final_logit_softcapping": 30.0,
    "window_size": [7, 0],
    "window_attn_skip_freq": 2,
}
_KINDS = st.sampled_from(
    [
        {},
        {"add_bias_linear": True},
        {"add_qkv_bias": True},
        {"qk_layernorm": True},
        {"window_size": [7, 0]},
        {"add_qkv_bias": True, "window_size": [7, 0]},
        {"add_qkv_bias": True, "window_size": [7, 0], "window_attn_skip_freq": 2},
        _GEMMA,
        _LATENT,
        {**_LATENT, "moe_router_num_groups": 8, "moe_router_group_topk": 4},
        {**_LATENT, "q_lora_rank": 16, "rope_type": "yarn", "mscale_all_dim": 0.707},
        {**_GEMMA, **_GEMMA2},
        {**_GEMMA, **_GEMMA2, "attn_logit_softcapping": 50.0, "window_attn_skip_freq": None},
        {**_GEMMA, **_GEMMA2, "qk_layernorm": True, "window_rotary_base": 10000},
        {"num_moe_experts": 4, "moe_router_topk": 2},
        {"num_moe_experts": 4, "qk_layernorm": True, "moe_ffn_hidden_size": 24},
        {"num_moe_experts": 4, "qk_layernorm": True, "moe_router_pre_softmax": True},
    ]
)


@given(sizes=st.fixed_dictionaries(_SIZES), rope=_ROPE, kind=_KINDS)
@settings(deadline=None)
def test_arguments_survive_round_trip_through_config(
    sizes: dict[str, Any], rope: dict[str, Any], kind: dict[str, Any]
) -> None:
    base = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
    base |= {"position_embedding_type": "rope", "num_attention_heads": 4}
    values = {**base, **sizes, **rope, **kind}
    config = json.loads(json.dumps(config_of(values)))
    assert effective(arguments_of(config)) == effective(values)


def test_model_without_matching_family_is_rejected() -> None:
    values = {**arguments_of(LLAMA), "squared_relu": True, "swiglu": False, "qk_l2_norm": True}
    with pytest.raises(CheckpointError, match="LlamaForCausalLM differs least") as error:
        config_of(values)
    for name in (
        "squared_relu: the family has false, the model true",
        "qk_l2_norm: the family has false",
    ):
        assert name in str(error.value)


# --- Experiments that start from a Hugging Face checkpoint -----------------------------------

NO_MODEL = """\
model:
  seq_length: 32
  train_iters: 10
  optimizer: {lr: 1.0e-3}
data: {mock_data: true}
"""
TINY = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
START = "+train.system.pretrained_checkpoint=hf"


@pytest.fixture
def model(workspace: Workspace) -> Workspace:
    workspace.write("conf/train/tiny.yaml", NO_MODEL)
    workspace.write("hf/config.json", json.dumps(TINY))
    return workspace


def test_missing_arguments_are_read_from_checkpoint_config(model: Workspace) -> None:
    experiment = model.load(START)
    values = experiment.train.values
    model_values = {
        name: values[name] for name in ("num_layers", "kv_channels", "swiglu", "rotary_base")
    }
    assert model_values == {
        "num_layers": 4,
        "kv_channels": 8,
        "swiglu": True,
        "rotary_base": 500000,
    }
    # Zero weights of a padded vocabulary would contribute to the softmax.
    assert (values["vocab_size"], values["make_vocab_size_divisible_by"]) == (128256, 1)
    (note,) = [n for n in experiment_notes(experiment, 2) if "config.json" in n]
    assert "num_layers" in note and str(model.root / "hf") in note


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("num_layers=3", "train.model.num_layers: 3, but config.json has 4", id="size"),
        pytest.param(
            "encoder_num_layers=3",
            "train.model.encoder_num_layers: 3, but config.json has 4",
            id="alias",
        ),
        pytest.param("rotary_base=10000", "10000, but config.json has 500000", id="default"),
        pytest.param("swiglu=false", "false, but config.json has true", id="switch"),
        pytest.param("vocab_size=1000", "least 128256 (config.json), found 1000", id="vocabulary"),
    ],
)
def test_conflict_with_checkpoint_config_is_rejected(
    model: Workspace, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        model.load(START, f"+train.model.{override}")
    assert message in str(error.value)


def test_the_null_tokenizer_has_a_token_more_than_its_vocabulary(model: Workspace) -> None:
    null_tokenizer = [START, "+train.data.tokenizer.tokenizer_type=NullTokenizer"]
    assert model.load(*null_tokenizer).train["vocab_size"] == 128255
    model.load(*null_tokenizer, "+train.model.vocab_size=128255")
    with pytest.raises(ConfigError, match=r"must be at least 128255 .*, found 128254"):
        model.load(*null_tokenizer, "+train.model.vocab_size=128254")


def test_equivalent_arguments_are_accepted(model: Workspace) -> None:
    model.write("hf/config.json", json.dumps({**TINY, "model_type": "mistral", "sliding_window": 32,
                                              "architectures": None}))  # fmt: skip
    experiment = model.load(
        START, "+train.model.num_query_groups=8", "+train.model.window_size=null"
    )
    assert experiment.train["window_size"] is None  # the window covers the whole sequence
    longer = model.load(START, "train.model.seq_length=64")
    assert longer.train["window_size"] == [31, 0]
    assert longer.train["attention_backend"] == "auto"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("pretrained_checkpoint=nowhere", "no directory", id="missing"),
        pytest.param(
            "pretrained_checkpoint=data", "is neither a Hugging Face model", id="no model"
        ),
        pytest.param("load=hf", "to start from one, use pretrained_checkpoint", id="load"),
    ],
)
def test_invalid_pretrained_directory_is_rejected(
    model: Workspace, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        model.load(f"+train.system.{override}", purpose="launch")
    assert message in str(error.value)


def test_corrupt_config_is_reported_for_its_key(model: Workspace) -> None:
    model.write("hf/config.json", "{")
    with pytest.raises(ConfigError, match=r"pretrained_checkpoint: .*is not valid JSON"):
        model.load(START)
