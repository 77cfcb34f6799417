"""Every field of the configuration classes of transformers, compared with what is read here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.compat.huggingface.models import arguments_of, effective
from flagscale.config.arguments.compat.huggingface.resolved_config import DEFAULTS
from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch

OUTPUT = "it selects outputs of transformers"
HEADS = "it belongs to models with other heads"
DROPOUT = "dropout is an argument of the run"
TOKEN = "the tokenizer has it"
IGNORED = {
    "transformers_version": "it says who wrote the file",
    "dtype": "weights keep the precision in which they are stored",
    "chunk_size_feed_forward": "it saves memory and does not change results",
    "is_encoder_decoder": "the class of the model decides",
    "output_hidden_states": OUTPUT,
    "return_dict": OUTPUT,
    "use_cache": OUTPUT,
    "output_router_logits": OUTPUT,
    "id2label": HEADS,
    "label2id": HEADS,
    "problem_type": HEADS,
    "summary_type": HEADS,
    "summary_use_proj": HEADS,
    "summary_activation": HEADS,
    "summary_proj_to_labels": HEADS,
    "summary_first_dropout": HEADS,
    "attention_dropout": DROPOUT,
    "attn_pdrop": DROPOUT,
    "embd_pdrop": DROPOUT,
    "resid_pdrop": DROPOUT,
    "bos_token_id": TOKEN,
    "eos_token_id": TOKEN,
    "pad_token_id": TOKEN,
    "initializer_range": "weights are not initialized",
    "pretraining_tp": "no model of transformers reads it",
    "router_aux_loss_coef": "the auxiliary loss is an argument of the run",
    "router_jitter_noise": "noise of the router is an argument of the run",
    "reorder_and_upcast_attn": "it changes the order of computation, not the result",
    "num_mtp_layers": "the layers are counted in the files with weights",
}
"""Fields that do not change the model that is read, with the reason."""
IGNORED_IN = {("deepseek_v2", "head_dim"): "transformers replaces it by qk_rope_head_dim"}
OLD_KEYS = {"rope_theta", "sliding_window_pattern"}
"""Keys with defaults that are no fields of the classes of transformers."""

BASES: Mapping[str, Mapping[str, Any]] = {
    kind: {"num_hidden_layers" if kind != "gpt2" else "n_layer": 8} for kind in DEFAULTS
} | {"deepseek_v2": {"num_hidden_layers": 8, "num_experts_per_tok": 6}}
"""The shortest config.json of each model type. V2 has no default number of experts per token."""
OTHER_VALUES: Mapping[str, Any] = {
    "architectures": ["OtherForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": "not",
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    "use_sliding_window": True,
    "sliding_window": 99,
    "max_window_layers": 3,
    "layer_types": ["sliding_attention", *["full_attention"] * 7],
    "num_experts_per_tok": 4,
    "num_local_experts": 16,
    "num_experts": 16,
    "decoder_sparse_step": 2,
    "moe_intermediate_size": 320,
    "norm_topk_prob": "not",
    "mlp_only_layers": [1],
    "n_positions": 512,
    "n_embd": 384,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 640,
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-4,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "add_cross_attention": True,
    "use_bidirectional_attention": True,
    "query_pre_attn_scalar": 100,
    "final_logit_softcapping": 20.0,
    "attn_logit_softcapping": 20.0,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "n_group": 16,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "n_routed_experts": 32,
    "n_shared_experts": 3,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "routed_scaling_factor": 1.5,
    "rope_interleave": False,
    # Fields without effect.
    "transformers_version": "4.30.0",
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 4,
    "is_encoder_decoder": True,
    "output_hidden_states": True,
    "return_dict": False,
    "use_cache": False,
    "output_router_logits": True,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "summary_type": "last",
    "summary_use_proj": False,
    "summary_activation": "tanh",
    "summary_proj_to_labels": False,
    "summary_first_dropout": 0.3,
    "attention_dropout": 0.3,
    "attn_pdrop": 0.3,
    "embd_pdrop": 0.3,
    "resid_pdrop": 0.3,
    "bos_token_id": 7,
    "eos_token_id": 7,
    "pad_token_id": 7,
    "initializer_range": 0.3,
    "pretraining_tp": 4,
    "router_aux_loss_coef": 0.3,
    "router_jitter_noise": 0.3,
    "reorder_and_upcast_attn": True,
    "num_mtp_layers": 3,
}
"""A value of each field that differs from every default. ``not``: the opposite of the default."""
NEEDED_FOR_EFFECT: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **{
        (kind, name): {"use_sliding_window": True, "max_window_layers": 4}
        for kind in ("qwen2", "qwen3", "qwen3_moe")
        for name in ("sliding_window", "max_window_layers", "layer_types")
    },
    **{
        (kind, "use_sliding_window"): {"max_window_layers": 4}
        for kind in ("qwen2", "qwen3", "qwen3_moe")
    },
    ("qwen3_moe", "intermediate_size"): {"mlp_only_layers": [0]},
    ("deepseek_v2", "intermediate_size"): {"first_k_dense_replace": 1},
    ("deepseek_v2", "topk_method"): {"n_group": 8, "topk_group": 6},
    ("deepseek_v2", "n_group"): {"topk_method": "group_limited_greedy", "topk_group": 6},
    ("deepseek_v2", "topk_group"): {"topk_method": "group_limited_greedy", "n_group": 8},
}
"""Settings under which a field has its effect, by model type and field."""


def fields_of(kind: str) -> dict[str, Any]:
    """Return the fields of the configuration class of a model type, with their defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}


