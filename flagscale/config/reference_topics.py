"""Pages and sections of the configuration reference, and the arguments that each section lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flagscale.config.arguments.spec.argument import Argument


class Topic(NamedTuple):
    """One section of a page: the arguments of some groups, or with matching names.

    ``name_pattern`` is a regular expression for the whole name of an argument; ``groups`` are names
    of the classes that declare arguments. An argument belongs to the first topic that has its group
    or matches its name.
    """

    page: str
    title: str
    name_pattern: str = ""
    groups: tuple[str, ...] = ()


PAGES: Mapping[str, tuple[str, str]] = {
    "experiment": (
        "Experiment and runner",
        "What is run, where its files are, how ranks are started, watched and stopped.",
    ),
    "hosts": (
        "Hosts and environment",
        "Environment variables, and settings that differ between hosts or device types.",
    ),
    "slurm": ("Slurm and containers", "Options of a Slurm job, and the container of its ranks."),
    "model": ("Model", "Architecture: layers, attention, positions, mixtures of experts."),
    "optimizer": (
        "Optimizer and schedule",
        "Training length, batch size, learning rate, weight decay and the optimizer.",
    ),
    "data": ("Data and tokenizer", "Data sets, blends, validation and the tokenizer."),
    "parallelism": (
        "Parallelism and heterogeneous meshes",
        "Parallel sizes, pipeline schedule, overlap of communication, its backend, and training on "
        "heterogeneous devices.",
    ),
    "precision": (
        "Precision and recomputation",
        "Number formats, fused kernels, CUDA graphs, recomputation and offloading.",
    ),
    "checkpoints": ("Checkpoints", "Saving, resuming, starting from other weights, exporting."),
    "logging": (
        "Logging and profiling",
        "Progress lines, metrics sinks (TensorBoard, Weights & Biases, MLflow, …), profiles and "
        "housekeeping.",
    ),
    "fine-tuning": (
        "Fine-tuning",
        "Low-rank adapters, frozen parameters, training on conversations, answers to prompts.",
    ),
    "other-names": (
        "Other names",
        "Aliases, names without effect, and names of Megatron-LM and FlagScale that are refused.",
    ),
}
"""Title and description of each page, by the name of its file."""

TOPICS: tuple[Topic, ...] = (
    Topic("checkpoints", "Saving and loading", groups=("Checkpointing",)),
    Topic("checkpoints", "Saving and loading", r"\w*dist_ckpt\w*|\w*checkpoint\w*sav\w*"),
    Topic("fine-tuning", "Low-rank adapters (LoRA)", groups=("Adapters",)),
    Topic("fine-tuning", "Frozen parameters", groups=("Freezing",)),
    Topic("fine-tuning", "Conversations", groups=("Conversations",)),
    Topic("fine-tuning", "Preferences", groups=("Preferences",)),
    Topic("fine-tuning", "Answers to prompts", groups=("Prompts",)),
    Topic("fine-tuning", "Evaluation on tasks", groups=("Tasks",)),
    Topic("parallelism", "Heterogeneous devices", groups=("Heterogeneous",)),
    Topic("parallelism", "Heterogeneous devices", r"hetero\w*|hetereogenous\w*"),
    Topic("logging", "Profiling", groups=("Profiling",)),
    Topic("logging", "Profiling", r"(barrier_with_L1_)?time\w*|timers|config_logger_dir|nvtx\w*"),
    Topic("logging", "Progress and metrics sinks", groups=("Logging",)),
    Topic("precision", "Recomputation", r"recompute_\w+|distribute_saved_activations"),
    Topic("precision", "Recomputation", r"moe_layer_recompute", ("Recomputation",)),
    Topic("precision", "Offloading", r"\w*offload\w*"),
    Topic("precision", "8-bit and 4-bit GEMMs", r"\w*fp8\w*|\w*fp4\w*|\w*_in_bf16|\w*amax\w*"),
    Topic("precision", "8-bit and 4-bit GEMMs", r"first_last_layers_bf16|\w*mxfp8\w*"),
    Topic("precision", "CUDA graphs", r"\w*cuda_graph\w*"),
    Topic(
        "precision",
        "Number formats",
        r"bf16|fp16|\w*_dtype|\w*_in_fp32|\w*loss_scale\w*|hysteresis|(?!muon)\w*fp32\w*|"
        r"use_precision_aware_optimizer|store_param_remainders|\w*bf16\w*",
    ),
    Topic(
        "precision",
        "Kernels",
        r"\w*_fusion(_impl)?|use_te_\w+|transformer_impl|use_kitchen\w*|kitchen_\w+|"
        r"persist_layer_norm|memory_efficient_layer_norm|deterministic_mode|batch_invariant_mode|"
        r"use_\w*inference\w*|\w*inference\w*|flash_decode|mlp_chunks_\w+|cache_mla_latents|"
        r"disable_parameter_transpose_cache|moe_use_legacy_grouped_gemm|allow_fallbacks",
    ),
    Topic(
        "parallelism",
        "Pipeline",
        r"\w*pipeline\w*|\w*virtual_stages\w*|\w*p2p\w*|microbatch_group\w*|variable_seq_lengths|"
        r"deallocate_pipeline_outputs|account_for_\w+|\w*embedding_wgrad\w*|wgrad_deferral_limit|"
        r"batch_p2p\w*|use_ring_exchange_p2p|standalone_embedding_stage|mtp_standalone",
    ),
    Topic(
        "parallelism",
        "Parallel sizes",
        r"\w*(tensor|context|expert)_\w*parallel_size\w*|sequence_parallel|\w*parallel_sizes|"
        r"\w*max_seqlen_per_dp_cp_rank|hybrid_context_parallel|cp_comm_type|"
        r"moe_extended_tp",
    ),
    Topic(
        "parallelism",
        "Gradient reduction and sharding",
        r"overlap_(grad|param)\w*|\w*distributed_optimizer\w*|bucket_size|average_in_collective|"
        r"\w*reduce_scatter\w*|check_for_\w*nan\w*|\w*fsdp\w*|\w*sharding\w*|pad_buckets\w*|"
        r"align_param_gather|gradient_reduce_div_fusion|suggested_communication_unit_size|"
        r"grad_reduce\w*|nccl_ub|disable_symmetric_registration|\w*delay_wgrad\w*|"
        r"delay_\w+|\w*overlap_moe\w*|ep_overlap\w*|keep_fp8\w*|preserve_fp32\w*",
        ("DistributedDataParallelConfig",),
    ),
    Topic(
        "parallelism",
        "Process groups and communication",
        r"tp_comm_\w+|async_tensor\w+|symmetric_ar_type|distributed_(backend|timeout)\w*|comm|"
        r"device|tp_only_amax_red",
    ),
    Topic("model", "Mixtures of experts", r"moe_\w+|num_moe_experts|\w*expert\w*"),
    Topic("model", "Multi-token prediction", r"mtp_\w+"),
    Topic(
        "model",
        "Multi-latent attention",
        r"multi_latent_attention",
        ("Latent", "MLATransformerConfig"),
    ),
    Topic("optimizer", "Training length and batch size", groups=("TrainingLength",)),
    Topic("optimizer", "Learning rate and weight decay", groups=("LearningRate",)),
    Topic(
        "optimizer",
        "Learning rate and weight decay",
        r"lr|min_lr|decoupled_\w+|\w*weight_decay\w*|lr_\w+|apply_wd\w*",
    ),
    Topic("optimizer", "Optimizer", groups=("OptimizerConfig",)),
    Topic("optimizer", "Muon", groups=("Muon",)),
    Topic("optimizer", "Lion", groups=("Lion",)),
    Topic("optimizer", "Optimizer", r"calculate_per_token_loss|clip_grad|\w*optimizer\w*"),
    Topic(
        "data",
        "Data sets",
        groups=(
            "Data",
            "External",
            "Masking",
            "BlendedMegatronDatasetConfig",
            "GPTDatasetConfig",
        ),
    ),
    Topic("data", "Tokenizer", groups=("Tokenizer",)),
    Topic("logging", "Process and exit", groups=("Runtime",)),
    Topic(
        "model",
        "Attention and positions",
        r"\w*attention\w*|\w*rope\w*|\w*rotary\w*|softmax\w*|window\w*|\w*attn\w*|qk_\w+|"
        r"num_query_groups|kv_channels|\w*softcapping|position_embedding\w*|"
        r"max_position_embeddings|masked_softmax\w*|log_max_attention_logit|linear_\w+|dsa_\w+",
    ),
    Topic("model", "Other layers", r"mamba\w*|use_mamba\w*|is_hybrid\w*|experimental\w*|mrope\w*"),
    Topic("model", "Architecture", r"\w+"),
)
"""Sections in order of precedence; the last one matches every remaining argument."""


def find_topic(argument: Argument) -> Topic:
    """Return the section that lists an argument."""
    # "<program> <class>", such as "megatron.core OptimizerConfig", or "flagscale" alone.
    group = argument.origin.rpartition(" ")[2]
    return next(
        topic
        for topic in TOPICS
        if group in topic.groups
        or (topic.name_pattern and re.fullmatch(topic.name_pattern, argument.name))
    )


def sections_of_page(page: str) -> Iterable[str]:
    """Return the titles of a page's sections, each once, in order."""
    return dict.fromkeys(topic.title for topic in TOPICS if topic.page == page)
