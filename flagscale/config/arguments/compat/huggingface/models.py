"""Comparison of a model's arguments with its config.json, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.families import (
    HUGGINGFACE_FAMILIES,
    UNSUPPORTED_MODEL_TYPES,
    HuggingFaceFamily,
)
from flagscale.config.arguments.compat.huggingface.reading import CONFIG, read_config
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
"""The arguments that decide which function of its weights a model is."""
MTP_LAYERS = "mtp_num_layers"
"""How many layers beside this function predict further tokens: a checkpoint may have some that a
run does without."""
_FREE = ("vocab_size",)
"""What config.json may say otherwise: a vocabulary may be larger than the checkpoint's."""


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
        out["bias_activation_fusion"] = True  # of no consequence
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
"""Of them those of multi-latent attention."""
_YARN = MODEL_FUNCTION[
    MODEL_FUNCTION.index("rotary_scaling_factor") : MODEL_FUNCTION.index("mscale_all_dim") + 1
]
"""Of these those of its scaled positions."""


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
    """Write out the layers that have a window: those marked 1 in a list, or all of them for
    None."""
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
        out["ffn_hidden_size"] = out["moe_ffn_hidden_size"]  # no layer has it


def huggingface_family_of(config: Mapping[str, Any]) -> HuggingFaceFamily:
    """The family of a config.json.

    Raises:
        CheckpointError: it is not known, or it cannot be had and why.
    """
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str):
        raise CheckpointError(f"{CONFIG}: model_type: expected a text, found {format_value(kind)}")
    if kind in UNSUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"{CONFIG}: model_type {kind!r} cannot be had: {UNSUPPORTED_MODEL_TYPES[kind]}"
        )
    if kind not in HUGGINGFACE_FAMILIES:
        families = (
            f"known: {', '.join(HUGGINGFACE_FAMILIES)}{did_you_mean(kind, HUGGINGFACE_FAMILIES)}"
        )
        raise CheckpointError(f"{CONFIG}: model_type {kind!r} is not known; {families}")
    family = HUGGINGFACE_FAMILIES[kind]
    if classes and classes != [family.architecture]:
        raise CheckpointError(
            f"{CONFIG}: architectures: expected {family.architecture} for {kind}, found "
            f"{format_value(classes)}"
        )
    return family


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model that a config.json describes: only those that it decides.

    Raises:
        CheckpointError: with all that is wrong in it or that cannot be had.
    """
    return huggingface_family_of(config).arguments(config)


def config_of(values: Values, kind: str | None = None) -> dict[str, Any]:
    """The config.json of a model with these arguments: of family ``kind``, else of the first that
    can say all of them.

    Raises:
        CheckpointError: none can; what keeps the nearest family from it.
    """
    ours = effective(values)
    nearest: tuple[int, str, list[str]] | None = None
    for family in [HUGGINGFACE_FAMILIES[kind]] if kind else HUGGINGFACE_FAMILIES.values():
        config = {"architectures": [family.architecture], "model_type": family.model_type}
        config |= family.config(ours)
        far = 0
        try:
            differences = list(_differing(effective(family.arguments(config)), ours))
        except CheckpointError as error:
            differences, far = error.message.splitlines()[1:], len(MODEL_FUNCTION)
        if not differences:
            return config
        if nearest is None or far + len(differences) < nearest[0]:
            nearest = far + len(differences), family.architecture, differences
    assert nearest is not None
    listed = "\n  ".join(nearest[2])
    raise CheckpointError(
        f"no family of Hugging Face that is known here is this model; nearest is {nearest[1]}, but "
        f"for:\n  {listed}"
    )


def _differing(theirs: Values, ours: Values) -> Iterator[str]:
    for name in MODEL_FUNCTION:
        if theirs[name] != ours[name]:
            yield (
                f"{name}: it has {format_value(theirs[name])}, the model {format_value(ours[name])}"
            )


def disagreements(config: Mapping[str, Any], values: Values) -> list[tuple[str, str]]:
    """Arguments that make another model than a config.json: their names and messages.

    Raises:
        CheckpointError: as :func:`arguments_of`.
    """
    theirs = arguments_of(config)
    expected, ours = effective(theirs), effective(values)
    if theirs["position_embedding_type"] == "rope":
        expected["max_position_embeddings"] = ours["max_position_embeddings"]
    elif ours["max_position_embeddings"] is None:
        ours["max_position_embeddings"] = values["seq_length"]
    window = expected["window_size"]
    if ours["window_size"] is None and _covers_sequence(expected, values["seq_length"]):
        ours["window_size"] = window  # no token of a sequence is outside it
    differences = [
        (name, f"{format_value(ours[name])} here, {CONFIG} has {format_value(expected[name])}")
        for name in MODEL_FUNCTION
        if name not in _FREE and expected[name] != ours[name]
    ]
    size, least = values["vocab_size"], theirs["vocab_size"]
    if size is not None and size < least:
        differences.append(("vocab_size", f"{size} here, {CONFIG} has {least}: rows would be lost"))
    return differences


def differing_values(theirs: Values, values: Values) -> list[str]:
    """Describe the differences between the arguments of two models, written out, neither of which
    has a known config.json."""
    ours = effective(values)
    free = {"vocab_size", "bias_activation_fusion"}
    if theirs["position_embedding_type"] == "rope":
        free.add("max_position_embeddings")
    elif ours["max_position_embeddings"] is None:
        ours["max_position_embeddings"] = values["seq_length"]
    pairs = ((name, theirs[name], ours[name]) for name in MODEL_FUNCTION if name not in free)
    return [
        f"{name}: {format_value(b)} here, it has {format_value(a)}"
        for name, a, b in pairs
        if a != b
    ]


def missing_arguments(values: Values, given: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a config.json says, that are not ``given`` and that have another value so far.

    The vocabulary is not padded: rows of zeros would count in the softmax.

    Raises:
        CheckpointError: as :func:`arguments_of`.
    """
    theirs = {**arguments_of(config), "make_vocab_size_divisible_by": 1}
    length = values["seq_length"]
    if theirs["position_embedding_type"] == "rope" and length:
        theirs["max_position_embeddings"] = max(theirs["max_position_embeddings"], length)
    if _covers_sequence(theirs, length):
        del theirs["window_size"]
    if "ffn_hidden_size" not in given and ("multiple_of" in given):
        del theirs["ffn_hidden_size"]  # which it is then computed from, and compared
    return {
        name: value
        for name, value in theirs.items()
        if name not in given and value != arguments()[name].default
    }


def _covers_sequence(values: Values, length: int | None) -> bool:
    """Return whether a window that all layers have covers a whole sequence."""
    window, pattern = values.get("window_size"), values.get("window_attn_skip_freq")
    return bool(window and not pattern and length and length <= window[0] + 1)


def is_huggingface_model(directory: Path) -> bool:
    """Return whether a directory contains a Hugging Face model."""
    return (directory / CONFIG).is_file()


def config_in(directory: Path) -> dict[str, Any] | None:
    """The config.json of a model's directory; None where it is no such directory.

    Raises:
        CheckpointError: it cannot be read.
    """
    return read_config(directory) if is_huggingface_model(directory) else None
