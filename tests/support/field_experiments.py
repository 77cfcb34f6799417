"""Settings of published FlagScale experiments, as keys and values, for tests that plan them.

Each experiment is a YAML that trains a model of some billions of parameters on hosts with eight
devices. ``BASE`` (or ``PLAIN``) contains the settings that nearly all of them share. An entry lists
its differences; ``None`` means that the key is absent. Paths, which users fill in, are relative to
a workspace.
"""

from __future__ import annotations

from typing import NamedTuple

from support.field_sections import (
    AQUILA,
    BASE,
    HETERO,
    IMAGES,
    LATENT,
    LLAMA,
    MTP,
    ONE_IMAGE,
    PLAIN,
    QWEN,
    Values,
)


class ExperimentCase(NamedTuple):
    """An experiment, its expected outcome, and the number of ranks that it is planned for."""

    train: Values
    ranks: int = 8
    program: str = "flagscale/train/train_gpt.py"
    runner: Values | None = None
    """Keys of the runner section in addition to the number of hosts."""
    backend: str = "megatron"
    auto_tuner: Values | None = None
    """The section ``auto_tuner``."""
    expected_errors: tuple[str, ...] = ()
    """Part of each expected error message; empty if the dry run succeeds."""


_TUNER_SPACE: Values = {
    "space": {"tensor_model_parallel_size": [1, 2, 4, 8]},
    "control": {"max_time": 9},
}