def read(config: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the effective arguments of a config.json, or the reason why it is refused."""
    try:
        return effective(arguments_of(config))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = fields_of(kind)
    ours = {name: value for name, value in DEFAULTS[kind].items() if name not in OLD_KEYS}
    assert {name: fields.get(name, "no field") for name in ours} == ours
    undecided = [
        name
        for name in fields
        if name not in ours
        and name not in IGNORED
        and (kind, name) not in IGNORED_IN
        and name not in ("architectures", "rope_parameters")
    ]
    assert undecided == [], "read these fields, refuse them, or give the reason to ignore them"
    if "rope_theta" in DEFAULTS[kind] and kind != "gemma3_text":
        assert DEFAULTS[kind]["rope_theta"] == CONFIG_MAPPING[kind].default_theta


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_field_has_an_effect_a_refusal_or_a_reason(kind: str) -> None:
    without_effect, not_named = [], []
    for name, default in fields_of(kind).items():
        value = OTHER_VALUES[name]
        value = not default if value == "not" else value
        base = {"model_type": kind, **BASES[kind], **NEEDED_FOR_EFFECT.get((kind, name), {})}
        before, after = read(base), read({**base, name: value})
        if isinstance(before, str) and name not in ("n_group", "topk_group"):
            pytest.fail(before)
        if before == after:
            without_effect.append(name)
        elif isinstance(after, str) and name not in after:
            not_named.append(f"{name}: {after}")
    assert not_named == []
    reasons = {name for name in IGNORED if name in fields_of(kind)}
    reasons |= {name for family, name in IGNORED_IN if family == kind}
    assert set(without_effect) == reasons


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_missing_field_has_the_default(kind: str) -> None:
    base = {"model_type": kind, **BASES[kind]}
    fields = {name: value for name, value in fields_of(kind).items() if name not in base}
    assert read({**base, **fields}) == read(base)
    for name, value in fields.items():
        context = {**base, **NEEDED_FOR_EFFECT.get((kind, name), {})}
        context.pop(name, None)
        assert read({**context, name: value}) == read(context), name


LAYER_TYPES = st.lists(
    st.sampled_from(["sliding_attention", "full_attention"]), min_size=8, max_size=8
)
ROPES = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]),
        "type": st.sampled_from(["default", "linear", "llama3", "yarn"]),
        "rope_theta": st.sampled_from([123.0, 5e5]),
        "factor": st.sampled_from([2.0, 8.0]),
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
        "original_max_position_embeddings": st.sampled_from([64, 8192]),
        "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    },
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SOME_ROPE = st.one_of(
    st.none(),
    ROPES,
    st.just(LLAMA3_ROPE),
    st.just({"type": "linear", "factor": 4.0}),
    st.just({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    st.fixed_dictionaries({}, optional={"full_attention": ROPES, "sliding_attention": ROPES}),
)
OLD_AND_NEW_KEYS: Mapping[str, st.SearchStrategy[Any]] = {
    "rope_theta": st.sampled_from([77.0, 1e6, 10000]),
    "rope_local_base_freq": st.sampled_from([55.0, 10000]),
    "rope_scaling": SOME_ROPE,
    "rope_parameters": SOME_ROPE,
    "partial_rotary_factor": st.sampled_from([0.5, 1.0, None]),
    "original_max_position_embeddings": st.sampled_from([64, 8192]),
    "layer_types": st.none() | LAYER_TYPES,
    "sliding_window_pattern": st.integers(1, 6),
    "sliding_window": st.sampled_from([None, 16, 4096]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 9),
    "head_dim": st.sampled_from([None, 64, 96]),
    "num_key_value_heads": st.sampled_from([None, 1, 2]),
    "num_experts": st.sampled_from([4, 8]),
    "num_local_experts": st.sampled_from([4, 8]),
    "n_routed_experts": st.sampled_from([16, 32]),
    "mlp_only_layers": st.sampled_from([None, [], [0, 3]]),
    "decoder_sparse_step": st.integers(1, 2),
    "norm_topk_prob": st.booleans(),
    "hidden_size": st.sampled_from([384, 768]),
    "num_attention_heads": st.sampled_from([4, 8]),
    "max_position_embeddings": st.sampled_from([512, 131072]),
    "n_embd": st.sampled_from([384, 768]),
    "n_head": st.sampled_from([4, 8]),
    "n_positions": st.sampled_from([512, 1024]),
    "n_ctx": st.just(256),
    "n_inner": st.sampled_from([None, 640]),
    "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]),
    "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", None]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "final_logit_softcapping": st.sampled_from([None, 30.0]),
    "attn_logit_softcapping": st.sampled_from([None, 50.0]),
    "q_lora_rank": st.sampled_from([None, 64]),
    "first_k_dense_replace": st.integers(0, 3),
    "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    "n_group": st.sampled_from([None, 1, 8]),
    "topk_group": st.sampled_from([None, 1, 4, 6]),
    "torch_dtype": st.just("bfloat16"),
    "dtype": st.just("float32"),
}
"""Keys that depend on each other, have other names, or are of older versions of transformers."""


@pytest.mark.parametrize("kind", [kind for kind in DEFAULTS if kind != "ministral"])
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_a_config_is_read_as_transformers_rewrites_it(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """transformers fills in defaults, and gives old keys their new names and places."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError
    from transformers import AutoConfig

    names = sorted(n for n in OLD_AND_NEW_KEYS if "rope" not in n or kind != "gpt2")
    keys = data.draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    config = {"model_type": kind, **BASES[kind]}
    config |= {key: data.draw(OLD_AND_NEW_KEYS[key], label=key) for key in keys}
    ours = read(config)
    if isinstance(ours, str):
        return
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(config))
    try:
        reference = AutoConfig.from_pretrained(directory)
    except StrictDataclassFieldValidationError as error:
        assert "got NoneType" in str(error)  # older versions read null, with one meaning
        return
    except KeyError:
        # transformers expects both kinds of layers in it, and cannot read the file.
        assert kind == "gemma3_text" and config["rope_parameters"] == {}
        return
    if hasattr(reference, "rope_parameters"):
        reference.standardize_rope_params()  # as models do
    reference.save_pretrained(directory)
    rewritten = json.loads((directory / "config.json").read_text())
    assert read({**rewritten, "model_type": reference.model_type}) == ours
