"""All supported model families of Hugging Face, with GPT-2 and DeepSeek-V2 and -V3.

Each converts between arguments and its config.json. ``values`` are arguments by name, with
everything that follows from others written out (:func:`.models.effective`). The tensors of a family
are listed in ``flagscale.train.checkpoint.formats.weight_mappings`` under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flagscale.config.arguments.compat.huggingface.config_reader import (
    MAX_LAYERS,
    SWIGLU_REASON,
    ConfigReader,
    is_number,
    rope_base,
)
from flagscale.config.arguments.compat.huggingface.llama import Gemma, LlamaLike
from flagscale.config.arguments.compat.huggingface.resolved_config import FULL, resolve_config
from flagscale.config.arguments.spec.argument import Values

_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors: a constant in transformers, not in config.json."""
_YARN: Mapping[str, tuple[str, float]] = {
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Keys of YaRN scaling in config.json: the argument, and the value of a missing key."""


@dataclass(frozen=True)
class DeepSeek:
    """Family of models with multi-latent attention, and routed and shared experts after a few dense
    layers."""

    model_type: str
    architecture: str
    sigmoid: bool
    """True if experts are scored by sigmoid with a bias for their selection (V3); otherwise by
    softmax (V2)."""
    ranked_experts: int
    """Number of best experts of a group whose sum of scores ranks it, in group-limited routing."""

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        read = ConfigReader(resolve_config(config, self.model_type))
        heads, layers = read.integer("num_attention_heads"), self._layers(read)
        arguments = {
            "num_layers": layers,
            "hidden_size": read.integer("hidden_size"),
            "ffn_hidden_size": read.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "multi_latent_attention": True,
            "q_lora_rank": None if read.get("q_lora_rank") is None else read.integer("q_lora_rank"),
            "kv_lora_rank": read.integer("kv_lora_rank"),
            "qk_head_dim": read.integer("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": read.integer("qk_rope_head_dim"),
            "v_head_dim": read.integer("v_head_dim"),
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.positive_number("rms_norm_eps"),
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not read.boolean("tie_word_embeddings"),
            "position_embedding_type": "rope",
            "max_position_embeddings": read.integer("max_position_embeddings"),
            "vocab_size": read.integer("vocab_size"),
            **self._rope(read),
            **self._experts(read, layers),
        }
        self._check_fixed_settings(read, arguments)
        read.raise_problems(self.model_type)
        return arguments

    def _layers(self, read: ConfigReader) -> int:
        return read.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def _check_fixed_settings(self, read: ConfigReader, arguments: Values) -> None:
        """Check keys for which only one value is supported."""
        if (act := read.get("hidden_act")) not in ("silu", "swish"):
            read.refuse("hidden_act", act, SWIGLU_REASON)
        for name in ("attention_bias", "mlp_bias"):
            reason = f"{self.architecture} is supported without biases only"
            read.require_value(name, False, reason)
        heads = arguments["num_attention_heads"]
        reason = f"with latent attention it equals num_attention_heads, {heads}"
        read.require_value("num_key_value_heads", heads, reason)
        if self.sigmoid and not read.get("rope_interleave"):
            reason = "only interleaved rotary dimensions are supported"
            read.refuse("rope_interleave", read.get("rope_interleave"), reason)
        read.require_value(
            "moe_layer_freq", 1, "transformers has experts in all layers after the dense ones"
        )
        if arguments["layernorm_epsilon"] != _LATENT_NORM_EPSILON:
            reason = f"transformers uses {_LATENT_NORM_EPSILON:g} for norms of latent vectors"
            read.refuse("rms_norm_eps", arguments["layernorm_epsilon"], reason)
        if self.sigmoid:
            # transformers replaces it in V2
            rotary, reason = arguments["qk_pos_emb_head_dim"], "it differs from qk_rope_head_dim"
            read.require_value("head_dim", rotary, reason)
        read.require_equal_layers(FULL)
        read.require_plain_model()

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        """Return the arguments of rotary positions, unscaled or scaled by YaRN."""
        arguments, scaling, kind = rope_base(read)
        if kind == "default":
            return {**arguments, "rope_type": "rope"}
        if kind != "yarn":
            read.refuse("rope_scaling", kind, "the only supported type is yarn")
            return arguments
        yarn = ConfigReader(scaling)
        arguments["rope_type"] = "yarn"
        arguments["rotary_scaling_factor"] = yarn.positive_number("factor")
        name = "original_max_position_embeddings"
        arguments[name] = yarn.integer(name)
        for key, (argument, default) in _YARN.items():
            value = scaling.get(key) or default
            if not is_number(value) or value < 0:
                yarn.refuse(key, value, "expected a number of at least 0")
            arguments[argument] = float(value) if is_number(value) else default
        if not arguments["mscale_all_dim"]:
            arguments["mscale"] = 1.0  # has an effect only together with mscale_all_dim
        elif not scaling.get("mscale"):
            yarn.refuse("mscale_all_dim", scaling["mscale_all_dim"], "it requires mscale")
        yarn.require_value(
            "attention_factor", None, "megatron.core computes it from mscale and mscale_all_dim"
        )
        yarn.require_value("truncate", True, "megatron.core always rounds the range of frequencies")
        read.problems += [f"rope_scaling.{problem}" for problem in yarn.problems]
        return arguments

    def _experts(self, read: ConfigReader, layers: int) -> dict[str, Any]:
        dense = read.integer("first_k_dense_replace", minimum=0, maximum=layers)
        width = read.integer("moe_intermediate_size")
        factor = read.positive_number("routed_scaling_factor")
        arguments: dict[str, Any] = {
            "num_moe_experts": read.integer("n_routed_experts", maximum=MAX_LAYERS),
            "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * read.integer("n_shared_experts"),
            "moe_router_topk": read.integer("num_experts_per_tok"),
            "moe_router_topk_scaling_factor": None if factor == 1 else factor,
            "moe_router_dtype": "fp32",
        }
        arguments |= self._scores(read)
        return arguments | self._groups(read, arguments["moe_router_topk"])

    def _scores(self, read: ConfigReader) -> dict[str, Any]:
        if self.sigmoid:
            read.require_value("scoring_func", "sigmoid", "DeepSeek-V3 uses sigmoid")
            if not read.get("norm_topk_prob"):
                reason = "megatron.core always normalizes the scores of the chosen experts"
                read.refuse("norm_topk_prob", read.get("norm_topk_prob"), reason)
            return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        read.require_value("scoring_func", "softmax", "DeepSeek-V2 uses softmax")
        read.require_value(
            "norm_topk_prob",
            False,
            "transformers never normalizes the scores of the chosen experts",
        )
        return {"moe_router_pre_softmax": True}

    def _groups(self, read: ConfigReader, chosen: int) -> dict[str, Any]:
        """Return the arguments of group-limited routing; empty without it. ``chosen`` is the number
        of experts per token."""
        if not self.sigmoid:
            method = read.get("topk_method")
            if method == "greedy":
                return {}
            if method != "group_limited_greedy":
                expected = "expected greedy or group_limited_greedy"
                read.refuse("topk_method", method, expected)
                return {}
        groups, chosen_groups = read.integer("n_group"), read.integer("topk_group")
        if chosen_groups >= groups:
            return {}
        if chosen // chosen_groups != self.ranked_experts:
            experts = "expert" if self.ranked_experts == 1 else "experts"
            reason = (
                f"transformers ranks groups by their {self.ranked_experts} best {experts}, but "
                f"megatron.core by num_experts_per_tok {chosen} // topk_group {chosen_groups} = "
                f"{chosen // chosen_groups}"
            )
            read.refuse("n_group", groups, reason)
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen_groups}

    def config(self, values: Values) -> dict[str, Any]:
        pattern = values["moe_layer_freq"] if values["num_moe_experts"] else []
        config = {
            "num_hidden_layers": values["num_layers"],
            "hidden_size": values["hidden_size"],
            "intermediate_size": values["ffn_hidden_size"],
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_attention_heads"],
            "q_lora_rank": values["q_lora_rank"],
            "kv_lora_rank": values["kv_lora_rank"],
            "qk_nope_head_dim": values["qk_head_dim"],
            "qk_rope_head_dim": values["qk_pos_emb_head_dim"],
            "v_head_dim": values["v_head_dim"],
            "rms_norm_eps": values["layernorm_epsilon"],
            "hidden_act": "silu",
            "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
            "max_position_embeddings": values["max_position_embeddings"],
            "vocab_size": values["vocab_size"],
            "rope_theta": float(values["rotary_base"]),
            "rope_scaling": _yarn_scaling(values),
            "first_k_dense_replace": pattern.index(1) if 1 in pattern else len(pattern),
        }
        return {**config, **self._expert_config(values)} if pattern else config

    def _expert_config(self, values: Values) -> dict[str, Any]:
        width, shared = values["moe_ffn_hidden_size"], values["moe_shared_expert_intermediate_size"]
        groups = values["moe_router_num_groups"]
        config = {
            "n_routed_experts": values["num_moe_experts"],
            "n_shared_experts": (shared or 0) // width,
            "moe_intermediate_size": width,
            "num_experts_per_tok": values["moe_router_topk"],
            "routed_scaling_factor": values["moe_router_topk_scaling_factor"] or 1.0,
            "n_group": groups or 1,
            "topk_group": values["moe_router_group_topk"] or 1,
            "norm_topk_prob": self.sigmoid,
        }
        if not self.sigmoid:
            config["topk_method"] = "group_limited_greedy" if groups else "greedy"
        return config


def _yarn_scaling(values: Values) -> dict[str, Any] | None:
    if values["rope_type"] != "yarn":
        return None
    name = "original_max_position_embeddings"
    yarn = {key: values[argument] for key, (argument, _) in _YARN.items()}
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": values["rotary_scaling_factor"]}
    return {**scaling, name: values[name], **yarn}


_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class GPT2:
    """GPT-2: learned positions, LayerNorm, biases of all layers, GELU."""

    model_type: str = "gpt2"
    architecture: str = "GPT2LMHeadModel"

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        read = ConfigReader(resolve_config(config, self.model_type))
        hidden, heads = read.integer("n_embd"), read.integer("n_head")
        if hidden % heads:
            read.refuse("n_head", heads, f"it does not divide n_embd {hidden}")
        activation = read.get("activation_function")
        if activation != "gelu" and activation not in _TANH_GELUS:
            expected = f"expected gelu or {', '.join(_TANH_GELUS)}"
            read.refuse("activation_function", activation, expected)
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            read.require_value(name, False, "megatron.core's GPT does not have it")
        read.require_value(
            "scale_attn_weights", True, "attention scores are always scaled by 1 / sqrt(head_dim)"
        )
        arguments: dict[str, Any] = {
            "num_layers": read.integer("n_layer", maximum=MAX_LAYERS),
            "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden
            if read.get("n_inner") is None
            else read.integer("n_inner"),
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "kv_channels": hidden // heads,
            "normalization": "LayerNorm",
            "layernorm_epsilon": read.positive_number("layer_norm_epsilon"),
            "swiglu": False,
            "openai_gelu": activation in _TANH_GELUS,
            "add_bias_linear": True,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "untie_embeddings_and_output_weights": not read.boolean("tie_word_embeddings"),
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": read.integer("n_positions"),
            "vocab_size": read.integer("vocab_size"),
        }
        read.require_equal_layers(FULL)
        read.require_plain_model()
        if activation == "gelu":
            # The fused kernel computes the tanh approximation.
            arguments["bias_activation_fusion"] = False
        read.raise_problems(self.model_type)
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
        """Return the arguments of the model that a config.json describes.

        Raises:
            CheckpointError: with every value that is invalid or not supported.
        """

    def config(self, values: Values) -> dict[str, Any]:
        """Return the config.json of a model, without the arguments that the family does not
        support."""


HUGGINGFACE_FAMILIES: Mapping[str, HuggingFaceFamily] = {
    family.model_type: family
    for family in (
        LlamaLike("llama", "LlamaForCausalLM", biases=True),
        LlamaLike(
            "qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows="by_layer", window_switch=True
        ),
        LlamaLike(
            "qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="by_layer", window_switch=True
        ),
        LlamaLike("mistral", "MistralForCausalLM", windows="all"),
        LlamaLike("ministral", "MinistralForCausalLM", windows="by_layer"),
        LlamaLike("mixtral", "MixtralForCausalLM", experts="mixtral", windows="all"),
        LlamaLike(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            experts="qwen3",
            windows="all",
            window_switch=True,
        ),
        GPT2(),
        Gemma("gemma", "GemmaForCausalLM"),
        Gemma("gemma2", "Gemma2ForCausalLM", period=2),
        Gemma("gemma3_text", "Gemma3ForCausalLM", qk_norm=True, period=6),
        DeepSeek("deepseek_v2", "DeepseekV2ForCausalLM", sigmoid=False, ranked_experts=1),
        DeepSeek("deepseek_v3", "DeepseekV3ForCausalLM", sigmoid=True, ranked_experts=2),
    )
}
"""Families by ``model_type``. A model is exported as the first family that supports it."""
UNSUPPORTED_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "it is a model of images and text; gemma3_text is supported",
    "qwen2_moe": "its shared expert has a gate",
    "phi3": "it has fused projections",
    "opt": "it has ReLU and offset positions",
    "llama4": "its layers differ",
    "gpt_oss": "it has attention sinks and 4-bit experts",
}
"""Unsupported families by ``model_type``, with the reason."""
