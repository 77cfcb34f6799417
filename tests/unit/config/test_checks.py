"""What must hold between values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments.rules import needs_checkpoint
from flagscale.config.arguments.values import shown
from flagscale.config.checks import Arguments, check_arguments, check_world, notes
from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task, Train

GOOD: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "lr": 1e-3,
    "train_iters": 10,
    "mock_data": True,
}


def _experiment(values: dict[str, Any], *, external: bool = False) -> Experiment:
    given = {name: value for name, value in {**GOOD, **values}.items() if value is not None}
    return Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py"), external=external),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=Train(model={"inner": given}),
        config_file=Path("/x.yaml"),
    )


CAPTURED = {
    "cuda_graph_impl": "local",
    "cuda_graph_scope": ["full_iteration"],
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
}
BOUNDED = {"distributed_backend": "fsccl", "comm": ["tail=bounded"]}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope"}
LATENT_FP8 = {
    **LATENT,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"), 16),
    **dict.fromkeys(("qk_head_dim", "v_head_dim"), 8),
    **{"fp8": "e4m3", "bf16": True, "fp8_recipe": "blockwise"},
}
LLAMA = {
    **{"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
    **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
TALKS = {"sft": True, "data_path": "a.jsonl", "mock_data": False}


FITS: dict[str, dict[str, Any]] = {
    "captured": CAPTURED,
    "plain": {},
    "tp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "groups": {"num_query_groups": 4, "tensor_model_parallel_size": 4},
    "gqa-switch": {"num_query_groups": 4, "group_query_attention": True},
    "pp": {"pipeline_model_parallel_size": 4},
    "vpp": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
    "vpp-chunks": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4},
    "vpp-explicit": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_p2p_communication": True,
        "batch_p2p_comm": False,
    },
    "vpp-off": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
    "uneven": {
        "pipeline_model_parallel_size": 3,
        "num_layers_in_first_pipeline_stage": 2,
        "num_layers_in_last_pipeline_stage": 3,
    },
    "two-stages-of-their-own": {
        "pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 3,
        "num_layers_in_last_pipeline_stage": 5,
    },
    "layout": {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|t*4|t*3L"},
    "embedding": {
        "pipeline_model_parallel_size": 5,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    "channels": {"hidden_size": 60, "kv_channels": 16},
    "samples": {"train_iters": None, "train_samples": 10},
    "experts": {"num_moe_experts": 4, "expert_model_parallel_size": 2},
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "tensor_model_parallel_size": 2,
        "position_embedding_type": "rope",
    },
    "adapters": {
        "peft_type": "lora",
        "lora_target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_dropout_position": "pre",
        "lora_in_init_method": "kaiming",
        "lora_out_init_method": "zero",
    },
    "adapters-for-peft": {"peft_type": "lora", "export_peft": "/x", **LLAMA},
    "fp8": {"fp8": "hybrid", "bf16": True, "kv_channels": 12, "num_query_groups": 2},
    "bounded": BOUNDED,
    "exact": {**BOUNDED, "comm": ["tail=exact"], "use_distributed_optimizer": True},
    "fp8-latent": LATENT_FP8,
    "window": {"window_size": [4, 0], "window_attn_skip_freq": 2},
    "window-of-the-core": {"window_size": [4, 0], "attention_backend": "local"},
    "windows-and-documents": {"window_size": [4, 0], "reset_attention_mask": True},
    "window-list": {"window_size": [4, 0], "window_attn_skip_freq": [1, 0] * 4},
    "softmax": {"softmax_type": "off-by-one", "attention_backend": "local"},
    "softmax-vanilla": {"softmax_type": "vanilla"},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "not-recomputed": {"recompute_modules": ["layernorm"]},
    "flex": {
        "moe_token_dispatcher_type": "flex",
        "num_moe_experts": 2,
        "expert_model_parallel_size": 2,
    },
    "flex-of-no-experts": {"moe_token_dispatcher_type": "flex"},
    "rope": {"no_position_embedding": True, "position_embedding_type": "rope"},
}


@pytest.mark.parametrize("values", FITS.values(), ids=FITS)
def test_fits(values: dict[str, Any]) -> None:
    assert check_arguments(_experiment(values)) == []


PROBLEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-layers": ({"num_layers": None}, "num_layers", "is required"),
    "no-lr": ({"lr": None}, "lr", "is required"),
    "heads": ({"tensor_model_parallel_size": 3}, "num_attention_heads", "8 is not divisible"),
    "groups-tp": (
        {"num_query_groups": 2, "tensor_model_parallel_size": 4},
        "num_query_groups",
        "2 is not divisible by tensor_model_parallel_size 4",
    ),
    "groups-heads": ({"num_query_groups": 3}, "num_query_groups", "3 does not divide 8 heads"),
    "hidden": ({"hidden_size": 63}, "hidden_size", "num_attention_heads 8"),
    "ffn": (
        {"ffn_hidden_size": 90, "tensor_model_parallel_size": 4},
        "ffn_hidden_size",
        "90 is not divisible",
    ),
    "layers": (
        {"pipeline_model_parallel_size": 3},
        "num_layers",
        "8 layers do not divide into 3 pipeline stages",
    ),
    "layers-of-the-ends": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 4,
        },
        "num_layers",
        "7 of 8 layers are given to 2 of 2 stages",
    ),
    "layers-of-the-first": (
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 9},
        "num_layers",
        "9 of 8 layers are given to 1 of 3 stages",
    ),
    "layers-vpp": (
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        "num_layers",
        "2 pipeline stages x 3 virtual",
    ),
    "layers-per-stage": (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        "num_layers_per_virtual_pipeline_stage",
        "do not divide into 3 x",
    ),
    "vpp-without-pp": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        "pipeline_model_parallel_size",
        "need a pipeline of at least 2",
    ),
    "vpp-p2p": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "no_overlap_p2p_communication": True,
        },
        "overlap_p2p_comm",
        "must be true",
    ),
    "vpp-batch": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "batch_p2p_comm": True,
        },
        "batch_p2p_comm",
        "must be false",
    ),
    "sp-length": (
        {"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 30},
        "seq_length",
        "30 is not divisible",
    ),
    "cp-local": (
        {"context_parallel_size": 2, "attention_backend": "local"},
        "context_parallel_size",
        "cannot split a sequence over ranks; take auto",
    ),
    "cp-length": (
        {"context_parallel_size": 2, "seq_length": 30},
        "seq_length",
        "30 is not divisible by 2 x context_parallel_size 2",
    ),
    "cp-sp-length": (
        {
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "seq_length": 36,
        },
        "seq_length",
        "36 is not divisible by 2 x context_parallel_size 2 x tensor 2",
    ),
    "cp-ring": (
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        "cp_comm_type",
        "p2p: keys and values are gathered here",
    ),
    "opposite": (
        {"no_rope_fusion": False, "transformer_impl": "local"},
        "no_rope_fusion",
        "or Apex for it (`no_rope_fusion: false` is `apply_rope_fusion: true`)",
    ),
    "switch-of-a-value": (
        {"use_flash_attn": True, "window_size": [4, 0]},
        "window_size",
        "[4, 0] is not possible with attention_backend: flash",
    ),
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
                {"peft_type": "lora", "lora_target_modules": ["linear_qkv"]},
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
    "documents-and-a-window": (
        {"reset_attention_mask": True, "attention_backend": "local", "window_size": [4, 0]},
        "window_size",
        "[4, 0] with reset_attention_mask: megatron.core's own attention makes",
    ),
    "documents-by-cudnn": (
        {"reset_attention_mask": True, "attention_backend": "fused"},
        "attention_backend",
        "fused: cuDNN's kernel takes no documents",
    ),
    **{
        name: (
            {name: value},
            name,
            f"{shown(value)} is not possible with scaled_dot_product_attention; attention_backend: "
            "local takes",
        )
        for name, value in {
            "softmax_type": "off-by-one",
            "qk_clip": True,
            "log_max_attention_logit": True,
        }.items()
    },
    "permute": ({"moe_permute_fusion": True}, "moe_permute_fusion", "needs Transformer Engine"),
    "yarn": ({"is_hybrid_model": True}, "is_hybrid_model", "Mamba and attention layers are not"),
    "validations": (
        {"multiple_validation_sets": True},
        "multiple_validation_sets",
        "true needs valid_data_path, which names the sets",
    ),
    "weights-of-validations": (
        {
            "multiple_validation_sets": True,
            "mock_data": False,
            "train_data_path": "a",
            "valid_data_path": "0.3 a 0.7 b",
        },
        "valid_data_path",
        "a blend's weights with multiple_validation_sets",
    ),
    "conversations-as-text": (
        {"data_path": "a.jsonl", "mock_data": False},
        "data_path",
        "a.jsonl: sft: true trains on conversations; text of JSON lines is made",
    ),
    **{
        f"conversations-{name}": ({**TALKS, **values}, key, message)
        for name, (values, key, message) in {
            "of-an-index": ({"data_path": "a/b"}, "data_path", "a/b: with sft expected files of"),
            "weighed": ({"data_path": "1 a.jsonl 2 b.jsonl"}, "data_path", "leave the weights out"),
            "without-template": (
                {"tokenizer_type": "NullTokenizer"},
                "tokenizer_type",
                "NullTokenizer with sft: it has no chat template; take HuggingFaceTokenizer",
            ),
            "template": (
                {"chat_template": "chatlm"},
                "chat_template",
                "expected chatml or llama3 or a .jinja file, found 'chatlm'",
            ),
            "by-cudnn": ({"attention_backend": "fused"}, "attention_backend", "takes no documents"),
            "of-bert": ({"family": "bert"}, "sft", "answers are not told token by token"),
        }.items()
    },
    "prompts-without-evaluation": (
        {"eval_prompts": "/x", "eval_iters": 0, "eval_prompt_tokens": 4},
        "eval_prompts",
        "prompts are answered at evaluations, which eval_iters: 0 switches off",
    ),
    "prompts-in-parts": (
        {"eval_prompts": "/x", "context_parallel_size": 2, "eval_prompt_tokens": 4},
        "eval_prompts",
        "prompts are not answered with context parallelism or unlike devices",
    ),
    "prompts-without-room": (
        {"eval_prompts": "/x"},
        "eval_prompt_tokens",
        "leaves no room in seq_length 32",
    ),
    **{
        f"adapters-{name}": ({"peft_type": "lora", **values}, key, message)
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
            "of-nothing": ({"save": "/x"}, "pretrained_checkpoint", "is required by peft_type"),
            "in-8-bits": (
                {"fp8": "hybrid", "bf16": True, "transformer_impl": "compiled"},
                "fp8",
                "hybrid with peft_type lora: weights that do not change are not cast",
            ),
            "of-bert": ({"family": "bert"}, "peft_type", "'lora': with family bert adapters are"),
        }.items()
    },
    "router": ({"moe_router_fusion": True}, "moe_router_fusion", "needs Transformer Engine"),
    "graph": (
        {"cuda_graph_impl": "transformer_engine"},
        "cuda_graph_impl",
        "transformer_engine needs Transformer Engine; local with cuda_graph_scope: full_iteration",
    ),
    **{
        f"captured-{name}": ({**CAPTURED, name: value}, name, message)
        for name, value, message in (
            ("cuda_graph_scope", ["attn"], "['attn']: only whole steps are captured here"),
            ("tensor_model_parallel_size", 2, "2: ranks would communicate within a captured step"),
            ("overlap_grad_reduce", True, "true: ranks would communicate within a captured step"),
            ("fp16", True, "true cannot be captured (cuda_graph_impl): the loss scale"),
            ("num_moe_experts", 4, "4 cannot be captured (cuda_graph_impl): how many tokens"),
            (
                "recompute_granularity",
                "selective",
                "'selective' cannot be captured (cuda_graph_impl)",
            ),
            ("attention_dropout", 0.1, "0.1 cannot be captured (cuda_graph_impl): the state of"),
        )
    },
    "fused-loss": ({"cross_entropy_fusion_impl": "te"}, "cross_entropy_fusion_impl", "te needs"),
    "instances": (
        {"num_distributed_optimizer_instances": 2},
        "num_distributed_optimizer_instances",
        "2: the optimizer here is sharded over all data-parallel ranks",
    ),
    **{
        f"recompute-{name}": (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", name]},
            "recompute_modules",
            f"{name} needs",
        )
        for name in ("layernorm", "moe_act", "mla_up_proj")
    },
    "flex": (
        {"moe_token_dispatcher_type": "flex", "num_moe_experts": 2},
        "moe_token_dispatcher_type",
        "flex needs experts on more than one rank",
    ),
    "sgd": (
        {"optimizer": "sgd", "use_distributed_optimizer": True},
        "optimizer",
        "megatron.core shards Adam alone",
    ),
    "bounded": (
        {**BOUNDED, "use_distributed_optimizer": True},
        "use_distributed_optimizer",
        "true with comm: {tail: bounded}: it sums gradients by reduce_scatter, which is exact",
    ),
    "bounded-on-gpus": (
        {**BOUNDED, "device": "cuda"},
        "device",
        "cuda with comm: {tail: bounded}: only sums of host memory are bounded",
    ),
    "precision": ({"bf16": True, "fp16": True}, "fp16", "excludes bf16"),
    "no-length": ({"train_iters": None}, "train_iters", "found neither"),
    "two-lengths": ({"train_samples": 4}, "train_samples", "found both"),
    "positions": ({"max_position_embeddings": 16}, "max_position_embeddings", "less than"),
    "ep": ({"expert_model_parallel_size": 2}, "expert_model_parallel_size", "num_moe_experts"),
    "experts": (
        {"expert_model_parallel_size": 2, "num_moe_experts": 3},
        "num_moe_experts",
        "3 is not divisible",
    ),
    "top-1": ({"num_moe_experts": 4, "moe_router_topk": 1}, "moe_router_topk", "pre_softmax"),
    "moe-pattern": (
        {"num_moe_experts": 4, "moe_layer_freq": "[0]+[1]*6"},
        "moe_layer_freq",
        "7 items, but num_layers is 8",
    ),
    "moe-never": ({"moe_layer_freq": 0}, "moe_layer_freq", "0: expected 1 for every layer"),
    "split": ({"split": "50;50"}, "split", "such as 969,30,1, found '50;50'"),
    "split-of-four": ({"split": "1,1,1,1"}, "split", "up to three numbers"),
    "split-of-nothing": ({"split": "0,0,0"}, "split", "up to three numbers"),
    "warmup": ({"lr_warmup_iters": 10}, "lr_warmup_iters", "leaves nothing of the 10"),
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
    "grouped-bias": (
        {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": True},
        "moe_grouped_gemm",
        "have no biases",
    ),
    "grouped-dense": ({"moe_grouped_gemm": True}, "moe_grouped_gemm", "needs num_moe_experts"),
    "profile": (
        {"profile": True, "profile_step_start": 5, "profile_step_end": 5},
        "profile_step_end",
        "5 is not after profile_step_start 5",
    ),
    "gather": ({"overlap_param_gather": True}, "overlap_param_gather", "use_distributed_opt"),
    "no-data": ({"mock_data": None}, "data_path", "mock_data: true"),
    "blend-two-weights": (
        {"mock_data": None, "data_path": ["1", "2", "a"]},
        "data_path",
        "two weights in a row before '2'",
    ),
    "blend-some-weights": (
        {"mock_data": None, "data_path": ["0.3", "a", "b"]},
        "data_path",
        "b has no",
    ),
    "blend-at-end": (
        {"mock_data": None, "train_data_path": ["b"], "valid_data_path": ["a", "0.5"]},
        "valid_data_path",
        "0.5 at the end",
    ),
    "blend-negative": (
        {"mock_data": None, "data_path": ["-0.5", "a", "1", "b"]},
        "data_path",
        "-0.5 is not a pos",
    ),
    "blend-zero": (
        {"mock_data": None, "train_data_path": ["0", "a"]},
        "train_data_path",
        "weight 0 is not",
    ),
    **{
        f"phases-{name}": (
            {"mock_data": None, "data_path": ["a"], "data_phases": phases, **more},
            key,
            told,
        )
        for name, (phases, more, key, told) in {
            "none": (["100 a"], {}, "data_phases", "expected {samples: 100000"),
            "back": (["samples=9 a", "tokens=9 a"], {}, "data_phases", "found [9, 1] samples"),
            "weights": (["samples=9 0.3 a b"], {}, "data_phases", "b has no weight"),
            "bare": (["samples=9 a b"], {}, "data_phases", "such as a: expected a weight for each"),
            "shuffled": (
                ["samples=9 a"],
                {"dataloader_type": "cyclic"},
                "dataloader_type",
                "cyclic shuffles all samples",
            ),
            "alone": (
                ["samples=9 a"],
                {"mock_data": True, "data_path": None},
                "data_phases",
                "needs data_path or train_data_path",
            ),
            "talks": (
                ["samples=9 a.jsonl"],
                {"sft": True, "data_path": ["a.jsonl"]},
                "data_phases",
                "is for text",
            ),
        }.items()
    },
    **{
        f"external-{name}": (
            {"mock_data": None, "dataloader_type": "external", "external_data": "a.b:f", **values},
            key,
            told,
        )
        for name, (values, key, told) in {
            "nothing": ({"external_data": None}, "external_data", "is required by"),
            "form": ({"external_data": "a b:f"}, "external_data", "found 'a b:f'"),
            "no-function": ({"external_data": "a.py"}, "external_data", "file.py:function, found"),
            "data-too": ({"data_path": ["a"]}, "data_path", "the data is external_data's"),
            "mock-too": ({"mock_data": True}, "mock_data", "the data is external_data's"),
            "phases": (
                {"data_phases": ["samples=9 1 a"]},
                "data_phases",
                "needs data_path",
            ),
        }.items()
    },
    "blend-empty": ({"mock_data": None, "data_path": []}, "data_path", "is empty"),
    "mock-and-data": ({"data_path": ["a"]}, "mock_data", "makes data up, but data_path is set"),
    "two-choices": (
        {"mock_data": None, "data_path": ["a"], "train_data_path": ["b"]},
        "train_data_path",
        "excludes data_path",
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
def test_problem(values: dict[str, Any], name: str, message: str) -> None:
    found = check_arguments(_experiment(values))
    assert [p.key.rpartition(".")[2] for p in found if message in p.message] == [
        name if name in values else found[0].key.rpartition(".")[2]
    ]
    assert len(found) == 1


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "te": ({"transformer_impl": "transformer_engine"}, "'auto' is taken in place of"),
    "torch": ({"dist_ckpt_format": "torch"}, "dist_ckpt_format: 'torch_dist' is taken"),
    "sp": ({"sequence_parallel": True}, "sequence_parallel: false is taken in place of true"),
    "frozen-biases": (
        {"moe_router_bias_update_rate": 0.1, "num_experts": 4, "peft_type": "lora"}
        | {"lora_target_modules": ["linear_proj"], **SIGMOID},
        "moe_router_bias_update_rate: 0.0 is taken in place of 0.1: a model does not change",
    ),
    "sp-meshes": (
        {
            "sequence_parallel": True,
            "enable_hetero": True,
            "hetero_process_meshes": [1] * 10,
            "hetero_device_types": ["a", "b"],
        },
        "sequence_parallel: false is taken in place of true",
    ),
}


@pytest.mark.parametrize(
    "envs",
    [
        Environments(common={"FSCCL_TAIL": "bounded"}),
        Environments(by_host={"node1": {"FSCCL_TAIL": "bounded"}}),
    ],
    ids=["all hosts", "one"],
)
def test_bounded_sums_by_a_variable_are_refused_as_well(envs: Environments) -> None:
    experiment = replace(_experiment({"use_distributed_optimizer": True}), envs=envs)
    (problem,) = check_arguments(experiment)
    assert problem.key == "train.model.inner.use_distributed_optimizer"
    assert "true with FSCCL_TAIL=bounded of experiment.envs" in problem.message


@pytest.mark.parametrize(("values", "note"), FALLBACKS.values(), ids=FALLBACKS)
def test_what_is_replaced_is_noted_or_refused(values: dict[str, Any], note: str) -> None:
    experiment = _experiment(values)
    assert not check_arguments(experiment)
    (found,) = notes(experiment, 1)
    assert note in found
    (problem,) = check_arguments(_experiment({**values, "allow_fallbacks": False}))
    assert problem.key.endswith(next(iter(values)))
    assert "allow_fallbacks: true takes" in problem.message


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (
        {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.1},
        "no effect of moe_router_topk, moe_aux_loss_coeff: needs num_moe_experts",
    ),
    "loss-scale": (
        {"bf16": True, "initial_loss_scale": 1024, "min_loss_scale": 1.0},
        "no effect of initial_loss_scale, min_loss_scale: needs fp16",
    ),
    "other-optimizer": ({"sgd_momentum": 0.8}, "no effect of sgd_momentum: needs optimizer: sgd"),
    "adapters-of-mixtures": (
        {"peft_type": "lora", "num_experts": 4, "lora_target_modules": ["all-linear"]},
        "lora_target_modules: ['all-linear'] trains linear_qkv, linear_proj: of a mixture",
    ),
    "adapters-of-named-layers": (
        {"peft_type": "lora", "num_experts": 4, "lora_target_modules": ["linear_proj"]},
        "",
    ),
    "latent-documents": (
        {**LATENT, "reset_position_ids": True, "reset_attention_mask": True},
        "no effect of reset_position_ids: documents are apart",
    ),
    "alias": ({"dataloader_fast_cache_load": True}, "no effect of dataloader_fast_cache_load: the"),
    "default": ({"data_parallel_sharding_strategy": "optim"}, "shards the optimizer only"),
    "on-by-default": ({"no_gradient_reduce_div_fusion": True}, "no_gradient_reduce_div_fusion: it"),
    "foreign": ({"log_straggler": True}, "no effect of log_straggler: this figure, trace or"),
    "off": ({"moe_per_layer_logging": False, "fsdp_double_buffer": False, "auto_tune": False}, ""),
    "satisfied": ({"fp16": True, "initial_loss_scale": 1024}, ""),
}


@pytest.mark.parametrize(("values", "note"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_what_has_no_effect_is_noted(values: dict[str, Any], note: str) -> None:
    experiment = _experiment(values)
    assert not check_arguments(experiment)
    found = "; ".join(notes(experiment, 1))
    assert note in found and bool(note) == bool(found)


def test_a_foreign_program_judges_for_itself() -> None:
    experiment = _experiment({"transformer_impl": "transformer_engine"}, external=True)
    (note,) = notes(experiment, 1)
    assert "its own parser judges the arguments" in note


WORLDS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "one": ({}, 1, None),
    "dp": ({"global_batch_size": 8}, 8, None),
    "tp-pp": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8, None),
    "tp-pp-no": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        6,
        "tensor 2 x pipeline 2 = 4 ranks do not divide the 6 of the job",
    ),
    "too-few": ({"tensor_model_parallel_size": 2}, 1, "do not divide the 1 of"),
    "batch": ({"global_batch_size": 6, "micro_batch_size": 2}, 2, "6 is not divisible by micro"),
    "vpp-micro": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "global_batch_size": 3,
        },
        2,
        "gives 3 micro-batches",
    ),
    "ep": (
        {"num_moe_experts": 4, "expert_model_parallel_size": 4},
        2,
        "does not divide 2 ranks",
    ),
}


@pytest.mark.parametrize(("values", "world", "message"), WORLDS.values(), ids=WORLDS)
def test_world(values: dict[str, Any], world: int, message: str | None) -> None:
    found = check_world(_experiment(values), world)
    assert len(found) == (message is not None)
    assert all((message or "") in p.message for p in found)


def test_a_foreign_program_checks_its_own_model() -> None:
    experiment = _experiment({"num_layers": None, "context_parallel_size": 2}, external=True)
    assert check_arguments(experiment) == []
    assert "context 2" in check_world(experiment, 3)[0].message
    assert "its own parser" in notes(experiment, 2)[0]


@pytest.mark.parametrize(
    ("values", "world", "note"),
    [
        (
            {"train_samples": 800, "global_batch_size": 4},
            1,
            "200 steps: train_samples 800 / global",
        ),
        ({"train_samples": 801, "global_batch_size": 4}, 1, "not whole: the last 1 samples"),
        ({"train_samples": 64, "micro_batch_size": 2}, 4, "8 steps"),
        ({"train_iters": 3}, 1, None),
        ({"data_path": ["a"], "split": "1,0,0"}, 1, "no evaluation: split 1,0,0"),
        ({"data_path": ["a"], "split": "1,0,0", "eval_iters": 0}, 1, None),
        ({"data_path": ["a"], "split": "9,1"}, 1, None),
    ],
)
def test_notes(values: dict[str, Any], world: int, note: str | None) -> None:
    found = notes(_experiment(values), world)
    assert [note in text for text in found if note] == [True] * bool(note)
    assert bool(found) == bool(note)


def test_problems_name_the_place() -> None:
    experiment = _experiment({"context_parallel_size": 2, "attention_backend": "local"})
    sources = {"train.model.inner.context_parallel_size": "a.yaml:3"}
    placed = Experiment(**{**vars(experiment), "sources": sources})
    assert str(check_arguments(placed)[0]).startswith(
        "a.yaml:3: train.model.inner.context_parallel_size: 2: "
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param({"load": "/a", "save": "/b"}, None, id="plain"),
        pytest.param({"load": "/a", "save": "/b", "finetune": True}, "finetune", id="finetune"),
        pytest.param({"load": "/a", "save": "/a", "finetune": True}, "finetune", id="finetune-own"),
        pytest.param({"finetune": True}, "finetune", id="finetune-nothing"),
        pytest.param(
            {"load": "/a", "save": "/a", "exit_on_missing_checkpoint": True},
            "exit_on_missing_checkpoint",
            id="exit-on-missing",
        ),
        pytest.param({"load": "/a", "no_load_optim": True}, None, id="others-optimizer"),
        pytest.param({"load": "/a", "no_load_rng": True}, None, id="others-generators"),
        pytest.param({"load": "/a", "save": "/a", "no_load_optim": True}, None, id="own-optimizer"),
        pytest.param({"no_load_rng": True}, None, id="no-load"),
    ],
)
def test_what_asks_for_a_checkpoint(given: dict[str, Any], name: str | None) -> None:
    values = Arguments.of(_experiment({})).values()
    assert needs_checkpoint({**values, **given}) == name
