"""Conversion between arguments and the config.json of each supported family of Hugging Face.

``values`` are arguments by name with everything that follows from others written out
(:func:`.models.effective`). The tensors of a family, under the same names, are listed in
``flagscale.train.checkpoint.formats.weight_mappings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flagscale.config.arguments.compat.huggingface.deepseek import DeepSeek
from flagscale.config.arguments.compat.huggingface.gemma import Gemma
from flagscale.config.arguments.compat.huggingface.llama import LlamaLike
from flagscale.config.arguments.compat.huggingface.reading import MOST_LAYERS, ConfigReader
from flagscale.config.arguments.spec.argument import Values

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class GPT2:
    """Learned positions, LayerNorm, biases everywhere, GELU."""

    model_type: str = "gpt2"
    architecture: str = "GPT2LMHeadModel"

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        absent = {"activation_function": "gelu_new", "tie_word_embeddings": True}
        read = ConfigReader(config, {**absent, "layer_norm_epsilon": 1e-5})
        hidden, heads = read.whole("n_embd", "hidden_size"), read.whole("n_head")
        if hidden % heads:
            read.refuse("n_head", heads, f"it does not divide n_embd {hidden}")
        activation = read.get("activation_function")
        if activation != "gelu" and activation not in _TANH:
            read.refuse("activation_function", activation, f"expected gelu or {', '.join(_TANH)}")
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            read.only(name, False, "megatron.core's GPT has nothing like it")
        read.only("scale_attn_weights", True, "scores are always divided by the root of the width")
        arguments: dict[str, Any] = {
            "num_layers": read.whole("n_layer", most=MOST_LAYERS),
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
            arguments["bias_activation_fusion"] = False
        read.finish(self.model_type)
        return arguments

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


class HuggingFaceFamily(Protocol):
    """A ``model_type`` of config.json and the class of transformers that reads it."""

    @property
    def model_type(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model. Raises CheckpointError with all that cannot be had."""

    def config(self, values: Values) -> dict[str, Any]:
        """The config.json of a model with these arguments, as far as the family can say it."""


HUGGINGFACE_FAMILIES: Mapping[str, HuggingFaceFamily] = {
    family.model_type: family
    for family in (
        LlamaLike("llama", "LlamaForCausalLM", biases=True),
        LlamaLike("qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows="switched"),
        LlamaLike("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="switched"),
        LlamaLike("mistral", "MistralForCausalLM", windows="all"),
        LlamaLike(
            "mixtral",
            "MixtralForCausalLM",
            experts="mixtral",
            windows="all",
            absent={"rope_theta": 1e6},
        ),
        LlamaLike(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            experts="qwen3",
            windows="switched",
            absent={"decoder_sparse_step": 1},
        ),
        GPT2(),
        Gemma("gemma", "GemmaForCausalLM", absent={"num_key_value_heads": 16}),
        Gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            period=2,
            caps=(50.0, 30.0),
            absent={"num_key_value_heads": 4},
        ),
        Gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            qk_norm=True,
            period=6,
            absent={"num_key_value_heads": 4, "max_position_embeddings": 131072},
        ),
        DeepSeek("deepseek_v2", "DeepseekV2ForCausalLM", sigmoid=False, best=1),
        DeepSeek(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            sigmoid=True,
            best=2,
            absent={
                "n_group": 8,
                "topk_group": 4,
                "first_k_dense_replace": 3,
                "routed_scaling_factor": 2.5,
            },
        ),
    )
}
"""By ``model_type``, in the order in which a model of ours is tried to be said by one."""
UNSUPPORTED_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "it is a model of images and text; those of text are gemma3_text",
    "qwen2_moe": "its shared expert has a gate",
    "phi3": "its projections are fused in a way that is not read",
    "opt": "its ReLU and the place of its positions cannot be said",
    "llama4": "its layers are unlike",
    "gpt_oss": "its attention has sinks, and its experts' weights are of 4 bits",
}
"""Families that cannot be had, and why."""
