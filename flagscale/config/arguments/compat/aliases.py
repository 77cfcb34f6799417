"""Megatron-LM's spellings of arguments that megatron.core's dataclasses call by another name.

An alias stands for its target: with the same value, the opposite one, or a fixed value when it is
switched on. Parsed arguments have no attribute for it. In addition to this table, any boolean ``x``
can be written ``no_x`` (see the registry).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["same", "opposite", "value", "none"]


@dataclass(frozen=True)
class Alias:
    """``name`` stands for ``target``. With ``rule`` "value", switching it on gives the target
    ``value``; "none" has no effect and no target, and ``doc`` says why it is accepted: a value that
    is ``idle`` asks for what it does not give."""

    name: str
    target: str
    rule: Rule = "same"
    value: Any = None
    doc: str = ""
    idle: bool | None = None

    def translate(self, value: Any) -> Any:
        """The target's value; None, "not given", when the alias is a switch that is off."""
        if self.rule == "opposite":
            return not value
        if self.rule == "value":
            return self.value if value else None
        return value


def _same(target: str, *names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name, target) for name in names)


def _opposite(target: str, *names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name, target, "opposite") for name in names)


def _no_effect(name: str, why: str, idle: bool | None = None) -> tuple[Alias, ...]:
    return (Alias(name, "", "none", doc=why, idle=idle),)


ALIASES: tuple[Alias, ...] = (
    # The model
    *_same("num_layers", "encoder_num_layers"),
    *_same("seq_length", "encoder_seq_length", "sequence_length"),
    *_same("layernorm_epsilon", "norm_epsilon"),
    *_same("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    *_same("num_moe_experts", "num_experts"),
    *_same("lora_dim", "lora_rank", "lora_r"),
    *_same("fp8", "fp8_format"),
    *_same("fp4", "fp4_format"),
    *_same("fp4_param", "fp4_param_gather"),
    *_opposite("use_mamba_mem_eff_path", "disable_mamba_mem_eff_path"),
    *_opposite("add_bias_linear", "disable_bias_linear"),
    *_opposite("bias_activation_fusion", "no_bias_gelu_fusion", "no_bias_swiglu_fusion"),
    *_opposite("apply_rope_fusion", "no_rope_fusion"),
    Alias("use_flash_attn", "attention_backend", "value", "flash"),
    Alias("use_rotary_position_embeddings", "position_embedding_type", "value", "rope"),
    Alias("recompute_activations", "recompute_granularity", "value", "selective"),
    *_no_effect(
        "group_query_attention",
        "`num_query_groups` alone says whether and how heads share keys and values",
    ),
    *_no_effect(
        "no_position_embedding",
        "with rotary positions there is no learned embedding; without them say "
        "`position_embedding_type: none`",
    ),
    # Parallelism and precision
    *_same("tensor_model_parallel_size", "model_parallel_size"),
    *_same("grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32"),
    *_same("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"),
    *_same("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"),
    *_same(
        "microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage"
    ),
    *_same("overlap_p2p_comm", "overlap_p2p_communication"),
    *_opposite("overlap_p2p_comm", "no_overlap_p2p_communication"),
    *_same("bucket_size", "ddp_bucket_size"),
    *_same("reduce_scatter_with_fp32_accumulation", "ddp_reduce_scatter_with_fp32_accumulation"),
    *_same("average_in_collective", "ddp_average_in_collective"),
    *_same("pad_buckets_for_high_nccl_busbw", "ddp_pad_buckets_for_high_nccl_busbw"),
    *_opposite("perform_initialization", "no_initialization"),
    # Training
    *_same("seed", "random_seed"),
    *_same("micro_batch_size", "batch_size"),
    *_same("train_iters", "train_steps"),
    *_same("iterations_to_skip", "skip_train_iters"),
    *_same("lr_warmup_iters", "warmup"),
    *_same("muon_use_nesterov", "muon_nesterov"),
    *_same("save_interval", "persistent_save_interval"),
    *_same("verify_checkpoint", "verify_integrity"),
    *_same("ckpt_format", "dist_ckpt_format"),
    *_no_effect("no_shared_fs", "`experiment.runner.no_shared_fs` says it", idle=True),
    *_no_effect("use_dist_ckpt", "checkpoints are always distributed ones", idle=False),
    # Data
    *_same("data_cache_path", "path_to_cache"),
    *_same("reset_attention_mask", "dataloader_inter_document_masking"),
    *_same("tokenizer_path", "tokenizer_model", "tokenizer_name_or_path", "vocab_file"),
    *_same("fast_cache_load", "dataloader_fast_cache_load"),
    *_same("defer_npy_index_mmap", "dataloader_defer_npy_index_mmap"),
    *_opposite("create_attention_mask", "no_create_attention_mask_in_dataloader"),
)
