"""Rejected arguments of models and of the implementation of their layers."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import (
    ADAPTERS,
    EXPERT_ADAPTERS,
    LATENT,
    LATENT_FP8,
    LLAMA,
    Problems,
    list_problems,
)

PROBLEMS: Problems = {
    **{
        f"window-{name}": ({"window_size": [4, 0], **values}, key, message)
        for name, (values, key, message) in {
            "ahead": ({"window_size": [4, 2]}, "window_size", "such as [4095, 0], found [4, 2]"),
            "pattern": (
                {"window_attn_skip_freq": [1, 0]},
                "window_attn_skip_freq",
                "layer (num_layers 8), found 2",
            ),
            "never": (
                {"window_attn_skip_freq": 0},
                "window_attn_skip_freq",
                "attention) or a list, found 0",
            ),
            "positions": (
                {"window_rotary_base": 100, "position_embedding_type": "learned_absolute"},
                "window_rotary_base",
                "position_embedding_type: rope, found 'learned_absolute",
            ),
            "of-bert": (
                {"family": "bert"},
                "window_size",
                "token always attends to its whole sequence",
            ),
        }.items()
    },
    **{
        f"latent-{name}": ({**LATENT, **values}, key, message)
        for name, (values, key, message) in {
            "positions": (
                {"position_embedding_type": "learned_absolute"},
                "position_embedding_type",
                "multi_latent_attention requires rope, found 'learned_absolute",
            ),
            "by-the-core": (
                {"attention_backend": "local"},
                "attention_backend",
                "values and keys of the same width",
            ),
            "by-flash": (
                {"attention_backend": "flash"},
                "attention_backend",
                "values and keys of the same width",
            ),
            "lora": (
                {**ADAPTERS, "lora_target_modules": ["linear_qkv"]},
                "lora_target_modules",
                "expected names of linear_q_proj, linear_kv_down_proj",
            ),
            **{
                f"fp8-{name}": ({**LATENT_FP8, **values}, key, message)
                for name, (values, key, message) in {
                    "queries": ({"q_lora_rank": 24}, "q_lora_rank", "24 is not a multiple of 16"),
                    "keys": (
                        {"kv_lora_rank": 24, "qk_pos_emb_head_dim": 8},
                        "kv_lora_rank",
                        "24 is not a multiple of 16, as fp8 requires; leave fp8 out",
                    ),
                    "shared-keys": (
                        {"kv_lora_rank": 32, "tensor_model_parallel_size": 2, "q_lora_rank": None},
                        "kv_lora_rank",
                        "32 + qk_pos_emb_head_dim 16 / tensor_model_parallel_size 2 = 24 per rank "
                        "is not a multiple of 16, as fp8 requires; use 48, or leave fp8 out",
                    ),
                    "values": (
                        {"v_head_dim": 9},
                        "v_head_dim",
                        "9 x num_attention_heads 8 = 72 per rank is not a multiple of 16, as fp8 "
                        "requires; use 10, or leave fp8 out",
                    ),
                    "heads": (
                        {"qk_head_dim": 9},
                        "qk_head_dim",
                        "9 x num_attention_heads 8 = 72 per rank is",
                    ),
                }.items()
            },
            "window": (
                {"window_size": [4, 0]},
                "window_size",
                "sliding windows are not implemented",
            ),
            "positions-through-documents": (
                {"reset_position_ids": True},
                "reset_position_ids",
                "sequence; set reset_attention_mask: true, which has the same effect",
            ),
            "tp": (
                {"tensor_model_parallel_size": 2, "q_lora_rank": 7},
                "q_lora_rank",
                "7 is not divisible by tensor_model_parallel_size 2",
            ),
            "tp-keys": (
                {"tensor_model_parallel_size": 2, "kv_lora_rank": 7},
                "kv_lora_rank",
                "7 + qk_pos_emb_head_dim 64 = 71 is not divisible by tensor_model_parallel_size 2",
            ),
            "bert": (
                {"family": "bert"},
                "multi_latent_attention",
                "is not supported with family: bert",
            ),
        }.items()
    },
    **{
        f"turned-{name}": ({"position_embedding_type": "rope", **values}, key, message)
        for name, (values, key, message) in {
            "odd": (
                {"kv_channels": 7},
                "kv_channels",
                "positions require an even head dimension, found 7",
            ),
            "odd-by-division": (
                {"hidden_size": 56},
                "hidden_size",
                "an even head dimension, found 56 / num_attention_heads 8 = 7",
            ),
            "odd-of-latent": (
                {**LATENT, "qk_pos_emb_head_dim": 7},
                "qk_pos_emb_head_dim",
                "positions require an even head dimension, found 7",
            ),
            "some-layers": (
                {"no_rope_freq": 3},
                "no_rope_freq",
                "num_layers 8 or a list with an item per layer, found 3",
            ),
            "listed-layers": (
                {"no_rope_freq": [0, 1, 1]},
                "no_rope_freq",
                "layer (num_layers 8), found 3",
            ),
            "interleaved": (
                {**LATENT, "rotary_interleaved": True},
                "rotary_interleaved",
                "megatron.core rotates its positions in halves",
            ),
        }.items()
    },
    **{
        f"scores-by-{scale}": ({"softmax_scale": scale}, "softmax_scale", "must be greater than 0")
        for scale in (0, -1.0)
    },
    "two-norms": (
        {"qk_layernorm": True, "qk_l2_norm": True},
        "qk_layernorm",
        "cannot be combined with qk_l2_norm; leave one out",
    ),
    **{
        name: ({name: True}, name, f"is not supported by this trainer: {reason}")
        for name, reason in {
            "fp4_param": "fp4 requires Transformer Engine",
            "inference_fuse_tp_communication": "inference is not supported",
            "reuse_grad_buf_for_mxfp8_param_ag": "weights are kept in 16 bits",
        }.items()
    },
    "yarn-alone": ({"rope_type": "yarn"}, "rope_type", "yarn requires multi_latent_attention"),
    "bounded-scores": (
        {"attn_logit_softcapping": 50.0, "attention_backend": "local"},
        "attn_logit_softcapping",
        "not supported by attention_backend: local; use auto",
    ),
    "zero-centred": (
        {"layernorm_zero_centered_gamma": True, "normalization": "LayerNorm"},
        "layernorm_zero_centered_gamma",
        "requires normalization: RMSNorm",
    ),
    "bert-of-gemma": ({"family": "bert", "sandwich_norm": True}, "sandwich_norm", "not supported"),
    "softmax_type": (
        {"softmax_type": "off-by-one"},
        "softmax_type",
        "'off-by-one' is not supported by scaled_dot_product_attention; use "
        "attention_backend: local",
    ),
    "qk_clip": (
        {"qk_clip": True, "attention_backend": "local"},
        "qk_clip",
        "only Transformer Engine's attention records the largest scores",
    ),
    "fp32-residuals": (
        {"fp32_residual_connection": True, "bf16": True},
        "fp32_residual_connection",
        "rounds it in the first layer; leave it out, or train in fp32 (bf16: false, fp16: false)",
    ),
    "yarn": ({"is_hybrid_model": True}, "is_hybrid_model", "with Mamba layers are not implemented"),
    **{
        f"adapters-{name}": ({**ADAPTERS, **values}, key, message)
        for name, (values, key, message) in {
            "nowhere": (
                {"lora_target_modules": ["linear_qvk"]},
                "lora_target_modules",
                "all-linear; found linear_qvk",
            ),
            "no-gate": (
                {"lora_target_modules": ["gate_proj", "up_proj"]},
                "lora_target_modules",
                "all-linear; found gate_proj",
            ),
            "of-split-experts-with-dropout": (
                {
                    "lora_dropout": 0.1,
                    **EXPERT_ADAPTERS,
                    "disable_bias_linear": True,
                    "sequence_parallel": True,
                    "tensor_model_parallel_size": 2,
                },
                "lora_dropout",
                "adapters of experts that are split over tensor-parallel ranks",
            ),
            "of-dense-layers-and-experts-for-peft": (
                {"export_peft": "/x", **EXPERT_ADAPTERS, **LLAMA}
                | {"moe_layer_freq": 2, "qk_layernorm": True},
                "export_peft",
                "peft cannot load adapters of experts together with those of shared experts or",
            ),
            "of-no-family": (
                {"export_peft": "/x", **LLAMA, "qk_l2_norm": True},
                "export_peft",
                "Hugging Face family can express this model; LlamaForCausalLM",
            ),
            "not-for-peft": (
                {"export_peft": "/x", "openai_gelu": True},
                "export_peft",
                "gpt2 models: peft expects GPT-2's Conv1D layers, whose weights",
            ),
            "of-nothing": (
                {"save": "/y", "pretrained_checkpoint": None},
                "pretrained_checkpoint",
                "is required by peft_type",
            ),
            "of-nothing-and-saved-by-itself": (
                {"pretrained_checkpoint": None},
                "pretrained_checkpoint",
                "model; to train without checkpoints set save: null",
            ),
            "in-8-bits": (
                {"fp8": "hybrid", "bf16": True, "transformer_impl": "compiled"},
                "fp8",
                "supported with peft_type: lora, because frozen weights are not cast",
            ),
            "of-bert": ({"family": "bert"}, "peft_type", "'lora': with family bert adapters are"),
        }.items()
    },
    "fused-loss": (
        {"cross_entropy_fusion_impl": "te"},
        "cross_entropy_fusion_impl",
        "te requires Transformer Engine",
    ),
    "flex": (
        {"moe_token_dispatcher_type": "flex", "num_moe_experts": 2},
        "moe_token_dispatcher_type",
        "flex requires expert_model_parallel_size",
    ),
    "fp8": ({"fp8": "hybrid"}, "fp8", "hybrid requires bf16: true"),
    "fp8-plain-layers": (
        {"fp8": "hybrid", "bf16": True, "transformer_impl": "local"},
        "fp8",
        "requires transformer_impl: auto or compiled",
    ),
    "fp8-recipe": (
        {"fp8": "hybrid", "bf16": True, "fp8_recipe": "delayed"},
        "fp8_recipe",
        "expected tensorwise or rowwise or blockwise, found delayed",
    ),
    "fp8-blocks": (
        {"fp8": "hybrid", "bf16": True, "fp8_recipe": "blockwise"},
        "fp8",
        "fp8_recipe: blockwise, because torch has no blockwise GEMM for e5m2 gradients; use e4m3",
    ),
    "fp8-tokens": (
        {"fp8": "hybrid", "bf16": True, "seq_length": 20, "micro_batch_size": 2},
        "micro_batch_size",
        "2 x seq_length 20 = 40 tokens, but fp8 requires a multiple of 16",
    ),
    "fp8-tokens-of-a-rank": (
        {"fp8": "hybrid", "bf16": True, "seq_length": 16, "context_parallel_size": 2},
        "micro_batch_size",
        "1 x seq_length 16 / context_parallel_size 2 = 8 tokens, but fp8",
    ),
    **{
        f"fp8-{key}": ({"fp8": "hybrid", "bf16": True, **values}, key, message)
        for key, values, message in (
            ("hidden_size", {"hidden_size": 72}, "72 is not a multiple of 16, as"),
            (
                "ffn_hidden_size",
                {"ffn_hidden_size": 48, "tensor_model_parallel_size": 2},
                "48 / tensor_model_parallel_size 2 = 24 per rank is not a multiple of 16, as fp8 "
                "requires; use 64, or leave fp8 out",
            ),
            (
                "kv_channels",
                {"kv_channels": 10, "num_query_groups": 2},
                "10 x 2 x num_query_groups 2 = 40 per rank is",
            ),
            (
                "moe_shared_expert_intermediate_size",
                {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 40},
                "40 is not a multiple of 16, as fp8 requires; use 48, or leave",
            ),
        )
    },
    "fp8-no-layer": (
        {"fp8": "e4m3", "bf16": True, "first_last_layers_bf16": True, "num_layers": 2},
        "first_last_layers_bf16",
        "num_layers_at_end_in_bf16 1 leave no fp8 layer of 2",
    ),
    "gqa": ({"group_query_attention": True}, "group_query_attention", "needs num_query_groups"),
    "no-positions": ({"no_position_embedding": True}, "no_position_embedding", "`none`"),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_model_argument_is_rejected(
    values: dict[str, Any], name: str, message: str
) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
