"""Arguments that have no effect in this trainer, or none without another argument.

megatron.core's configuration has fields that only Transformer Engine, another model or another
trainer reads. A value of such a field is *refused* if the model, the data or the memory would not
be as requested. It is accepted with a note if only speed or logging would differ, or
if Megatron-LM ignores it as well. tests/unit/config/test_every_argument.py covers all arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from flagscale.config.arguments.rules.data import (
    documents_are_separate,
    trains_on_conversations,
    uses_external_data,
)
from flagscale.config.arguments.rules.model_family import arguments_of_family, families_by_argument
from flagscale.config.arguments.rules.muon import ADAM_FAMILY, LION, MUON
from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, CUDA_GRAPH_SCOPE, FULL_ITERATION
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.values import format_value

_WHOLE_STEPS = f"use {CUDA_GRAPH}: local with {CUDA_GRAPH_SCOPE}: {FULL_ITERATION}"
_16_BIT_WEIGHTS = "weights are kept in 16 bits and cast to fp8 once per step"
REFUSED_ARGUMENTS: Mapping[str, str] = {
    "moe_latent_size": "experts with another width than the hidden state require Transformer "
    "Engine",
    "fp4": "fp4 requires Transformer Engine",
    "fp4_param": "fp4 requires Transformer Engine",
    "masked_softmax_fusion": "it requires Apex's CUDA extension; the default, "
    "scaled_dot_product_attention, is fused",
    "fp8_param": _16_BIT_WEIGHTS,
    "fp8_param_gather": _16_BIT_WEIGHTS,
    "reuse_grad_buf_for_mxfp8_param_ag": _16_BIT_WEIGHTS,
    "fp8_dot_product_attention": "attention is computed in 16 bits",
    "fp8_multi_head_attention": "attention is computed in 16 bits",
    "activation_func_fp8_input_store": "it requires Transformer Engine",
    "memory_efficient_layer_norm": "it requires Apex",
    "heterogeneous_block_specs": "all layers are equal",
    "experimental_attention_variant": "only softmax attention is implemented",
    "inference_fuse_tp_communication": "inference is not supported",
    "is_hybrid_model": "models with Mamba layers are not implemented",
    "fp8_quantizer_factory": "it names a Python function for Transformer Engine's layers",
    "use_kitchen": "it requires NVIDIA's library Kitchen",
    "use_kitchen_attention": "it requires NVIDIA's library Kitchen",
    "batch_invariant_mode": "it requires Transformer Engine; use deterministic_mode for "
    "reproducible runs",
    "hybrid_context_parallel": "each sequence is split over all ranks of a context-parallel group",
    "max_seqlen_per_dp_cp_rank": "all sequences have `seq_length` tokens",
    "pipeline_model_parallel_comm_backend": "all process groups use `distributed_backend`, which "
    "may be a map such as cpu:gloo,cuda:nccl",
    "fp32_residual_connection": "megatron.core keeps only the embedding's output in fp32 and "
    "rounds it in the first layer; leave it out, or train in fp32 (bf16: false, fp16: false)",
    "apply_residual_connection_post_layernorm": "megatron.core always adds the input of the norm",
    "disable_bf16_reduced_precision_matmul": "torch's setting is not changed",
    "moe_router_topk_limited_devices": "use moe_router_num_groups and moe_router_group_topk",
    "mrope_section": "models of images and video are not supported",
    "full_validation": "an evaluation runs eval_iters steps",
    "add_extra_token_to_sequence": "labels are the tokens shifted by one position",
    "object_storage_cache_path": "data is read from files",
    "init_model_with_meta_device": "weights are initialized on their device",
    "hetereogenous_dist_checkpoint": "all layers are equal, and checkpoints can be loaded with any "
    "parallel layout",
    "mtp_standalone": "multi-token prediction layers are in the stage of the loss",
    "drop_last_partial_validation_sequence": "partial sequences are always dropped",
    "use_mcore_models": "only megatron.core's models are supported",
    "qk_clip": "only Transformer Engine's attention records the largest scores that it needs",
}
"""Refused arguments with the reason. Unless they are off or default, they would change what is
trained."""
_TE_OVERLAP = "this overlap requires Transformer Engine, and results are the same without it"
SPEED_ONLY_ARGUMENTS: Mapping[str, str] = {
    "moe_permute_fusion": "the fused permutation is Transformer Engine's",
    "moe_router_fusion": "the fused router is Transformer Engine's",
    "moe_router_padding_for_fp8": "only Transformer Engine's fp8 experts need padded inputs",
    "moe_router_padding_for_quantization": "only Transformer Engine's fp8 experts need padded "
    "inputs",
    "persist_layer_norm": "it requires Apex; torch's norms are always fused",
    "enable_cuda_graph": f"graphs of single layers require Transformer Engine; {_WHOLE_STEPS}",
    "external_cuda_graph": f"graphs of single layers require Transformer Engine; {_WHOLE_STEPS}",
    "use_te_activation_func": "activations of this trainer's layers are compiled",
    "symmetric_ar_type": "symmetric memory is Transformer Engine's",
    "delay_wgrad_compute": _TE_OVERLAP,
    "overlap_moe_expert_parallel_comm": _TE_OVERLAP,
    "ep_overlap_early_attn_memory_release": _TE_OVERLAP,
    "defer_embedding_wgrad_compute": "it requires Apex's fused gradient accumulation, and results "
    "are the same without it",
    "use_ring_exchange_p2p": "it requires a custom build of torch with ring_exchange",
}
"""Arguments that change only the speed and require what this trainer does not have, with the
reason. Their default is used instead (``check.substitutions_for``)."""
UNUSED_ARGUMENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "megatron.core": (
        (
            "async_tensor_model_parallel_allreduce",
            "fp16_lm_cross_entropy",
            "moe_extended_tp",
            "moe_token_dropping",
        ),
        "megatron.core no longer reads it",
    ),
    "Transformer Engine": (
        (
            "use_te_rng_tracker",
            "disable_parameter_transpose_cache",
            "moe_use_legacy_grouped_gemm",
            "tp_only_amax_red",
            "fp8_margin",
            "fp8_interval",
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            "wgrad_deferral_limit",
            "tp_comm_atomic_ag",
            "tp_comm_atomic_rs",
            "tp_comm_bootstrap_backend",
            "tp_comm_bulk_dgrad",
            "tp_comm_bulk_wgrad",
            "tp_comm_overlap_ag",
            "tp_comm_overlap_disable_fc1",
            "tp_comm_overlap_disable_qkv",
            "tp_comm_overlap_rs",
            "tp_comm_overlap_rs_dgrad",
            "tp_comm_split_ag",
            "tp_comm_split_rs",
        ),
        "it belongs to Transformer Engine's layers, and this trainer has its own layers",
    ),
    "inference": (
        (
            "inference_rng_tracker",
            "inference_sampling_seed",
            "use_inference_optimized_layers",
            "flash_decode",
            "mlp_chunks_for_prefill",
            "cache_mla_latents",
        ),
        "inference is not supported; only training is",
    ),
    "sharding": (
        (
            "outer_dp_sharding_strategy",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "gradient_reduce_div_fusion",
        ),
        "it tunes Megatron-FSDP, and data_parallel_sharding_strategy has its own implementation",
    ),
    "sharding by Megatron-FSDP": (
        ("use_megatron_fsdp", "use_custom_fsdp"),
        "data_parallel_sharding_strategy alone says what is sharded",
    ),
    "optimizer": (
        (
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
            "use_torch_optimizer_for_cpu_offload",
        ),
        "offloading the optimizer's state always overlaps copies and updates",
    ),
    "data": (
        (
            "allow_ambiguous_pad_tokens",
            "defer_npy_index_mmap",
            "fast_cache_load",
            "create_attention_mask",
        ),
        "caches of data sets are always validated, and attention needs no mask tensor",
    ),
    "records": (
        ("config_logger_dir", "log_max_attention_logit", "moe_per_layer_logging"),
        "this log is not written",
    ),
    "tokenizers": (("legacy_tokenizer",), "each tokenizer has a single class"),
    "activations": (
        ("cpu_offloading_double_buffering",),
        "copies always run ahead of the backward pass",
    ),
    "meshes": (("use_partial_reduce_for_shared_embedding",), "partial reduction is always used"),
    "hosts": (("hetero_current_device_type",), "it is set by type= in the hostfile"),
}
"""Arguments that are accepted without effect, by topic, with the reason."""


class Requirement(NamedTuple):
    """Arguments that have an effect only if another argument is set."""

    required: str
    """The other argument, or several of which one suffices, separated by spaces."""
    names: str
    """Arguments without effect otherwise, separated by spaces."""
    values: tuple[str, ...] = ()
    """Values of ``required`` with which they have an effect; empty: any value that is not off."""


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "multi_latent_attention",
        "kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim beta_fast "
        "beta_slow mscale mscale_all_dim rotary_scaling_factor "
        "original_max_position_embeddings rope_type",
    ),
    Requirement("mtp_num_layers", "mtp_loss_scaling_factor"),
    Requirement(
        "experimental_attention_variant",
        "dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk "
        "dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim "
        "linear_key_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_value_head_dim",
    ),
    Requirement(
        "is_hybrid_model",
        "mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim use_mamba_mem_eff_path",
    ),
    Requirement("use_kitchen_attention", "kitchen_attention_backend"),
    Requirement("fp4", "fp4_recipe fp4_quantizer_factory"),
    Requirement("fine_grained_activation_offloading", "offload_modules"),
    Requirement("cpu_offloading_num_layers", "cpu_offloading_activations"),
    Requirement("sequence_parallel", "tp_comm_overlap"),
    Requirement(
        "optimizer",
        "muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_num_ns_steps "
        "muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov",
        MUON,
    ),
    Requirement("optimizer", "sgd_momentum", ("sgd",)),
    Requirement("optimizer", "adam_beta1 adam_beta2 adam_eps", ADAM_FAMILY),
    Requirement("optimizer", "lion_beta1 lion_beta2", (LION,)),
    Requirement("optimizer_cpu_offload", "optimizer_offload_fraction"),
    Requirement("use_precision_aware_optimizer", "store_param_remainders"),
    Requirement(
        "fp8",
        "fp8_recipe fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16",
    ),
    Requirement(
        "fp16", "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    Requirement("cuda_graph_impl", "cuda_graph_scope cuda_graph_warmup_steps", ("local",)),
    Requirement(
        "enable_cuda_graph", "cuda_graph_retain_backward_graph cuda_graph_use_single_mempool"
    ),
    Requirement("recompute_granularity", "recompute_method recompute_num_layers"),
    Requirement("recompute_granularity", "recompute_modules", ("selective",)),
    Requirement("recompute_granularity", "recompute_memory_gib", ("auto",)),
    Requirement("window_size", "window_attn_skip_freq window_rotary_base"),
    Requirement("qk_clip", "qk_clip_alpha qk_clip_threshold"),
    Requirement("use_rope_scaling", "rope_scaling_factor"),
    Requirement("nccl_ub", "disable_symmetric_registration"),
    Requirement("manual_gc", "manual_gc_interval"),
    Requirement("rampup_batch_size", "rampup_save_interval"),
    Requirement("tokenizer_type", "merge_file", ("GPT2BPETokenizer", "AquilaTokenizerFS")),
    Requirement("tokenizer_type", "special_tokens_file", ("AquilaTokenizerFS",)),
    Requirement(
        "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap moe_shared_expert_gate"
    ),
    Requirement("multiple_of", "hidden_dim_multiplier"),
    Requirement("swiglu", "multiple_of"),
    Requirement("hetero_process_meshes", "hetero_eager_1f1b"),
    Requirement("wandb_project", "wandb_exp_name wandb_save_dir wandb_entity"),
    Requirement("mlflow_experiment", "mlflow_run_name mlflow_tracking_uri"),
    Requirement("comet_project", "comet_workspace comet_experiment_name"),
    Requirement("swanlab_project", "swanlab_workspace swanlab_exp_name"),
    Requirement(
        "lr_decay_style", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples", ("WSD",)
    ),
    Requirement(
        "peft_type",
        "lora_dim lora_alpha lora_dropout lora_dropout_position lora_in_init_method "
        "lora_out_init_method lora_target_modules export_peft",
        ("lora",),
    ),
    Requirement("eval_prompts", "eval_prompt_tokens"),
    Requirement("eval_tasks", "eval_tasks_interval eval_tasks_fewshot eval_tasks_limit"),
    Requirement("record_memory_history", "memory_snapshot_path memory_snapshot_step"),
    Requirement("early_stopping_patience", "early_stopping_min_delta"),
    Requirement("dataloader_type", "external_data", ("external",)),
    Requirement("sft", "sft_format"),
    Requirement("sft dpo", "chat_template sft_packing sft_too_long"),
    Requirement("dpo", "dpo_beta dpo_loss dpo_label_smoothing"),
    Requirement(
        "profile",
        "profile_step_start profile_step_end profile_ranks profile_dir use_pytorch_profiler",
    ),
)
"""Arguments that have no effect without others, like in Megatron-LM."""
TEXT_ONLY = ("reset_attention_mask", "eod_mask_loss", "dataloader_type")
"""Arguments of plain text data that have no effect on conversations."""
_FILES_ONLY = ("split", "data_cache_path", "num_workers", "eod_mask_loss")
"""Arguments of data sets that have no effect on batches of a user's function."""
_EXPERT_PREFIX = "moe_"
"""Prefix of the arguments that have no effect without ``num_moe_experts``."""


