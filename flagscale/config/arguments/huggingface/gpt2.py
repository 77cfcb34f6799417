"""GPT-2: what config.json says, as arguments, and the other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.huggingface.reading import MOST_PARTS, Reading

Values = Mapping[str, Any]

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class GPT2:
    """Learned positions, LayerNorm, biases everywhere, GELU."""

    model_type: str = "gpt2"
    architecture: str = "GPT2LMHeadModel"

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        absent = {"activation_function": "gelu_new", "tie_word_embeddings": True}
        read = Reading(config, {**absent, "layer_norm_epsilon": 1e-5})
        hidden, heads = read.whole("n_embd", "hidden_size"), read.whole("n_head")
        if hidden % heads:
            read.refuse("n_head", heads, f"it does not divide n_embd {hidden}")
        activation = read.get("activation_function")
        if activation != "gelu" and activation not in _TANH:
            read.refuse("activation_function", activation, f"expected gelu or {', '.join(_TANH)}")
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            read.only(name, False, "megatron.core's GPT has nothing like it")
        read.only("scale_attn_weights", True, "scores are always divided by the root of the width")
        found: dict[str, Any] = {
            "num_layers": read.whole("n_layer", most=MOST_PARTS),
            "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden if read.get("n_inner") is None else read.whole("n_inner"),
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "kv_channels": hidden // heads,
            "normalization": "LayerNorm",
            "layernorm_epsilon": read.number("layer_norm_epsilon"),
            "swiglu": False,
            "openai_gelu": activation in _TANH,
            "add_bias_linear": True,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": not read.switch("tie_word_embeddings"),
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": read.whole("n_positions", "n_ctx"),
            "vocab_size": read.whole("vocab_size"),
        }
        if activation == "gelu":
            # Fused with the bias it is the approximation by tanh.
            found["bias_activation_fusion"] = False
        read.finish(self.model_type)
        return found

    def config(self, values: Values) -> dict[str, Any]:
        return {
            "n_layer": values["num_layers"],
            "n_embd": values["hidden_size"],
            "n_inner": values["ffn_hidden_size"],
            "n_head": values["num_attention_heads"],
            "layer_norm_epsilon": values["layernorm_epsilon"],
            "activation_function": "gelu_new" if values["openai_gelu"] else "gelu",
            "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
            "n_positions": values["max_position_embeddings"],
            "vocab_size": values["vocab_size"],
        }