_AQUILA_8B: Values = {
    **PLAIN,
    **AQUILA,
    **dict.fromkeys(("rampup_save_interval", "rampup_batch_size")),
}
_AQUILA_MESHES: Values = {
    **BASE,
    **HETERO,
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
_RECOMPUTE_BY_STAGE: Values = {
    f"recompute_{option}_per_stage_micro_batch": [[1, 30, 0, 2, 0]] * 3
    for option in ("granularity", "method", "num_layers")
}
EXPERIMENTS: dict[str, ExperimentCase] = {
    "aquila": ExperimentCase(_AQUILA_8B),
    "aquila-70b": ExperimentCase(
        {**PLAIN, **AQUILA, "num_layers": 80, "hidden_size": 8192}, ranks=32
    ),
    "aquila-tuner": ExperimentCase(_AQUILA_8B, auto_tuner=_TUNER_SPACE),
    "aquila-tuner-of-meshes": ExperimentCase(_AQUILA_MESHES, ranks=4, auto_tuner=_TUNER_SPACE),
    "aquila-cloud": ExperimentCase(
        _AQUILA_8B,
        runner={"type": "cloud", "rdzv_id": "demo", "node_rank": 0, "master_port": 12345},
        program="./flagscale/train/megatron/train_gpt.py",
    ),
    "aquila-meshes": ExperimentCase(
        {
            **PLAIN,
            **HETERO,
            **_RECOMPUTE_BY_STAGE,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 3,
            "hetero_pipeline_layer_split": [6, 2, 4],
            "hetero_process_meshes": [2, 1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 1, 1, 1, 1],
            "hetero_device_types": ["A800", "A800", "A800"],
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "global_batch_size": 32,
            "num_layers": 12,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "optimizer": {"weight_decay": 0.01},
        },
    ),
    "deepseek": ExperimentCase({**LATENT, **MTP}),
    "deepseek-tuner": ExperimentCase({**LATENT, **MTP}, auto_tuner=_TUNER_SPACE),
    "deepseek-adapters": ExperimentCase(
        {
            **LATENT,
            **MTP,
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
    "deepseek-light": ExperimentCase(
        {
            **LATENT,
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
    "deepseek-meshes": ExperimentCase(
        {
            **LATENT,
            **MTP,
            **HETERO,
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
    "llama2": ExperimentCase({**LLAMA, "optimizer": {"weight_decay": 0.01}}),
    "llama3": ExperimentCase({**LLAMA, "tensor_model_parallel_size": 4}),
    "llama3-meshes": ExperimentCase(
        {
            **LLAMA,
            **HETERO,
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
    "mixtral": ExperimentCase(
        {
            **LLAMA,
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
    "qwen2.5": ExperimentCase(
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
    "qwen2.5-conversion": ExperimentCase(
        {
            **BASE,
            "num_layers": 28,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "ckpt_convert_format": "torch",
            "ckpt_convert_save": "converted",
        },
        expected_errors=(
            "ckpt_convert_format: is not supported: it converts the checkpoint of `load` and exits "
            "without training",
        ),
    ),
    "qwen3": ExperimentCase({**QWEN, "kv_channels": 128, "qk_layernorm": True}),
    "qwen3-tuner": ExperimentCase({**QWEN, "qk_layernorm": True}, auto_tuner=_TUNER_SPACE),
    "qwq": ExperimentCase({**QWEN, "num_attention_heads": 40, "ffn_hidden_size": 27648}),
    "qwen3-flagos": ExperimentCase(
        {
            **QWEN,
            "te_fl_prefer": "flagos",
            "te_fl_per_op": "rmsnorm_fwd=vendor:acme|flagos",
            "te_fl_allow_vendors": "one",
            "te_fl_deny_vendors": "two",
            "mg_fl_prefer": "cuda",
            "enable_flag_gems": True,
            "flag_gems_log_path": "gems.log",
            "flag_gems_unused": ["mm"],
            "distributed_backend": "flagcx",
        },
        program="flagscale/train/megatron/train_gpt.py",
    ),
    "qwen3-observed": ExperimentCase(
        {
            **QWEN,
            "enable_straggler_detection": True,
            "straggler_profiling_interval": 5,
            "straggler_threshold": 1.8,
            "straggler_log_dir": "logs/straggler",
            "enable_perf_monitor": True,
            "perf_log_interval": 10,
            "perf_breakdown": True,
        },
        program="./flagscale/train/megatron/train_gpt.py",
        runner={
            "enable_gpu_health_check": True,
            "nsys_bin_path": "/opt/nsys",
            "perf_log_format": "json",
            "heartbeat": {
                "enabled": True,
                "progress_timeout_s": 300,
                "hardware_health": {"enabled": True, "interval_s": 60},
            },
            "tracing": {"enabled": True, "collective_timeout_s": 60, "inspector": {}},
        },
    ),
    "deepseek-overlap": ExperimentCase(
        {
            **LATENT,
            **MTP,
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
            "persist_layer_norm": True,
        },
        program="flagscale/train/megatron/train_gpt.py",
    ),
    "qwen3-muon": ExperimentCase(
        {**QWEN, "optimizer": "muon", "muon_matched_adamw_rms": 0.2, "muon_ns_steps": 5},
        program="flagscale/train/megatron/train_gpt.py",
    ),
    "qwen3-padded": ExperimentCase(
        {**QWEN, "padded_vocab_size": 151936},
        program="flagscale/train/megatron/train_gpt.py",
        expected_errors=(
            "padded_vocab_size: is not supported: write `vocab_size` with this value and "
            "`make_vocab_size_divisible_by: 1`",
        ),
    ),
    "engram": ExperimentCase(
        {**LATENT, "use_engram": True, "engram_layer_ids": [1, 8], "max_ngram_size": 3},
        program="flagscale/train/megatron/train_engram.py",
        expected_errors=("FlagScale's program for models with Engram's n-gram memory",),
    ),
    "engram-in-gpt": ExperimentCase(
        {**LATENT, "use_engram": True},
        program="flagscale/train/megatron/train_gpt.py",
        expected_errors=("use_engram: is not supported: layers with a memory of n-grams",),
    ),
    "deepseek-v4": ExperimentCase(
        {"o_groups": 8, "num_layers": 43, "hc_mult": 4},
        program="./flagscale/train/megatron/train_deepseek_v4.py",
        expected_errors=("FlagScale's program for DeepSeek-V4, which this project does not",),
    ),
    "llava1.5": ExperimentCase(ONE_IMAGE, program="checkout/flagscale/train/train_llava.py"),
    "llava-onevision": ExperimentCase(
        {**IMAGES, "image_aspect_ratio": "anyres_max_9", "mm_patch_merge_type": "spatial_unpad"},
        program="checkout/flagscale/train/train_llava_onevision.py",
    ),
    "qwen2.5-vl": ExperimentCase(
        {
            **IMAGES,
            "position_embedding_type": "mrope",
            "mrope_section": [16, 24, 24],
            "max_padding_length": 2048,
            "enable_variable_seq_lengths": True,
            "vision_root": "data",
            "extra_vocab_size": 421,
        },
        program="checkout/flagscale/train/train_qwen2_5_vl.py",
    ),
    "rwkv": ExperimentCase(
        {"num_layers": 32, "hidden_size": 2560, "seq_length": 4096, "train_iters": 2000},
        program="checkout/flagscale/train/train_rwkv.py",
    ),
    "pi0": ExperimentCase(
        {"batch_size": 2, "train_steps": 100, "action_horizon": 14, "action_key": "eepose"},
        program="flagscale/train/train_pi0.py",
        backend="pi0",
        expected_errors=("'pi0' is not supported: FlagScale's robotics trainer", "no file"),
    ),
    "robotics": ExperimentCase(
        {"batch_size": 4, "training_dtype": "float32", "config_name": "single"},
        program="flagscale/train/train_robotics.py",
        backend="robotics",
        expected_errors=("'robotics' is not supported: FlagScale's robotics trainer", "no file"),
    ),
    "robots-native": ExperimentCase(
        {"optimizer": {"name": "AdamW"}, "lr_scheduler": {"name": "cosine"}, "batch_size": 2},
        program="flagscale/train/train_pi.py",
        backend="native",
        expected_errors=(
            "'native' is not supported: FlagScale's native trainer",
            "FlagScale's program for models of robots (pi0)",
        ),
    ),
}
"""Experiments by model and variant."""