def check_refused(values: Values) -> Iterator[Violation]:
    """Yield a violation for each value of :data:`REFUSED_ARGUMENTS` that requests a change."""
    for name, reason in REFUSED_ARGUMENTS.items():
        if _requests_change(values[name], arguments()[name].default):
            yield name, f"{format_value(values[name])} is not supported by this trainer: {reason}"


def note_unused(values: Values, given: Collection[str]) -> Iterator[tuple[list[str], str]]:
    """Yield the given arguments that have no effect, grouped by their common reason. Values that
    are off or equal to the default are ignored."""
    changed = {name for name in given if values[name] != arguments()[name].default}
    groups = [
        ([name for name in names if name in changed], reason)
        for names, reason in UNUSED_ARGUMENTS.values()
    ]
    requested = [name for name in given if name in changed or values[name] not in (None, False)]
    for requirement in REQUIREMENTS:
        if not _is_met(requirement, values):
            names = [name for name in requirement.names.split() if name in requested]
            groups.append((names, f"requires {requirement_text(requirement)}"))
    if not values["num_moe_experts"]:
        names = [name for name in requested if name.startswith(_EXPERT_PREFIX)]
        groups.append((names, "requires num_moe_experts"))
    if not (values["export_huggingface"] or values["export_peft"]):
        names = [name for name in requested if name == "export_each_checkpoint"]
        groups.append((names, "requires export_huggingface or export_peft"))
    if values["device"] == "cpu":
        names = [name for name in requested if name == "record_memory_history"]
        groups.append((names, "allocations of a CPU are not recorded, only those of CUDA devices"))
    if trains_on_conversations(values):
        names = [name for name in requested if name in TEXT_ONLY]
        reason = "conversations are always separate and reshuffled in every epoch"
        groups.append((names, reason))
    if values["multi_latent_attention"] and documents_are_separate(values):
        names = [name for name in requested if name == "reset_position_ids"]
        reason = "documents are separate, and attention depends on relative positions only"
        groups.append((names, reason))
    if uses_external_data(values):
        names = [name for name in requested if name in _FILES_ONLY]
        groups.append((names, "external_data provides the batches"))
    for requirement_of_family, names in _unused_by_family(values["family"], requested):
        groups.append((names, f"requires {requirement_of_family}"))
    return ((names, reason) for names, reason in groups if names)


