"""What the field's experiments ask for, as tables: keys and values alone, by the experiment.

A YAML of FlagScale says for a model of some billions of weights how it is trained on hosts of eight
devices. What nearly all say is ``BASE`` (or ``PLAIN``); an entry says what it says otherwise, and
``None`` that it does not say it. Paths, which people fill in, are of a workspace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Values = dict[str, Any]

BASE: Values = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "disable_bias_linear": True,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "bf16": True,
    "attention_softmax_in_fp32": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "log_interval": 1,
    "tensorboard_log_interval": 1,
    "log_throughput": True,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "wandb_project": "${experiment.exp_name}",
    "wandb_exp_name": "${experiment.exp_name}",
    "transformer_impl": "transformer_engine",
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "norm_epsilon": "1e-6",
    "normalization": "RMSNorm",
    "swiglu": True,
    "use_rotary_position_embeddings": True,
    "no_position_embedding": True,
    "rotary_base": 1000000,
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.02,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "clip_grad": 1.0,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "seed": 42,
    "micro_batch_size": 1,
    "global_batch_size": 128,
    "train_iters": 1000,
    "eval_iters": 0,
    "lr": 0.001,
    "min_lr": 0.0001,
    "lr_decay_style": "cosine",
    "data_path": "data/text",
    "split": 1,
    "tokenizer_type": "QwenTokenizerFS",
    "tokenizer_path": "data/tokenizer",
    "vocab_size": 151851,
    "make_vocab_size_divisible_by": 64,
}
PLAIN: Values = {
    **BASE,
    "use_flash_attn": True,
    "use_mcore_models": True,
    "no_masked_softmax_fusion": True,
    "ckpt_format": "torch",
    "save_interval": 200,
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "context_parallel_size")),
}
_WSD: Values = {
    "lr_decay_style": "WSD",
    "lr_wsd_decay_style": "cosine",
    "lr_wsd_decay_iters": 10,
    "lr_warmup_fraction": 0.01,
}
_RECORDS: Values = {
    "log_timers_to_tensorboard": True,
    "log_validation_ppl_to_tensorboard": True,
    "log_memory_to_tensorboard": True,
    "save_interval": "${experiment.save_steps}",
    "load": "${experiment.load}",
    "ckpt_format": "${experiment.ckpt_format}",
    "no_shared_fs": "${experiment.runner.no_shared_fs}",
    "no_mmap_bin_files": True,
    "num_workers": 2,
    "finetune": False,
    "no_rope_fusion": True,
}
_AQUILA: Values = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "multiple_of": 256,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "bf16": None,
    "fp16": True,
    "initial_loss_scale": 522893,
    "min_loss_scale": 1.0,
    "train_iters": None,
    "train_samples": 1728000,
    "global_batch_size": 1728,
    "lr_warmup_samples": 30000,
    "rampup_save_interval": 5000,
    "rampup_batch_size": [32, 32, 60000],
    "tokenizer_type": "AquilaTokenizerFS",
    "tokenizer_path": None,
    "vocab_file": "data/vocab.json",
    "merge_file": "data/merges.txt",
    "special_tokens_file": "data/special.txt",
    "vocab_size": 100008,
}
_LLAMA: Values = {
    **PLAIN,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "eval_iters": 10,
    "eval_interval": 100,
}
_QWEN: Values = {
    **BASE,
    **_WSD,
    **_RECORDS,
    "tensor_model_parallel_size": 8,
    "expert_model_parallel_size": 1,
    "num_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "group_query_attention": True,
    "ffn_hidden_size": 25600,
}
_LATENT: Values = {
    **BASE,
    **_WSD,
    **_RECORDS,
    "pipeline_model_parallel_size": 2,
    "decoder_first_pipeline_num_layers": 13,
    "expert_model_parallel_size": 4,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "num_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 16,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "ffn_hidden_size": 11264,
    "moe_ffn_hidden_size": 1408,
    "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 2816,
    "num_experts": 64,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
    "moe_aux_loss_coeff": 0.02,
    "moe_layer_freq": "[0]+[1]*26",
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk": 6,
    "moe_router_topk_scaling_factor": 2.446,
    "moe_token_dispatcher_type": "alltoall",
}
_MTP: Values = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
_HETERO: Values = {
    "enable_hetero": True,
    "use_partial_reduce_for_shared_embedding": True,
    "standalone_embedding_stage": False,
    "hetero_current_device_type": "A800",
}
_IMAGES: Values = {
    **PLAIN,
    "num_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "ffn_hidden_size": 18944,
    "group_query_attention": True,
    "num_query_groups": 4,
    "dataloader_save": "dataloader",
    "use_dist_ckpt": False,
    "use_te": True,
    "allow_missing_vision_projection_checkpoint": True,
    "freeze_LM": True,
    "freeze_ViT": True,
    "disable_vision_class_token": True,
    "dataloader_type": "external",
    "split": "100,0,0",
}
_ONE_IMAGE: Values = {
    **_IMAGES,
    "patch_dim": 14,
    "img_h": 336,
    "img_w": 336,
    "language_model_type": "vicuna_7b",
    "prompt_path": "data/prompts.json",
    "valid_path": "data/valid.yaml",
}


class Case(NamedTuple):
    """An experiment, what becomes of it, and the ranks that it is planned for."""

    train: Values
    ranks: int = 8
    program: str = "flagscale/train/train_gpt.py"
    runner: Values | None = None
    """Beside the number of hosts."""
    backend: str = "megatron"
    tuned: Values | None = None
    """The section ``auto_tuner``."""
    refused: tuple[str, ...] = ()
    """A part of each refusal; none where it dry-runs."""


_SPACE: Values = {"space": {"tensor_model_parallel_size": [1, 2, 4, 8]}, "control": {"max_time": 9}}
_TWICE = ("'weight_decay' is given twice",)

_AQUILA_8B: Values = {
    **PLAIN,
    **_AQUILA,
    **dict.fromkeys(("rampup_save_interval", "rampup_batch_size")),
}
_AQUILA_MESHES: Values = {
    **BASE,
    **_HETERO,
    "hetero_use_cpu_communication": False,
    "distributed_backend": "flagcx",
    "add_qkv_bias": True,
    "pipeline_model_parallel_size": 2,
    "hetero_pipeline_layer_split": [12, 12],
    "hetero_process_meshes": [1, 1, 1, 2, 1, 1, 1, 1, 2, 1],
    "hetero_device_types": ["A800", "mlu590"],
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "norm_init_weight": 0.8441,
    "multiple_of": 128,
    "lr_wsd_decay_style": "cosine",
}
_STAGES: Values = {
    f"recompute_{what}_per_stage_micro_batch": [[1, 30, 0, 2, 0]] * 3
    for what in ("granularity", "method", "num_layers")
}
EXPERIMENTS: dict[str, Case] = {
    "aquila": Case(_AQUILA_8B),
    "aquila-70b": Case({**PLAIN, **_AQUILA, "num_layers": 80, "hidden_size": 8192}, ranks=32),
    "aquila-tuner": Case(_AQUILA_8B, tuned=_SPACE),
    "aquila-tuner-of-meshes": Case(_AQUILA_MESHES, ranks=4, tuned=_SPACE),
    "aquila-cloud": Case(
        _AQUILA_8B,
        runner={"type": "cloud", "rdzv_id": "demo", "node_rank": 0, "master_port": 12345},
        refused=("cloud: this version launches with", "the launcher numbers the hosts"),
    ),
    "aquila-meshes": Case(
        {
            **PLAIN,
            **_HETERO,
            **_STAGES,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 3,
            "hetero_pipeline_layer_split": [6, 2, 4],
            "hetero_process_meshes": [2, 1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 1, 1, 1, 1],
            "hetero_device_types": ["A800", "A800", "A800"],
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "num_layers": 12,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "optimizer": {"weight_decay": 0.01},
        },
        refused=_TWICE,
    ),
    "deepseek": Case({**_LATENT, **_MTP}),
    "deepseek-tuner": Case({**_LATENT, **_MTP}, tuned=_SPACE),
    "deepseek-adapters": Case(
        {
            **_LATENT,
            **_MTP,
            "finetune": True,
            "pretrained_checkpoint": "/models/deepseek",
            "peft_type": "lora",
            "lora_dim": 32,
            "lora_alpha": 64,
            "lora_dropout": 0.1,
            "lora_dropout_position": "post",
            "lora_in_init_method": "xavier",
            "lora_out_init_method": "zero",
        },
    ),
    "deepseek-light": Case(
        {
            **_LATENT,
            "pipeline_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": None,
            "expert_model_parallel_size": 2,
            "num_layers": 16,
            "moe_layer_freq": "[0]+[1]*15",
            "use_dualpipev": True,
            "moe_fb_overlap": True,
            "moe_shared_expert_overlap": False,
        },
    ),
    "deepseek-meshes": Case(
        {
            **_LATENT,
            **_MTP,
            **_HETERO,
            "decoder_first_pipeline_num_layers": None,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 3,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "add_qkv_bias": True,
            "q_lora_rank": 1536,
            "num_layers": 24,
            "moe_layer_freq": "[0]+[1]*23",
            "hetero_pipeline_layer_split": [11, 6, 7],
            "hetero_process_meshes": [1, 1, 2, 4, 1, 1, 1, 2, 2, 1, 1, 1, 2, 2, 1],
            "expert_tensor_parallel_size_per_process_mesh": [1, 1, 1],
            "hetero_device_types": ["A800", "A800", "A800"],
            "no_create_attention_mask_in_dataloader": True,
        },
        ranks=8,
    ),
    "llama2": Case({**_LLAMA, "optimizer": {"weight_decay": 0.01}}, refused=_TWICE),
    "llama3": Case({**_LLAMA, "tensor_model_parallel_size": 4}),
    "llama3-meshes": Case(
        {
            **_LLAMA,
            **_HETERO,
            "hetero_use_cpu_communication": True,
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "hetero_pipeline_layer_split": [18, 14],
            "hetero_process_meshes": [2, 1, 1, 4, 1, 4, 1, 1, 2, 1],
            "hetero_device_types": ["A800", "A100"],
        },
        ranks=16,
        program="flagscale/train/hetero/train_gpt.py",
    ),
    "mixtral": Case(
        {
            **_LLAMA,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 4,
            "expert_model_parallel_size": 4,
            "num_experts": 8,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.02,
        },
        ranks=32,
    ),
    "qwen2.5": Case(
        {
            **BASE,
            "distributed-timeout-minutes": 60,
            "rampup_save_interval": 50000,
            "num_layers": 28,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_query_groups": 2,
            "ffn_hidden_size": 8960,
            "add_qkv_bias": True,
            "norm_init_weight": 0.02,
            "untie_embeddings_and_output_weights": False,
            "weight_decay": 0.0,
            "finetune": True,
            "apply_sft_dataset_separated_loss_mask_if_existed": True,
            "tokenizer_type": "HFTokenizerFS",
        },
    ),
    "qwen2.5-conversion": Case(
        {
            **BASE,
            "num_layers": 28,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "ckpt_convert_format": "torch",
            "ckpt_convert_save": "converted",
        },
        refused=(
            "ckpt_convert_format: cannot be given: it would convert the checkpoint of `load` and "
            "end without training, which `flagscale convert` does",
            "ckpt_convert_save: cannot be given",
        ),
    ),
    "qwen3": Case({**_QWEN, "kv_channels": 128, "qk_layernorm": True}),
    "qwen3-tuner": Case({**_QWEN, "qk_layernorm": True}, tuned=_SPACE),
    "qwq": Case({**_QWEN, "num_attention_heads": 40, "ffn_hidden_size": 27648}),
    "llava1.5": Case(_ONE_IMAGE, program="checkout/flagscale/train/train_llava.py"),
    "llava-onevision": Case(
        {**_IMAGES, "image_aspect_ratio": "anyres_max_9", "mm_patch_merge_type": "spatial_unpad"},
        program="checkout/flagscale/train/train_llava_onevision.py",
    ),
    "qwen2.5-vl": Case(
        {
            **_IMAGES,
            "position_embedding_type": "mrope",
            "mrope_section": [16, 24, 24],
            "max_padding_length": 2048,
            "enable_variable_seq_lengths": True,
            "vision_root": "data",
            "extra_vocab_size": 421,
        },
        program="checkout/flagscale/train/train_qwen2_5_vl.py",
    ),
    "rwkv": Case(
        {"num_layers": 32, "hidden_size": 2560, "seq_length": 4096, "train_iters": 2000},
        program="checkout/flagscale/train/train_rwkv.py",
    ),
    "pi0": Case(
        {"batch_size": 2, "train_steps": 100, "action_horizon": 14, "action_key": "eepose"},
        program="flagscale/train/train_pi0.py",
        backend="pi0",
        refused=("'pi0' cannot be given: it is FlagScale's trainer", "no file"),
    ),
    "robotics": Case(
        {"batch_size": 4, "training_dtype": "float32", "config_name": "single"},
        program="flagscale/train/train_robotics.py",
        backend="robotics",
        refused=("'robotics' cannot be given: it is FlagScale's trainer", "no file"),
    ),
}
"""By what they train."""
