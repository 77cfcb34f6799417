"""Llama and families derived from it: Qwen, Mistral, Mixtral, Gemma, Gemma 2 and 3 (text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flagscale.config.arguments.compat.huggingface.config_reader import (
    MAX_LAYERS,
    SWIGLU_REASON,
    ConfigReader,
    is_number,
    rope_arguments,
    rope_scaling,
)
from flagscale.config.arguments.compat.huggingface.resolved_config import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    THETA_SLIDING,
    resolve_config,
)
from flagscale.config.arguments.spec.argument import Values


@dataclass(frozen=True)
class LlamaLike:
    """Family of models with RMSNorm, rotary positions, SwiGLU, and no biases by default."""

    model_type: str
    architecture: str
    qkv_bias: bool = False
    """True if queries, keys and values have biases."""
    qk_norm: bool = False
    """True if queries and keys are normalized."""
    biases: bool = False
    """True if config.json may enable biases of all projections."""
    experts: Literal["", "mixtral", "qwen3"] = ""
    """Keys of config.json that describe experts; empty for dense models."""
    windows: Literal["", "all", "by_layer"] = ""
    """Layers with a sliding window if ``sliding_window`` is set: all of them, or those that
    ``layer_types`` names; empty if the family has no windows."""
    window_switch: bool = False
    """True if there are windows only if ``use_sliding_window`` is true as well."""

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        read = ConfigReader(resolve_config(config, self.model_type))
        arguments = self._arguments(read)
        read.raise_problems(self.model_type)
        return arguments

    def _arguments(self, read: ConfigReader) -> dict[str, Any]:
        """Return the arguments of the model, and record problems."""
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        default_groups = heads if read.get("num_key_value_heads") is None else 0
        default_head_dim = hidden // heads if read.get("head_dim") is None else 0
        layers = read.integer("num_hidden_layers", maximum=MAX_LAYERS)
        arguments = {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": read.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": default_groups or read.integer("num_key_value_heads"),
            "kv_channels": default_head_dim or read.integer("head_dim"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.positive_number("rms_norm_eps"),
            "add_bias_linear": self._biases(read),
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "untie_embeddings_and_output_weights": not read.boolean("tie_word_embeddings"),
            "position_embedding_type": "rope",
            "max_position_embeddings": read.integer("max_position_embeddings"),
            "vocab_size": read.integer("vocab_size"),
            **self._activation(read),
            **self._rope(read),
            **self._window(read, layers),
            **(self._experts(read, layers) if self.experts else {}),
        }
        if arguments["num_attention_heads"] % arguments["num_query_groups"]:
            reason = f"it does not divide num_attention_heads {heads}"
            read.refuse("num_key_value_heads", arguments["num_query_groups"], reason)
        read.require_plain_model()
        return arguments

    def _activation(self, read: ConfigReader) -> dict[str, Any]:
        if (act := read.get("hidden_act")) not in ("silu", "swish"):
            read.refuse("hidden_act", act, SWIGLU_REASON)
        return {"swiglu": True}

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        return rope_arguments(read)

    def _biases(self, read: ConfigReader) -> bool:
        """Return whether all projections have biases."""
        attention, mlp = read.boolean("attention_bias"), read.boolean("mlp_bias")
        if attention == mlp and (self.biases or not attention):
            return attention
        reason = (
            "megatron.core supports biases of all projections, of queries, keys and values only, "
            "or none"
        )
        if (attention and mlp) or not self.biases:
            reason = f"{self.architecture} is supported without biases only"
        name = "attention_bias" if attention else "mlp_bias"
        read.refuse(name, True, reason)
        return False

    def _window(self, read: ConfigReader, layers: int) -> dict[str, Any]:
        """Return the arguments of sliding windows; empty without windows."""
        size = read.get("sliding_window") if self.windows else None
        if self.window_switch and not read.boolean("use_sliding_window"):
            size = None
        if self.windows == "by_layer":
            first = 0
            if self.window_switch:
                first = read.integer("max_window_layers", minimum=0)
            pattern = [int(size is not None and layer >= first) for layer in range(layers)]
            pattern = sliding_layers(read, layers, pattern)
        else:
            pattern = [int(size is not None)] * layers
            read.require_equal_layers(FULL if size is None else SLIDING)
        if not any(pattern):
            return {}
        if size is None:
            read.refuse("layer_types", SLIDING, "the model has no sliding window")
            return {}
        window = {"window_size": [read.integer("sliding_window") - 1, 0]}
        return window if all(pattern) else {**window, "window_attn_skip_freq": pattern}

    def _experts(self, read: ConfigReader, layers: int) -> dict[str, Any]:
        count = "num_local_experts" if self.experts == "mixtral" else "num_experts"
        arguments: dict[str, Any] = {
            "num_moe_experts": read.integer(count, maximum=MAX_LAYERS),
            "moe_router_topk": read.integer("num_experts_per_tok"),
        }
        if self.experts == "mixtral":
            return {**arguments, "moe_ffn_hidden_size": read.integer("intermediate_size")}
        # With norm_topk_prob, the softmax is over the chosen experts, like megatron.core's default.
        arguments["moe_router_pre_softmax"] = not read.boolean("norm_topk_prob")
        arguments["moe_ffn_hidden_size"] = read.integer("moe_intermediate_size")
        arguments["moe_layer_freq"] = self._pattern(read, layers)
        return arguments

    def _pattern(self, read: ConfigReader, layers: int) -> list[int]:
        """Return 1 for each layer with experts and 0 for each dense layer."""
        step = read.integer("decoder_sparse_step")
        dense = read.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            read.refuse("mlp_only_layers", dense, "expected a list of layer indices")
            dense = []
        return [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]

    def config(self, values: Values) -> dict[str, Any]:
        config = {
            "num_hidden_layers": values["num_layers"],
            "hidden_size": values["hidden_size"],
            "intermediate_size": values["ffn_hidden_size"],
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_query_groups"],
            "head_dim": values["kv_channels"],
            "rms_norm_eps": values["layernorm_epsilon"],
            "hidden_act": "silu",
            "attention_bias": bool(values["add_bias_linear"]),
            "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
            "max_position_embeddings": values["max_position_embeddings"],
            "vocab_size": values["vocab_size"],
            "rope_theta": float(values["rotary_base"]),
            "rope_scaling": rope_scaling(values),
        }
        if self.biases:
            config["mlp_bias"] = config["attention_bias"]
        window = values["window_size"]
        if self.windows:
            config["sliding_window"] = None if window is None else window[0] + 1
        if self.window_switch:
            config["use_sliding_window"] = window is not None
        if self.windows == "by_layer":
            config |= {"max_window_layers": 0} if self.window_switch else {}
            if values["window_attn_skip_freq"]:
                config["layer_types"] = layer_types(values)
        if self.experts and values["num_moe_experts"]:
            config |= self._expert_config(values)
        return config

    def _expert_config(self, values: Values) -> dict[str, Any]:
        config: dict[str, Any] = {"num_experts_per_tok": values["moe_router_topk"]}
        if self.experts == "mixtral":
            return {
                **config,
                "num_local_experts": values["num_moe_experts"],
                "intermediate_size": values["moe_ffn_hidden_size"],
            }
        pattern = values["moe_layer_freq"]
        return {
            **config,
            "num_experts": values["num_moe_experts"],
            "norm_topk_prob": not values["moe_router_pre_softmax"],
            "moe_intermediate_size": values["moe_ffn_hidden_size"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(pattern) if not sparse],
        }


def sliding_layers(read: ConfigReader, layers: int, default: list[int]) -> list[int]:
    """Return 1 for each layer with a sliding window and 0 for the others, according to
    ``layer_types``; ``default`` if it is missing."""
    types = read.get("layer_types")
    if types is None:
        return default
    is_valid = isinstance(types, list) and all(name in LAYER_TYPES for name in types)
    if not is_valid or len(types) != layers:
        expected = f"a list of {layers} items, {' or '.join(LAYER_TYPES)}"
        read.refuse("layer_types", types, f"expected {expected}")
        return [0] * layers
    return [int(name == LAYER_TYPES[0]) for name in types]


def layer_types(values: Values) -> list[str]:
    """Return ``layer_types`` of config.json for effective arguments."""
    all_equal = [int(values["window_size"] is not None)] * values["num_layers"]
    return [LAYER_TYPES[not sliding] for sliding in values["window_attn_skip_freq"] or all_equal]


_SOFTCAPPING_NAMES = ("attn_logit_softcapping", "final_logit_softcapping")
_TANH_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Gemma(LlamaLike):
    """Family of models with zero-centered norm weights, tanh-approximated gated GELU, and
    embeddings scaled by the square root of their width.

    Gemma 2 and 3 in addition have norms after attention and MLP, their own scale of queries, and
    sliding windows.
    """

    period: int = 0
    """Number of layers from one without a sliding window to the next, by default, in Gemma 2 and 3;
    0 for the first Gemma, which has no windows."""

    def _arguments(self, read: ConfigReader) -> dict[str, Any]:
        arguments = super()._arguments(read)
        arguments |= {"layernorm_zero_centered_gamma": True, "scale_embeddings": True}
        read.require_value(
            "use_bidirectional_attention", False, "only causal attention is supported"
        )
        if "window_size" not in arguments:
            arguments.pop("window_rotary_base", None)
        return arguments | (self._gemma2_arguments(read) if self.period else {})

    def _activation(self, read: ConfigReader) -> dict[str, Any]:
        name = "hidden_activation" if self.period else "hidden_act"
        allowed = (_TANH_GELU,) if self.period else (_TANH_GELU, "gelu")
        if (act := read.get(name)) not in allowed:
            read.refuse(name, act, f"the activation of {self.model_type} is {_TANH_GELU}")
        return {"gated_linear_unit": True, "openai_gelu": True, "swiglu": False}

    def _window(self, read: ConfigReader, layers: int) -> dict[str, Any]:
        if not self.period:
            return super()._window(read, layers)
        period = read.integer("sliding_window_pattern") if self.qk_norm else self.period
        pattern = [int((layer + 1) % period != 0) for layer in range(layers)]
        pattern = sliding_layers(read, layers, pattern)
        if not any(pattern):
            return {}
        window = [read.integer("sliding_window") - 1, 0]
        return {"window_size": window, "window_attn_skip_freq": pattern}

    def _gemma2_arguments(self, read: ConfigReader) -> dict[str, Any]:
        """Return the arguments that Gemma 2 and 3 have in addition to the first Gemma."""
        arguments: dict[str, Any] = {"sandwich_norm": True}
        arguments["softmax_scale"] = read.positive_number("query_pre_attn_scalar") ** -0.5
        for name in _SOFTCAPPING_NAMES:
            cap = read.get(name)
            if cap is not None and (not is_number(cap) or cap <= 0):
                read.refuse(name, cap, "expected a number above 0, or null")
            elif cap is not None:
                arguments[name] = float(cap)
        if self.qk_norm and (cap := arguments.pop("attn_logit_softcapping", None)):
            reason = "transformers ignores it for this family"
            read.refuse("attn_logit_softcapping", cap, reason)
        return arguments

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        """Return the arguments of rotary positions, which in Gemma 3 differ between layers with
        full attention and layers with a sliding window."""
        if not self.qk_norm:
            return rope_arguments(read)
        sections = read.section("rope_parameters")
        if unknown := sorted(sections.keys() - {*LAYER_TYPES}):
            expected = " and ".join(LAYER_TYPES)
            read.refuse("rope_parameters", unknown, f"expected the keys {expected}")
        full, sliding = (
            ConfigReader({"rope_parameters": sections.get(name)}) for name in (FULL, SLIDING)
        )
        arguments, base = rope_arguments(full), rope_arguments(sliding)
        read.problems += full.problems + sliding.problems
        if set(base) != {"rotary_base"}:
            read.refuse(
                "rope_parameters",
                sections.get(SLIDING),
                "positions of layers with a sliding window cannot be scaled",
            )
        return {**arguments, "window_rotary_base": base["rotary_base"]}

    def config(self, values: Values) -> dict[str, Any]:
        config = super().config(values)
        config |= {"hidden_act": _TANH_GELU, "hidden_activation": _TANH_GELU}
        if not self.period:
            return config
        window = values["window_size"]
        config |= {
            "query_pre_attn_scalar": _snap_to_integer((values["softmax_scale"] or 1.0) ** -2),
            "layer_types": layer_types(values),
            "sliding_window": 4096 if window is None else window[0] + 1,
            **{name: values[name] for name in _SOFTCAPPING_NAMES},
        }
        if self.qk_norm:
            full = {"rope_theta": config.pop("rope_theta"), **(config.pop("rope_scaling") or {})}
            local = {"rope_theta": float(values["window_rotary_base"] or THETA_SLIDING)}
            config["rope_parameters"] = {
                FULL: {"rope_type": "default", **full},
                SLIDING: {"rope_type": "default", **local},
            }
        return config


def _snap_to_integer(number: float) -> float | int:
    """Return the nearest integer if a number differs from it only by rounding errors."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * nearest else number