def _unused_by_family(family: str, requested: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield requested arguments that only other model families use, with the families that use
    them."""
    supported, names_by_requirement = arguments_of_family(family), dict[str, list[str]]()
    for name, families in families_by_argument().items():
        if name in requested and name not in supported:
            names_by_requirement.setdefault(_family_requirement(families), []).append(name)
    yield from names_by_requirement.items()


def _family_requirement(families: Collection[str]) -> str:
    return f"family: {' or '.join(families)}"


def unused_note(names: Collection[str], reason: str) -> str:
    """Return the note about names, as given by the user, that have no effect."""
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {reason}"


def describe_support(name: str) -> str:
    """Return the text to append to the documentation of an argument; empty if the argument has an
    effect."""
    if name in REFUSED_ARGUMENTS:
        default = arguments()[name].default
        values = f"Values other than {format_value(default)} are not" if default else "Not"
        return f"{values} supported: {REFUSED_ARGUMENTS[name]}."
    reasons = [reason for names, reason in UNUSED_ARGUMENTS.values() if name in names]
    reasons += [SPEED_ONLY_ARGUMENTS[name]] if name in SPEED_ONLY_ARGUMENTS else []
    if reasons:
        return f"Accepted without effect: {reasons[0]}."
    requirements = [
        requirement_text(requirement)
        for requirement in REQUIREMENTS
        if name in requirement.names.split()
    ]
    if name in families_by_argument():
        requirements.append(_family_requirement(families_by_argument()[name]))
    return f"Has no effect without `{requirements[0]}`." if requirements else ""


def requirement_text(requirement: Requirement) -> str:
    """Return the required argument and value as a YAML would write them."""
    values = f": {' or '.join(requirement.values)}" if requirement.values else ""
    return " or ".join(requirement.required.split()) + values


def _requests_change(value: object, default: object) -> bool:
    """Return whether a value differs from the default and is not off, zero or empty."""
    is_off = value is None or value == [] or (value == 0 and value is not False)
    return value != default and not is_off


def _is_met(requirement: Requirement, values: Values) -> bool:
    required_values = [values[name] for name in requirement.required.split()]
    if requirement.values:
        return any(value in requirement.values for value in required_values)
    return any(required_values)
