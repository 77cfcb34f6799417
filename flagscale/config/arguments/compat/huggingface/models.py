"""Conversion of a model's arguments to config.json and back, and comparison of the two.

*Effective* arguments are the arguments that determine the function of a model, in comparable form
(:func:`effective`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.config_reader import CONFIG, read_config
from flagscale.config.arguments.compat.huggingface.families import (
    HUGGINGFACE_FAMILIES,
    UNSUPPORTED_MODEL_TYPES,
    HuggingFaceFamily,
)
from flagscale.config.arguments.compat.huggingface.resolved_config import resolve_model_type
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.model_arguments import gated_ffn_width
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.values import did_you_mean, format_value
from flagscale.errors import CheckpointError

MODEL_FUNCTION = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "sandwich_norm",
    "scale_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "swiglu",
    "gated_linear_unit",
    "squared_relu",
    "openai_gelu",
    "bias_activation_fusion",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "window_rotary_base",
    "softmax_scale",
    "softmax_type",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_output_gate",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "moe_apply_probs_on_input",
    "vocab_size",
)
"""Arguments that determine the function that a model computes from its weights."""
MTP_LAYERS = "mtp_num_layers"
"""Number of multi-token prediction layers, which are not part of this function: a run may ignore
those of a checkpoint."""
_NULL_TOKENIZER = "NullTokenizer"
"""Tokenizer whose ``vocab_size`` does not count the token that ends a document."""
_MAY_DIFFER = ("vocab_size",)
"""Arguments that may differ from config.json: the vocabulary may be larger."""


def effective(values: Values) -> dict[str, Any]:
    """Return the arguments of :data:`MODEL_FUNCTION` and ``mtp_num_layers`` in comparable form.

    Values that follow from others are filled in; values without effect are the defaults.
    """
    defaults = {name: a.default for name, a in arguments().items() if name in MODEL_FUNCTION}
    out = {**defaults, **{name: values[name] for name in MODEL_FUNCTION if name in values}}
    complete = {"multiple_of": None, "hidden_dim_multiplier": None, **values, **out}
    out["gated_linear_unit"] = bool(out["swiglu"] or out["gated_linear_unit"])
    if out["ffn_hidden_size"] is None:
        gated = out["swiglu"]
        out["ffn_hidden_size"] = gated_ffn_width(complete) if gated else 4 * out["hidden_size"]
    if out["num_query_groups"] is None:
        out["num_query_groups"] = out["num_attention_heads"]
    if out["kv_channels"] is None:
        out["kv_channels"] = out["hidden_size"] // out["num_attention_heads"]
    if out["swiglu"] or out["squared_relu"] or out["openai_gelu"] or not out["add_bias_linear"]:
        out["bias_activation_fusion"] = True  # it has no effect
    if not out["use_rope_scaling"]:
        out["rope_scaling_factor"] = defaults["rope_scaling_factor"]
    _write_out_latents(out, defaults)
    _write_out_windows(out)
    _write_out_experts(out, defaults)
    out[MTP_LAYERS] = values.get(MTP_LAYERS) or None
    return out


_LATENT = MODEL_FUNCTION[
    MODEL_FUNCTION.index("multi_latent_attention") : MODEL_FUNCTION.index("mscale_all_dim") + 1
]
"""Arguments of multi-latent attention."""
_YARN = MODEL_FUNCTION[
    MODEL_FUNCTION.index("rotary_scaling_factor") : MODEL_FUNCTION.index("mscale_all_dim") + 1
]
"""Arguments of its positions that YaRN scales."""


def _write_out_latents(out: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    if not out["multi_latent_attention"]:
        out.update({name: defaults[name] for name in _LATENT}, multi_latent_attention=False)
        if out["softmax_scale"] is None:
            out["softmax_scale"] = out["kv_channels"] ** -0.5
        return
    out["rope_type"] = out["rope_type"] or "yarn"
    if out["rope_type"] == "rope":
        out.update({name: defaults[name] for name in _YARN})
    out["kv_channels"] = out["qk_head_dim"] + out["qk_pos_emb_head_dim"]
    out["num_query_groups"] = out["num_attention_heads"]


def _write_out_windows(out: dict[str, Any]) -> None:
    """Replace the pattern of layers with a sliding window by a list of 0 and 1; None for all
    layers."""
    window, pattern = out["window_size"], out["window_attn_skip_freq"]
    if isinstance(pattern, int) and pattern:
        pattern = [int((layer + 1) % pattern != 0) for layer in range(out["num_layers"])]
    if window is None or (pattern is not None and not any(pattern)):
        out.update(window_size=None, window_attn_skip_freq=None, window_rotary_base=None)
        return
    out["window_size"] = list(window)
    out["window_attn_skip_freq"] = None if pattern is None or all(pattern) else list(pattern)


def _write_out_experts(out: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    if not out["num_moe_experts"]:
        moe = [name for name in MODEL_FUNCTION if name.startswith("moe_")]
        out.update({name: defaults[name] for name in moe}, num_moe_experts=None)
        return
    if out["moe_ffn_hidden_size"] is None:
        out["moe_ffn_hidden_size"] = out["ffn_hidden_size"]
    pattern = out["moe_layer_freq"]
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(out["num_layers"])]
    out["moe_layer_freq"] = list(pattern)
    if out["moe_router_topk_scaling_factor"] == 1:
        out["moe_router_topk_scaling_factor"] = None
    if all(pattern):
        out["ffn_hidden_size"] = out["moe_ffn_hidden_size"]  # no dense layer uses it


def huggingface_family_of(config: Mapping[str, Any]) -> HuggingFaceFamily:
    """Return the family of a config.json.

    Raises:
        CheckpointError: the family is unknown or not supported.
    """
    kind, classes = resolve_model_type(config), config.get("architectures")
    if not isinstance(kind, str):
        raise CheckpointError(f"{CONFIG}: model_type: expected a text, found {format_value(kind)}")
    if kind in UNSUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"{CONFIG}: model_type {kind!r} is not supported: {UNSUPPORTED_MODEL_TYPES[kind]}"
        )
    if kind not in HUGGINGFACE_FAMILIES:
        raise CheckpointError(
            f"{CONFIG}: model_type: expected one of {', '.join(HUGGINGFACE_FAMILIES)}, found "
            f"{kind!r}{did_you_mean(kind, HUGGINGFACE_FAMILIES)}"
        )
    family = HUGGINGFACE_FAMILIES[kind]
    expected_classes = {family.architecture}
    if kind != config["model_type"]:
        expected_classes.add(HUGGINGFACE_FAMILIES[config["model_type"]].architecture)
    if classes and classes not in [[name] for name in expected_classes]:
        raise CheckpointError(
            f"{CONFIG}: architectures: expected {family.architecture} for {kind}, found "
            f"{format_value(classes)}"
        )
    return family


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model that a config.json describes, without those that it does
    not determine.

    Raises:
        CheckpointError: with every value that is invalid or not supported.
    """
    return huggingface_family_of(config).arguments(config)


