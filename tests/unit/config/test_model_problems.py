"""Rejected arguments of models and of the implementation of their layers."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import ADAPTERS, LATENT, LATENT_FP8, LLAMA, Problems, list_problems

from flagscale.config.arguments.spec.values import format_value

PROBLEMS: Problems = {
    **{
        f"window-{name}": ({"window_size": [4, 0], **values}, key, message)
        for name, (values, key, message) in {
            "ahead": ({"window_size": [4, 2]}, "window_size", "[4, 2]: expected how many tokens"),
            "pattern": ({"window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq", "2 items, but"),
            "never": ({"window_attn_skip_freq": 0}, "window_attn_skip_freq", "0: expected 2"),
            "cp": ({"context_parallel_size": 2}, "window_size", "would need a mask of its own"),
            "positions": (
                {"window_rotary_base": 100, "position_embedding_type": "learned_absolute"},
                "window_rotary_base",
                "100 needs position_embedding_type: rope",
            ),
            "of-bert": ({"family": "bert"}, "window_size", "a token attends to all of its sequ"),
        }.items()
    },
    **{
        f"latent-{name}": ({**LATENT, **values}, key, message)
        for name, (values, key, message) in {
            "positions": (
                {"position_embedding_type": "learned_absolute"},
                "position_embedding_type",
                "'learned_absolute' with multi_latent_attention: its positions are rotary",
            ),
            "by-the-core": ({"attention_backend": "local"}, "attention_backend", "as wide as keys"),
            "by-flash": ({"attention_backend": "flash"}, "attention_backend", "as wide as keys"),
            "lora": (
                {**ADAPTERS, "lora_target_modules": ["linear_qkv"]},
                "lora_target_modules",
                "no layer that gets adapters; there is linear_q_proj, linear_kv_down_proj",
            ),
            **{
                f"fp8-{name}": ({**LATENT_FP8, **values}, key, message)
                for name, (values, key, message) in {
                    "queries": ({"q_lora_rank": 24}, "q_lora_rank", "24: 8-bit matrix"),
                    "keys": (
                        {"kv_lora_rank": 24, "qk_pos_emb_head_dim": 8},
                        "kv_lora_rank",
                        "24: 8-bit matrix products take multiples of 16; leave fp8 out",
                    ),
                    "shared-keys": (
                        {"kv_lora_rank": 32, "tensor_model_parallel_size": 2, "q_lora_rank": None},
                        "kv_lora_rank",
                        "32 + qk_pos_emb_head_dim 16 / tensor_model_parallel_size 2 = 24 on a rank:"
                        " 8-bit matrix products take multiples of 16; take 48, or leave fp8 out",
                    ),
                    "values": (
                        {"v_head_dim": 9},
                        "v_head_dim",
                        "9 x num_attention_heads 8 = 72 on a rank: 8-bit matrix products take "
                        "multiples of 16; take 10, or leave fp8 out",
                    ),
                    "heads": (
                        {"qk_head_dim": 9},
                        "qk_head_dim",
                        "9 x num_attention_heads 8 = 72 on a rank",
                    ),
                }.items()
            },
            "window": ({"window_size": [4, 0]}, "window_size", "it has no windows here"),
            "positions-through-documents": (
                {"reset_position_ids": True},
                "reset_position_ids",
                "counts positions through the sequence; set reset_attention_mask, with which",
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
            "bert": ({"family": "bert"}, "multi_latent_attention", "attention there is not latent"),
        }.items()
    },
    **{
        f"turned-{name}": ({"position_embedding_type": "rope", **values}, key, message)
        for name, (values, key, message) in {
            "odd": ({"kv_channels": 7}, "kv_channels", "7: rotary positions turn pairs of numbers"),
            "odd-by-division": (
                {"hidden_size": 56},
                "hidden_size",
                "56 / num_attention_heads 8 = 7: rotary positions turn pairs",
            ),
            "odd-of-latent": (
                {**LATENT, "qk_pos_emb_head_dim": 7},
                "qk_pos_emb_head_dim",
                "7: rotary positions turn pairs of numbers",
            ),
            "some-layers": ({"no_rope_freq": 3}, "no_rope_freq", "3 does not divide num_layers 8"),
            "listed-layers": ({"no_rope_freq": [0, 1, 1]}, "no_rope_freq", "3 items, but num_lay"),
            "interleaved": (
                {**LATENT, "rotary_interleaved": True},
                "rotary_interleaved",
                "megatron.core turns its positions in halves",
            ),
        }.items()
    },
    **{
        f"scores-by-{scale}": ({"softmax_scale": scale}, "softmax_scale", "expected more than 0")
        for scale in (0, -1.0)
    },
    "two-norms": (
        {"qk_layernorm": True, "qk_l2_norm": True},
        "qk_layernorm",
        "true with qk_l2_norm: queries and keys have one norm",
    ),
    **{
        name: ({name: True}, name, f"is not supported by this trainer: {reason}")
        for name, reason in {
            "fp4_param": "fp4 needs Transformer Engine",
            "moe_router_padding_for_fp8": "it pads for Transformer Engine's 8-bit experts",
            "inference_fuse_tp_communication": "it is of inference",
            "reuse_grad_buf_for_mxfp8_param_ag": "weights are kept in 16 bits",
            "defer_embedding_wgrad_compute": "it needs Apex's fused accumulation of gradients",
        }.items()
    },
    "yarn-alone": ({"rope_type": "yarn"}, "rope_type", "yarn needs multi_latent_attention"),
    "bounded-scores": (
        {"attn_logit_softcapping": 50.0, "attention_backend": "local"},
        "attn_logit_softcapping",
        "50.0 is not possible with attention_backend: local",
    ),
    "zero-centred": (
        {"layernorm_zero_centered_gamma": True, "normalization": "LayerNorm"},
        "layernorm_zero_centered_gamma",
        "RMSNorm alone has it here",
    ),
    "bert-of-gemma": ({"family": "bert", "sandwich_norm": True}, "sandwich_norm", "no such part"),
    **{
        name: (
            {name: value},
            name,
            f"{format_value(value)} is not possible with scaled_dot_product_attention; "
            "attention_backend: "
            "local takes",
        )
        for name, value in {
            "softmax_type": "off-by-one",
            "qk_clip": True,
            "log_max_attention_logit": True,
        }.items()
    },
    "yarn": ({"is_hybrid_model": True}, "is_hybrid_model", "Mamba and attention layers are not"),
    **{
        f"adapters-{name}": ({**ADAPTERS, **values}, key, message)
        for name, (values, key, message) in {
            "nowhere": (
                {"lora_target_modules": ["linear_qvk"]},
                "lora_target_modules",
                "linear_qvk: no layer that gets adapters; there is linear_qkv, linear_proj",
            ),
            "no-gate": (
                {"lora_target_modules": ["gate_proj", "up_proj"]},
                "lora_target_modules",
                "gate_proj: no layer that gets adapters; there is linear_qkv, linear_proj",
            ),
            "of-experts": (
                {"num_experts": 4, "lora_target_modules": ["linear_fc1"]},
                "lora_target_modules",
                "experts get no adapters; take linear_qkv and linear_proj",
            ),
            "of-no-family": (
                {"export_peft": "/x", **LLAMA, "qk_l2_norm": True},
                "export_peft",
                "no family of Hugging Face that is known here is this model",
            ),
            "not-for-peft": (
                {"export_peft": "/x", "openai_gelu": True},
                "export_peft",
                "adapters of gpt2 are not written for peft: it takes this model's linear layers",
            ),
            "of-nothing": (
                {"save": "/y", "pretrained_checkpoint": None},
                "pretrained_checkpoint",
                "is required by peft_type",
            ),
            "of-nothing-and-saved-by-itself": (
                {"pretrained_checkpoint": None},
                "pretrained_checkpoint",
                "these are of a model; or save: null",
            ),
            "in-8-bits": (
                {"fp8": "hybrid", "bf16": True, "transformer_impl": "compiled"},
                "fp8",
                "hybrid with peft_type lora: weights that do not change are not cast",
            ),
            "of-bert": ({"family": "bert"}, "peft_type", "'lora': with family bert adapters are"),
        }.items()
    },
    "fused-loss": ({"cross_entropy_fusion_impl": "te"}, "cross_entropy_fusion_impl", "te needs"),
    "flex": (
        {"moe_token_dispatcher_type": "flex", "num_moe_experts": 2},
        "moe_token_dispatcher_type",
        "flex needs experts on more than one rank",
    ),
    "fp8": ({"fp8": "hybrid"}, "fp8", "hybrid needs bf16"),
    "fp8-plain-layers": (
        {"fp8": "hybrid", "bf16": True, "transformer_impl": "local"},
        "fp8",
        "needs transformer_impl: auto or compiled",
    ),
    "fp8-recipe": (
        {"fp8": "hybrid", "bf16": True, "fp8_recipe": "delayed"},
        "fp8_recipe",
        "delayed is not built; take tensorwise or rowwise or blockwise",
    ),
    "fp8-blocks": (
        {"fp8": "hybrid", "bf16": True, "fp8_recipe": "blockwise"},
        "fp8",
        "hybrid with fp8_recipe blockwise: torch multiplies no e5m2 gradients by blocks; take e4m3",
    ),
    "fp8-tokens": (
        {"fp8": "hybrid", "bf16": True, "seq_length": 20, "micro_batch_size": 2},
        "micro_batch_size",
        "2 x seq_length 20 = 40 tokens: 8-bit matrix products take multiples of 16",
    ),
    "fp8-tokens-of-a-rank": (
        {"fp8": "hybrid", "bf16": True, "seq_length": 16, "context_parallel_size": 2},
        "micro_batch_size",
        "1 x seq_length 16 / context_parallel_size 2 = 8 tokens: 8-bit",
    ),
    **{
        f"fp8-{key}": ({"fp8": "hybrid", "bf16": True, **values}, key, message)
        for key, values, message in (
            ("hidden_size", {"hidden_size": 72}, "72: 8-bit matrix products take"),
            (
                "ffn_hidden_size",
                {"ffn_hidden_size": 48, "tensor_model_parallel_size": 2},
                "48 / tensor_model_parallel_size 2 = 24 on a rank: 8-bit matrix products take "
                "multiples of 16; take 64, or leave fp8 out",
            ),
            (
                "kv_channels",
                {"kv_channels": 10, "num_query_groups": 2},
                "10 x 2 x num_query_groups 2 = 40 on a rank",
            ),
            (
                "moe_shared_expert_intermediate_size",
                {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 40},
                "40: 8-bit matrix products take multiples of 16; take 48, or leave fp8 out",
            ),
        )
    },
    "fp8-no-layer": (
        {"fp8": "e4m3", "bf16": True, "first_last_layers_bf16": True, "num_layers": 2},
        "first_last_layers_bf16",
        "leave none of 2 layers to fp8 e4m3",
    ),
    "gqa": ({"group_query_attention": True}, "group_query_attention", "needs num_query_groups"),
    "gqa-off": (
        {"group_query_attention": False, "num_query_groups": 4},
        "group_query_attention",
        "contradicts num_query_groups 4",
    ),
    "no-positions": ({"no_position_embedding": True}, "no_position_embedding", "`none`"),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_model_argument_is_rejected(
    values: dict[str, Any], name: str, message: str
) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
