"""Llama and the families that differ from it in a few settings (Qwen, Mistral, Mixtral)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flagscale.config.arguments.compat.huggingface.reading import (
    MOST_LAYERS,
    ConfigReader,
    rope_arguments,
    rope_scaling,
)
from flagscale.config.arguments.spec.argument import Values

KINDS = ("sliding_attention", "full_attention")
"""Of layers: with a window, and without."""


@dataclass(frozen=True)
class LlamaLike:
    """RMSNorm, rotary positions, SwiGLU, no biases but where said.

    ``absent`` is what keys of config.json mean where they are missing, as transformers has it.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: bool = False
    """True if config.json may ask for biases of all projections."""
    experts: Literal["", "mixtral", "qwen3"] = ""
    windows: Literal["", "all", "switched"] = ""
    """Sliding windows: of every layer where ``sliding_window`` is set, or only if it is also
    switched on."""
    absent: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        absent = {"hidden_act": "silu", "rope_theta": 10000.0, **self.absent}
        read = ConfigReader(config, absent)
        heads = read.whole("num_attention_heads")
        hidden = read.whole("hidden_size")
        groups = heads if read.get("num_key_value_heads") is None else 0
        head = hidden // heads if read.get("head_dim") is None else 0
        arguments = {
            "num_layers": read.whole("num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": hidden,
            "ffn_hidden_size": read.whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": groups or read.whole("num_key_value_heads"),
            "kv_channels": head or read.whole("head_dim"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "add_bias_linear": self._biases(read),
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "untie_embeddings_and_output_weights": not read.switch("tie_word_embeddings"),
            "position_embedding_type": "rope",
            "max_position_embeddings": read.whole("max_position_embeddings"),
            "vocab_size": read.whole("vocab_size"),
            **self._activation(read),
            **self._rope(read),
            **(self._window(read, config) if self.windows else {}),
            **(self._experts(read, config) if self.experts else {}),
        }
        if arguments["num_attention_heads"] % arguments["num_query_groups"]:
            more = f"it does not divide {heads} heads"
            read.refuse("num_key_value_heads", arguments["num_query_groups"], more)
        read.only(
            "quantization_config", {}, "weights of fewer bits are not read; take the bf16 ones"
        )
        read.finish(self.model_type)
        return arguments

    def _activation(self, read: ConfigReader) -> dict[str, Any]:
        if (act := read.get("hidden_act")) not in ("silu", "swish"):
            read.refuse("hidden_act", act, "the gated MLP here is SwiGLU, whose function is silu")
        return {"swiglu": True}

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        return rope_arguments(read)

    def _biases(self, read: ConfigReader) -> bool:
        """Return whether all projections have biases."""
        attention, mlp = read.switch("attention_bias"), read.switch("mlp_bias")
        if attention == mlp and (self.biases or not attention):
            return attention
        both = attention and mlp
        reason = "megatron.core has biases of all projections, of queries, keys and values, or none"
        if both or not self.biases:
            reason = f"{self.architecture} is taken without it"
        name = "attention_bias" if attention else "mlp_bias"
        read.refuse(name, True, reason)
        return False

    def _window(self, read: ConfigReader, config: Mapping[str, Any]) -> dict[str, Any]:
        if self.windows == "switched" and not read.switch("use_sliding_window"):
            return {}
        if config.get("sliding_window") is None:
            return {}
        width = {"window_size": [read.whole("sliding_window") - 1, 0]}
        if self.windows == "all":
            return width
        layers, first = read.whole("num_hidden_layers", most=MOST_LAYERS), 0
        if config.get("max_window_layers") != 0:
            first = ConfigReader(config, {"max_window_layers": 28}).whole("max_window_layers")
        plain = [int(layer >= first) for layer in range(layers)]
        pattern = sliding_layers(read, config, layers, plain)
        if all(pattern):
            return width
        return {**width, "window_attn_skip_freq": pattern} if any(pattern) else {}

    def _experts(self, read: ConfigReader, config: Mapping[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "num_moe_experts": read.whole("num_local_experts", "num_experts", most=MOST_LAYERS),
            "moe_router_topk": read.whole("num_experts_per_tok"),
        }
        if self.experts == "mixtral":
            return {**arguments, "moe_ffn_hidden_size": read.whole("intermediate_size")}
        # Chosen, then normalised: what megatron.core does if it is not told to the contrary.
        arguments["moe_router_pre_softmax"] = not read.switch("norm_topk_prob")
        arguments["moe_ffn_hidden_size"] = read.whole("moe_intermediate_size")
        arguments["moe_layer_freq"] = self._pattern(read, config)
        return arguments

    def _pattern(self, read: ConfigReader, config: Mapping[str, Any]) -> list[int]:
        """1 for each layer with experts, 0 for a dense one."""
        step = read.whole("decoder_sparse_step")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            read.refuse("mlp_only_layers", dense, "expected a list of layers")
            dense = []
        layers = read.whole("num_hidden_layers", most=MOST_LAYERS)
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
        if self.windows == "switched":
            config |= {"use_sliding_window": window is not None, "max_window_layers": 0}
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


def sliding_layers(
    read: ConfigReader, config: Mapping[str, Any], layers: int, plain: list[int]
) -> list[int]:
    """1 for each layer with a window, as ``layer_types`` says; ``plain`` where it is missing."""
    kinds = config.get("layer_types")
    if kinds is None:
        return plain
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in KINDS for k in kinds):
        read.refuse("layer_types", kinds, f"expected {layers} of {' and '.join(KINDS)}")
        return [0] * layers
    return [int(kind == KINDS[0]) for kind in kinds]


def layer_types(values: Values) -> list[str]:
    """The kind of each layer, of arguments written out."""
    every = [int(values["window_size"] is not None)] * values["num_layers"]
    return [KINDS[not sliding] for sliding in values["window_attn_skip_freq"] or every]
