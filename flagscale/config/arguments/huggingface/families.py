"""What each family's config.json says, as arguments, and the other way.

``values`` are arguments by name with everything that follows from others written out
(:func:`flagscale.config.arguments.huggingface.models.effective`). Which tensors a family has is
told, with the same names, by ``flagscale.train.checkpoint.formats.tables``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flagscale.config.arguments.huggingface.reading import MOST_PARTS, Reading, is_number

Values = Mapping[str, Any]

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What megatron.core has written into its code."""
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


class Family(Protocol):
    """A ``model_type`` of config.json and the class of transformers that reads it."""

    @property
    def model_type(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model. Raises CheckpointError with all that cannot be had."""

    def config(self, values: Values) -> dict[str, Any]:
        """The config.json of a model with these arguments, as far as the family can say it."""


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
    """Whether config.json may ask for biases of all projections."""
    experts: Literal["", "mixtral", "qwen3"] = ""
    windows: Literal["", "all", "switched"] = ""
    """Sliding windows: of every layer where ``sliding_window`` is set, or only if it is also
    switched on."""
    absent: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        absent = {"hidden_act": "silu", "rope_theta": 10000.0, **self.absent}
        read = Reading(config, absent)
        heads = read.whole("num_attention_heads")
        hidden = read.whole("hidden_size")
        groups = heads if read.get("num_key_value_heads") is None else 0
        head = hidden // heads if read.get("head_dim") is None else 0
        found = {
            "num_layers": read.whole("num_hidden_layers", most=MOST_PARTS),
            "hidden_size": hidden,
            "ffn_hidden_size": read.whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": groups or read.whole("num_key_value_heads"),
            "kv_channels": head or read.whole("head_dim"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "swiglu": True,
            "add_bias_linear": self._biases(read),
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "untie_embeddings_and_output_weights": not read.switch("tie_word_embeddings"),
            "position_embedding_type": "rope",
            "max_position_embeddings": read.whole("max_position_embeddings"),
            "vocab_size": read.whole("vocab_size"),
            **_rope(read),
            **(self._window(read, config) if self.windows else {}),
            **(self._experts(read, config) if self.experts else {}),
        }
        if (act := read.get("hidden_act")) not in ("silu", "swish"):
            read.refuse("hidden_act", act, "the gated MLP here is SwiGLU, whose function is silu")
        if found["num_attention_heads"] % found["num_query_groups"]:
            more = f"it does not divide {heads} heads"
            read.refuse("num_key_value_heads", found["num_query_groups"], more)
        read.only(
            "quantization_config", {}, "weights of fewer bits are not read; take the bf16 ones"
        )
        read.finish(self.model_type)
        return found

    def _biases(self, read: Reading) -> bool:
        """Whether all projections have biases."""
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

    def _window(self, read: Reading, config: Mapping[str, Any]) -> dict[str, Any]:
        if self.windows == "switched" and not read.switch("use_sliding_window"):
            return {}
        if config.get("sliding_window") is None:
            return {}
        kinds = config.get("layer_types")
        mixed = isinstance(kinds, list) and set(map(str, kinds)) != {"sliding_attention"}
        if self.windows == "switched" and (mixed or (not kinds and read.get("max_window_layers"))):
            read.refuse("use_sliding_window", True, "only some of the layers would have a window")
        width = read.whole("sliding_window")
        return {"window_size": [width - 1, 0]}

    def _experts(self, read: Reading, config: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "num_moe_experts": read.whole("num_local_experts", "num_experts", most=MOST_PARTS),
            "moe_router_topk": read.whole("num_experts_per_tok"),
        }
        if self.experts == "mixtral":
            return {**found, "moe_ffn_hidden_size": read.whole("intermediate_size")}
        # Chosen, then normalised: what megatron.core does if it is not told to the contrary.
        found["moe_router_pre_softmax"] = not read.switch("norm_topk_prob")
        found["moe_ffn_hidden_size"] = read.whole("moe_intermediate_size")
        found["moe_layer_freq"] = self._pattern(read, config)
        return found

    def _pattern(self, read: Reading, config: Mapping[str, Any]) -> list[int]:
        """1 for each layer with experts, 0 for a dense one."""
        step = read.whole("decoder_sparse_step")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            read.refuse("mlp_only_layers", dense, "expected a list of layers")
            dense = []
        layers = read.whole("num_hidden_layers", most=MOST_PARTS)
        return [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]

    def config(self, values: Values) -> dict[str, Any]:
        made = {
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
            "rope_scaling": _scaling(values),
        }
        if self.biases:
            made["mlp_bias"] = made["attention_bias"]
        window = values["window_size"]
        if self.windows:
            made["sliding_window"] = None if window is None else window[0] + 1
        if self.windows == "switched":
            made |= {"use_sliding_window": window is not None, "max_window_layers": 0}
        if self.experts and values["num_moe_experts"]:
            made |= self._expert_config(values)
        return made

    def _expert_config(self, values: Values) -> dict[str, Any]:
        made: dict[str, Any] = {"num_experts_per_tok": values["moe_router_topk"]}
        if self.experts == "mixtral":
            return {
                **made,
                "num_local_experts": values["num_moe_experts"],
                "intermediate_size": values["moe_ffn_hidden_size"],
            }
        pattern = values["moe_layer_freq"]
        return {
            **made,
            "num_experts": values["num_moe_experts"],
            "norm_topk_prob": not values["moe_router_pre_softmax"],
            "moe_intermediate_size": values["moe_ffn_hidden_size"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(pattern) if not sparse],
        }


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


def _rope(read: Reading) -> dict[str, Any]:
    """Base and scaling of rotary positions, as config.json has them before and since v5 of
    transformers."""
    scaling = read.section("rope_parameters") or read.section("rope_scaling")
    theta = scaling.get("rope_theta") or read.get("rope_theta")
    if not is_number(theta) or theta != int(theta) or theta < 1:
        read.refuse("rope_theta", theta, "rotary_base is a whole number from 1")
        theta = 1
    found: dict[str, Any] = {"rotary_base": int(theta)}
    share = scaling.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        read.refuse("partial_rotary_factor", share, "this family rotates whole heads")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor: Any = scaling.get("factor")
    if kind == "llama3":
        given = {name: scaling.get(name) for name in _LLAMA3}
        if given != _LLAMA3 or not is_number(factor):
            wanted = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
            reason = f"megatron.core scales with {wanted}, and a factor"
            read.refuse("rope_scaling", scaling, reason)
            factor = 1
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind == "linear":
        if not is_number(factor) or factor != int(factor) or factor < 1:
            read.refuse("rope_scaling.factor", factor, "positions are divided by a whole number")
            factor = 1
        found["rotary_seq_len_interpolation_factor"] = int(factor)
    elif kind != "default":
        reason = "positions are scaled as Llama 3.1 does (llama3) or all alike (linear)"
        read.refuse("rope_scaling", kind, reason)
    return found


def _scaling(values: Values) -> dict[str, Any] | None:
    if values["use_rope_scaling"]:
        return {"rope_type": "llama3", "factor": values["rope_scaling_factor"], **_LLAMA3}
    if values["rotary_seq_len_interpolation_factor"]:
        factor = float(values["rotary_seq_len_interpolation_factor"])
        return {"rope_type": "linear", "factor": factor}
    return None


FAMILIES: Mapping[str, Family] = {
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
    )
}
"""By ``model_type``, in the order in which a model of ours is tried to be said by one."""

_SCALED = (
    "its embeddings are scaled by the root of hidden_size, and its norms' weights count from 1"
)
REFUSED: Mapping[str, str] = {
    "gemma": _SCALED,
    "gemma2": _SCALED + ", scores and logits are capped and every layer has four norms",
    "gemma3": "it is a model of images and text",
    "gemma3_text": _SCALED + ", every layer has four norms, and windows alternate",
    "deepseek_v2": "it has multi-latent attention, which this trainer does not",
    "deepseek_v3": "it has multi-latent attention, which this trainer does not",
    "qwen2_moe": "its shared expert has a gate",
    "phi3": "its projections are fused in a way that is not read",
    "opt": "its ReLU and the place of its positions cannot be said",
    "llama4": "its layers are unlike",
    "gpt_oss": "its attention has sinks, and its experts' weights are of 4 bits",
}
"""Families that cannot be had, and why."""
