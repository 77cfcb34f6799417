"""What each family's config.json says, as arguments, and the other way.

``values`` are arguments by name with everything that follows from others written out
(:func:`flagscale.config.arguments.huggingface.models.effective`). Which tensors a family has is
told, with the same names, by ``flagscale.train.checkpoint.formats.tables``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from flagscale.config.arguments.huggingface.deepseek import DeepSeek
from flagscale.config.arguments.huggingface.gemma import Gemma
from flagscale.config.arguments.huggingface.gpt2 import GPT2
from flagscale.config.arguments.huggingface.llama import LlamaLike

Values = Mapping[str, Any]


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

REFUSED: Mapping[str, str] = {
    "gemma3": "it is a model of images and text; those of text are gemma3_text",
    "qwen2_moe": "its shared expert has a gate",
    "phi3": "its projections are fused in a way that is not read",
    "opt": "its ReLU and the place of its positions cannot be said",
    "llama4": "its layers are unlike",
    "gpt_oss": "its attention has sinks, and its experts' weights are of 4 bits",
}
"""Families that cannot be had, and why."""