def config_of(values: Values, kind: str | None = None) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        values: arguments of the model by name.
        kind: ``model_type`` of the family; None: the first family that supports the arguments.

    Raises:
        CheckpointError: no family supports the arguments; with the differences from the most
            similar family.
    """
    model = effective(values)
    nearest: tuple[int, str, list[str]] | None = None
    for family in [HUGGINGFACE_FAMILIES[kind]] if kind else HUGGINGFACE_FAMILIES.values():
        config = {"architectures": [family.architecture], "model_type": family.model_type}
        config |= family.config(model)
        penalty = 0
        try:
            differences = list(_differences(effective(family.arguments(config)), model))
        except CheckpointError as error:
            # A family that cannot express the model ranks after all that can.
            differences, penalty = error.message.splitlines()[1:], len(MODEL_FUNCTION)
        if not differences:
            return config
        if nearest is None or penalty + len(differences) < nearest[0]:
            nearest = penalty + len(differences), family.architecture, differences
    assert nearest is not None
    listed = "\n  ".join(nearest[2])
    raise CheckpointError(
        f"no supported Hugging Face family can express this model; {nearest[1]} differs least:\n"
        f"  {listed}"
    )


def _differences(family: Values, model: Values) -> Iterator[str]:
    """Yield a message for each difference between the effective arguments that a family can express
    and those of the model."""
    for name in MODEL_FUNCTION:
        if family[name] != model[name]:
            yield (
                f"{name}: the family has {format_value(family[name])}, the model "
                f"{format_value(model[name])}"
            )


def disagreements(config: Mapping[str, Any], values: Values) -> list[tuple[str, str]]:
    """Return the arguments that contradict a config.json, with a message for each.

    Raises:
        CheckpointError: like :func:`arguments_of`.
    """
    config_arguments = arguments_of(config)
    expected, model = effective(config_arguments), effective(values)
    if config_arguments["position_embedding_type"] == "rope":
        expected["max_position_embeddings"] = model["max_position_embeddings"]
    elif model["max_position_embeddings"] is None:
        model["max_position_embeddings"] = values["seq_length"]
    window = expected["window_size"]
    if model["window_size"] is None and _covers_sequence(expected, values["seq_length"]):
        model["window_size"] = window  # it does not exclude any token of a sequence
    differences = [
        (name, f"{format_value(model[name])}, but {CONFIG} has {format_value(expected[name])}")
        for name in MODEL_FUNCTION
        if name not in _MAY_DIFFER and expected[name] != model[name]
    ]
    size, minimum = values["vocab_size"], config_arguments["vocab_size"]
    reason = CONFIG
    if values.get("tokenizer_type") == _NULL_TOKENIZER:
        minimum -= 1
        reason = f"{CONFIG} without the token that ends a document"
    if size is not None and size < minimum:
        differences.append(("vocab_size", f"must be at least {minimum} ({reason}), found {size}"))
    return differences


def differing_values(saved: Values, values: Values) -> list[str]:
    """Describe the differences between a checkpoint and the arguments of a model without a known
    config.json.

    Args:
        saved: effective arguments of the checkpoint.
        values: arguments of the model by name.
    """
    model = effective(values)
    ignored = {"vocab_size", "bias_activation_fusion"}
    if saved["position_embedding_type"] == "rope":
        ignored.add("max_position_embeddings")
    elif model["max_position_embeddings"] is None:
        model["max_position_embeddings"] = values["seq_length"]
    return [
        f"{name}: {format_value(model[name])}, but it has {format_value(saved[name])}"
        for name in MODEL_FUNCTION
        if name not in ignored and model[name] != saved[name]
    ]


def missing_arguments(values: Values, given: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a config.json determines and the user does not give, unless they
    are the defaults.

    The vocabulary is not padded, because rows of zeros would count in the softmax.

    Args:
        values: all arguments by name.
        given: the arguments that the user gives.
        config: content of the config.json.

    Raises:
        CheckpointError: like :func:`arguments_of`.
    """
    config_arguments = {**arguments_of(config), "make_vocab_size_divisible_by": 1}
    if values.get("tokenizer_type") == _NULL_TOKENIZER:
        config_arguments["vocab_size"] -= 1
    length = values["seq_length"]
    if config_arguments["position_embedding_type"] == "rope" and length:
        max_length = max(config_arguments["max_position_embeddings"], length)
        config_arguments["max_position_embeddings"] = max_length
    if _covers_sequence(config_arguments, length):
        del config_arguments["window_size"]
    if "ffn_hidden_size" not in given and ("multiple_of" in given):
        del config_arguments["ffn_hidden_size"]  # it is computed from multiple_of and compared
    return {
        name: value
        for name, value in config_arguments.items()
        if name not in given and value != arguments()[name].default
    }


def _covers_sequence(values: Values, length: int | None) -> bool:
    """Return whether the sliding window of all layers covers a whole sequence."""
    window, pattern = values.get("window_size"), values.get("window_attn_skip_freq")
    return bool(window and not pattern and length and length <= window[0] + 1)


def is_huggingface_model(directory: Path) -> bool:
    """Return whether a directory contains a Hugging Face model."""
    return (directory / CONFIG).is_file()


def config_in(directory: Path) -> dict[str, Any] | None:
    """Read the config.json of a directory; None if the directory contains no Hugging Face model.

    Raises:
        CheckpointError: the file cannot be read.
    """
    return read_config(directory) if is_huggingface_model(directory) else None
