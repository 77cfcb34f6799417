"""DeepSeek-V2 and -V3: multi-latent attention and mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.arguments.compat.huggingface.reading import (
    MOST_LAYERS,
    ConfigReader,
    is_number,
    rope_base,
)
from flagscale.config.arguments.spec.argument import Values

_EPSILON = 1e-6
"""Of the norms of latent numbers in transformers, whatever config.json says of the others."""
_YARN: Mapping[str, tuple[str, float]] = {
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Arguments by the names that scaled positions have there, with what their absence means."""


@dataclass(frozen=True)
class DeepSeek:
    """Multi-latent attention; behind a few dense layers mixtures with an expert that all share.

    ``sigmoid``: each expert has a score of its own and a bias by which it is chosen (V3), rather
    than a share of one softmax (V2). ``best``: where experts are chosen from a few groups, how many
    of a group's best the groups are ranked by. ``absent`` is what keys of config.json mean where
    they are missing, which is not what they mean where they are null.
    """

    model_type: str
    architecture: str
    sigmoid: bool
    best: int
    absent: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"hidden_act": "silu", "rope_theta": 10000.0}
        read = ConfigReader({"q_lora_rank": 1536, **self.absent, **config}, defaults)
        heads, layers = read.whole("num_attention_heads"), self._layers(read)
        arguments = {
            "num_layers": layers,
            "hidden_size": read.whole("hidden_size"),
            "ffn_hidden_size": read.whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "multi_latent_attention": True,
            "q_lora_rank": None if read.get("q_lora_rank") is None else read.whole("q_lora_rank"),
            "kv_lora_rank": read.whole("kv_lora_rank"),
            "qk_head_dim": read.whole("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": read.whole("qk_rope_head_dim"),
            "v_head_dim": read.whole("v_head_dim"),
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not read.switch("tie_word_embeddings"),
            "position_embedding_type": "rope",
            "max_position_embeddings": read.whole("max_position_embeddings"),
            "vocab_size": read.whole("vocab_size"),
            **self._rope(read),
            **self._experts(read, layers),
        }
        self._only(read, arguments)
        read.finish(self.model_type)
        return arguments

    def _layers(self, read: ConfigReader) -> int:
        return read.whole("num_hidden_layers", most=MOST_LAYERS)

    def _only(self, read: ConfigReader, arguments: Values) -> None:
        """Refuse what these models are without."""
        if (act := read.get("hidden_act")) not in ("silu", "swish"):
            read.refuse("hidden_act", act, "the gated MLP here is SwiGLU, whose function is silu")
        for name in ("attention_bias", "mlp_bias"):
            read.only(name, False, f"{self.architecture} is taken without it")
        heads = arguments["num_attention_heads"]
        read.only("num_key_value_heads", heads, "latent keys and values are made for every head")
        read.only("rope_interleave", True, "turned numbers lie in pairs in published models")
        read.only("moe_layer_freq", 1, "behind the first all layers are mixtures in transformers")
        if arguments["layernorm_epsilon"] != _EPSILON:
            reason = f"transformers norms latent numbers with {_EPSILON:g}, whatever is said here"
            read.refuse("rms_norm_eps", arguments["layernorm_epsilon"], reason)
        read.only(
            "quantization_config", {}, "weights of fewer bits are not read; take the bf16 ones"
        )

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        """Plain positions, or those that are scaled by YaRN."""
        arguments, scaling, kind = rope_base(read)
        if kind == "default":
            return {**arguments, "rope_type": "rope"}
        if kind != "yarn":
            read.refuse("rope_scaling", kind, "positions are scaled by yarn, or not")
            return arguments
        yarn = ConfigReader(scaling)
        arguments["rope_type"] = "yarn"
        arguments["rotary_scaling_factor"] = yarn.number("factor")
        name = "original_max_position_embeddings"
        arguments[name] = yarn.whole(name)
        for theirs, (ours, absent) in _YARN.items():
            value = scaling.get(theirs) or absent
            if not is_number(value) or value < 0:
                yarn.refuse(theirs, value, "expected a number from 0")
            arguments[ours] = float(value) if is_number(value) else absent
        if not arguments["mscale_all_dim"]:
            arguments["mscale"] = 1.0  # read only beside the other
        elif not scaling.get("mscale"):
            yarn.refuse("mscale_all_dim", scaling["mscale_all_dim"], "it is without mscale")
        yarn.only("attention_factor", None, "megatron.core finds it by mscale and mscale_all_dim")
        yarn.only("truncate", True, "megatron.core rounds the range of frequencies")
        read.problems += [f"rope_scaling.{problem}" for problem in yarn.problems]
        return arguments

    def _experts(self, read: ConfigReader, layers: int) -> dict[str, Any]:
        dense = read.get("first_k_dense_replace") or 0
        if not is_number(dense) or dense != int(dense) or not 0 <= dense <= layers:
            read.refuse("first_k_dense_replace", dense, f"expected a number of {layers} layers")
            dense = 0
        width = read.whole("moe_intermediate_size")
        factor = read.get("routed_scaling_factor")
        if factor is not None:
            factor = read.number("routed_scaling_factor")
        arguments: dict[str, Any] = {
            "num_moe_experts": read.whole(
                "n_routed_experts", "num_local_experts", most=MOST_LAYERS
            ),
            "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * read.whole("n_shared_experts"),
            "moe_router_topk": read.whole("num_experts_per_tok"),
            "moe_router_topk_scaling_factor": None if factor == 1 else factor,
            "moe_router_dtype": "fp32",
        }
        arguments |= self._scores(read)
        return arguments | self._groups(read, arguments["moe_router_topk"])

    def _scores(self, read: ConfigReader) -> dict[str, Any]:
        if self.sigmoid:
            read.only("scoring_func", "sigmoid", "V3 scores experts by it")
            if read.get("norm_topk_prob") is False:
                reason = "megatron.core makes the chosen experts' scores add up to 1"
                read.refuse("norm_topk_prob", False, reason)
            return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        read.only("scoring_func", "softmax", "V2 scores experts by it")
        read.only("norm_topk_prob", False, "transformers leaves the chosen experts' scores as are")
        return {"moe_router_pre_softmax": True}

    def _groups(self, read: ConfigReader, chosen: int) -> dict[str, Any]:
        """Read the settings by which experts are chosen from a part of their groups only."""
        greedy = not self.sigmoid and read.get("topk_method") in (None, "greedy")
        if greedy or read.get("n_group") is None or read.get("topk_group") is None:
            return {}
        groups, some = read.whole("n_group"), read.whole("topk_group")
        if some >= groups:
            return {}
        if chosen // some != self.best:
            ranked = "the best one" if self.best == 1 else f"the sum of the best {self.best}"
            reason = (
                f"groups of experts are ranked by {ranked} of each, and megatron.core takes "
                f"num_experts_per_tok {chosen} // topk_group {some} = {chosen // some} of each"
            )
            read.refuse("n_group", groups, reason)
        return {"moe_router_num_groups": groups, "moe_router_group_topk": some}

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
    yarn = {theirs: values[ours] for theirs, (ours, _) in _YARN.items()}
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": values["rotary_scaling_factor"]}
    return {**scaling, name: values[name], **yarn}
