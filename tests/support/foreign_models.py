"""Tiny random Hugging Face models, created by transformers, and their logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENS = [[3, 17, 129, 5, 64, 0, 88, 21, 101, 7, 55, 42, 13, 99, 120, 2]]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON_VALUES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_GEMMA = {
    "tie_word_embeddings": True,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
}
_GEMMA3 = {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]}
_ONE_WINDOW = {"layer_types": ["full_attention", "sliding_attention"]}
_MIXTRAL_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
# With an initializer range of 0.3, the error of fp32 is 7e-6, because expert weights do not add up
# to 1 and attention is sharp.
_DEEPSEEK_V2 = {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
}
_DEEPSEEK_V3 = {
    "q_lora_rank": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
_QWEN_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class TinyModel:
    """Configuration of a tiny model of transformers.

    Attributes:
        class_prefix: prefix of the configuration class, such as ``Llama`` for ``LlamaConfig``.
        config_values: values of the configuration that differ from the common ones.
    """

    class_prefix: str
    config_values: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        import transformers

        values = {"rms_norm_eps": 1e-6, **_COMMON_VALUES, **self.config_values}
        if self.class_prefix == "GPT2":
            names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 130}
            values = {**names, "initializer_range": 0.3, **self.config_values}
        return getattr(transformers, f"{self.class_prefix}Config")(**values)


MODELS = {
    "llama": TinyModel("Llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "llama-tied": TinyModel("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": TinyModel("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-linear": TinyModel("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2": TinyModel(
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
        },
    ),
    "qwen3": TinyModel("Qwen3", {"head_dim": 16}),
    "mistral": TinyModel("Mistral", {"sliding_window": 6}),
    "ministral": TinyModel("Ministral", {"sliding_window": 6, **_ONE_WINDOW}),
    "mixtral": TinyModel("Mixtral", {**_MIXTRAL_EXPERTS, "sliding_window": None}),
    "qwen3-moe": TinyModel("Qwen3Moe", {**_QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-mixed": TinyModel(
        "Qwen3Moe", {**_QWEN_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}
    ),
    "qwen3-moe-windows": TinyModel(
        "Qwen3Moe", {**_QWEN_EXPERTS, "use_sliding_window": True, "sliding_window": 6}
    ),
    "gpt2": TinyModel("GPT2"),
    "gemma": TinyModel("Gemma", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "gemma2": TinyModel("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": TinyModel(
        "Gemma3Text",
        {**_GEMMA, **_GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "deepseek-v2": TinyModel(
        "DeepseekV2", {**_LATENT_ATTENTION, **_DEEPSEEK_V2, "rope_scaling": YARN_ROPE}
    ),
    "deepseek-v3": TinyModel(
        "DeepseekV3", {**_LATENT_ATTENTION, **_DEEPSEEK_V3, "rope_scaling": YARN_ROPE}
    ),
    "deepseek-v3-plain": TinyModel(
        "DeepseekV3",
        {**_LATENT_ATTENTION, **_DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    ),
}
"""Models by the names that tests use. Models with experts have them at least in layer 1."""
MTP_MODEL = "deepseek-v3"
"""The model with a multi-token prediction layer."""


def save_model(
    name: str, path: Path, *, dtype: str = "float32", max_shard_size: str = "5GB"
) -> Any:
    """Save the model in a directory; return its logits ``[1, sequence, vocabulary]`` in fp32."""
    import torch
    import transformers

    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name].config()).eval()
    with torch.no_grad():
        # Biases and norms start as zeros and ones, which hide mistakes.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if name == MTP_MODEL:
        _add_mtp_layer(path)
    return compute_logits(path)


def _add_mtp_layer(path: Path) -> None:
    """Add a multi-token prediction layer, which transformers does not create."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    last_layer = {
        name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")
    }
    for name, tensor in last_layer.items():
        tensors[name.replace(".1.", ".2.", 1)] = tensor + 0.1 * torch.randn_like(tensor)
    prefix, hidden = "model.layers.2.", tensors["model.norm.weight"].numel()
    dtype = tensors["model.norm.weight"].dtype
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = torch.randn(hidden, dtype=dtype)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, dtype=dtype)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def compute_logits(path: Path) -> Any:
    """Compute logits with transformers for the model in a directory."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits
