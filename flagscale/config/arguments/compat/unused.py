"""Arguments that have no effect, by themselves or without another one.

megatron.core's configuration has fields that only Transformer Engine, another model or another
trainer reads. A value is *refused* where a user would get another model, other data or other memory
than requested. It is *noted* where only speed or records differ, or where Megatron-LM ignores it as
well. tests/unit/config/test_every_argument.py goes through all arguments. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from flagscale.config.arguments.rules.attention import documents_are_separate
from flagscale.config.arguments.rules.data import uses_external_data
from flagscale.config.arguments.rules.model_family import arguments_of_family, families_by_argument
from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, CUDA_GRAPH_SCOPE, FULL_ITERATION
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.values import format_value

_WHOLE_STEPS = (
    f"{CUDA_GRAPH}: local with {CUDA_GRAPH_SCOPE}: {FULL_ITERATION} captures whole steps without it"
)
REFUSED_ARGUMENTS: Mapping[str, str] = {
    "use_megatron_fsdp": "this trainer shards the optimizer only (use_distributed_optimizer)",
    "use_custom_fsdp": "this trainer shards the optimizer only (use_distributed_optimizer)",
    "moe_permute_fusion": "it needs Transformer Engine's fused permutation",
    "moe_router_fusion": "it needs Transformer Engine's fused router",
    "moe_latent_size": "experts of another width than the hidden state need Transformer Engine",
    "moe_router_padding_for_fp8": "it pads for Transformer Engine's 8-bit experts",
    "moe_router_padding_for_quantization": "it pads for Transformer Engine's 8-bit experts",
    "fp4": "fp4 needs Transformer Engine",
    "fp4_param": "fp4 needs Transformer Engine",
    "use_precision_aware_optimizer": "it needs Transformer Engine's optimizer",
    "optimizer_cpu_offload": "offloading the optimizer needs Transformer Engine's or Apex's",
    "cpu_offloading": "offloading activations needs Transformer Engine",
    "masked_softmax_fusion": "it needs Apex's CUDA extension; scaled_dot_product_attention fuses",
    "fp8_param": "weights are kept in 16 bits and cast once a step",
    "fp8_param_gather": "weights are kept in 16 bits and cast once a step",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights are kept in 16 bits and cast once a step",
    "fp8_dot_product_attention": "attention is computed in 16 bits",
    "fp8_multi_head_attention": "attention is computed in 16 bits",
    "activation_func_fp8_input_store": "it needs Transformer Engine",
    "persist_layer_norm": "it needs Apex; torch's norms are fused anyway",
    "memory_efficient_layer_norm": "it needs Apex",
    "fine_grained_activation_offloading": "offloading activations needs Transformer Engine",
    "enable_cuda_graph": f"graphs of single layers need Transformer Engine; {_WHOLE_STEPS}",
    "external_cuda_graph": f"graphs of single layers need Transformer Engine; {_WHOLE_STEPS}",
    "heterogeneous_block_specs": "all layers are alike",
    "experimental_attention_variant": "attention here is softmax attention",
    "inference_fuse_tp_communication": "it is of inference, and this program trains",
    "is_hybrid_model": "models of Mamba and attention layers are not built",
    "fp8_quantizer_factory": "it names a Python function of Transformer Engine's layers",
    "use_kitchen": "it needs NVIDIA's library Kitchen",
    "use_kitchen_attention": "it needs NVIDIA's library Kitchen",
    "use_te_activation_func": "it needs Transformer Engine",
    "batch_invariant_mode": "it needs Transformer Engine; deterministic_mode repeats a run",
    "symmetric_ar_type": "it needs Transformer Engine",
    "delay_wgrad_compute": "it needs Transformer Engine",
    "defer_embedding_wgrad_compute": "it needs Apex's fused accumulation of gradients",
    "overlap_moe_expert_parallel_comm": "it needs Transformer Engine",
    "ep_overlap_early_attn_memory_release": "it needs Transformer Engine",
    "use_ring_exchange_p2p": "it needs a torch of one's own with ring_exchange",
    "hybrid_context_parallel": "every rank of a context group has a part of each sequence",
    "max_seqlen_per_dp_cp_rank": "sequences are as long as `seq_length`",
    "hierarchical_context_parallel_sizes": "keys and values are gathered in one step",
    "pipeline_model_parallel_comm_backend": "all groups use `distributed_backend`, which may be a "
    "map such as cpu:gloo,cuda:nccl",
    "apply_residual_connection_post_layernorm": "megatron.core adds what comes before the norm",
    "disable_bf16_reduced_precision_matmul": "torch's own setting is not changed",
    "moe_router_topk_limited_devices": "write moe_router_num_groups and moe_router_group_topk",
    "mrope_section": "it is of models of images and video",
    "full_validation": "an evaluation takes eval_iters steps",
    "add_extra_token_to_sequence": "labels are the tokens moved by one",
    "object_storage_cache_path": "data is read from files",
    "init_model_with_meta_device": "weights are drawn where they lie",
    "hetereogenous_dist_checkpoint": "all layers are alike; checkpoints fit any layout",
    "mtp_standalone": "layers of multi-token prediction lie beside the loss",
    "drop_last_partial_validation_sequence": "a sequence is whole or left out",
    "use_mcore_models": "only megatron.core's models exist here",
}
"""Arguments that would change what is trained, with the reason why they do not."""
UNUSED_ARGUMENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "megatron.core": (
        ("async_tensor_model_parallel_allreduce", "moe_extended_tp", "moe_token_dropping"),
        "megatron.core does not read it any more",
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
        "it is of Transformer Engine's layers, and this trainer has its own",
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
        "it is of inference, and this program trains",
    ),
    "sharding": (
        (
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "gradient_reduce_div_fusion",
        ),
        "it is of fully sharded data parallelism, and this trainer shards the optimizer only "
        "(use_distributed_optimizer)",
    ),
    "data": (
        (
            "allow_ambiguous_pad_tokens",
            "defer_npy_index_mmap",
            "fast_cache_load",
            "create_attention_mask",
        ),
        "the data sets' caches are checked before they are read, and attention needs no mask",
    ),
    "records": (
        ("config_logger_dir", "moe_per_layer_logging"),
        "this record is not kept",
    ),
    "tokenizers": (("legacy_tokenizer",), "there is one class a tokenizer"),
    "meshes": (("use_partial_reduce_for_shared_embedding",), "it is always so"),
    "hosts": (("hetero_current_device_type",), "the hostfile's type= says it"),
}
"""Groups of arguments without effect, each with the reason."""


class Requirement(NamedTuple):
    """Arguments ``names``, separated by spaces, that have an effect only if ``master`` is set, or
    set to one of ``wanted``."""

    master: str
    names: str
    wanted: tuple[str, ...] = ()


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
    Requirement(
        "cpu_offloading",
        "cpu_offloading_activations cpu_offloading_double_buffering "
        "cpu_offloading_num_layers cpu_offloading_weights",
    ),
    Requirement("fine_grained_activation_offloading", "offload_modules min_offloaded_tensor_size"),
    Requirement("sequence_parallel", "tp_comm_overlap"),
    Requirement(
        "optimizer",
        "muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_num_ns_steps "
        "muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov",
        ("muon",),
    ),
    Requirement("optimizer", "sgd_momentum", ("sgd",)),
    Requirement("optimizer", "adam_beta1 adam_beta2 adam_eps", ("adam",)),
    Requirement(
        "optimizer_cpu_offload",
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "pin_cpu_params use_torch_optimizer_for_cpu_offload",
    ),
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
    Requirement("dataloader_type", "external_data", ("external",)),
    Requirement("sft", "sft_format chat_template sft_packing sft_too_long"),
    Requirement(
        "profile",
        "profile_step_start profile_step_end profile_ranks profile_dir use_pytorch_profiler",
    ),
)
"""Arguments that have no effect without others, as in Megatron-LM."""
TEXT_ONLY = ("reset_attention_mask", "eod_mask_loss", "dataloader_type")
"""Arguments of text that have no effect on conversations."""
_FILES_ONLY = ("split", "data_cache_path", "num_workers", "eod_mask_loss")
"""Arguments of data sets that have no effect on data of one's own."""
_EXPERT_PREFIX = "moe_"
"""How those begin that ``num_moe_experts`` is needed for."""


def check_refused(values: Values) -> Iterator[Violation]:
    """Yield a violation for values that would silently not change the training."""
    for name, reason in REFUSED_ARGUMENTS.items():
        if _requests_anything(values[name], arguments()[name].default):
            yield name, f"{format_value(values[name])} is not supported by this trainer: {reason}"


def note_unused(values: Values, given: Collection[str]) -> Iterator[tuple[list[str], str]]:
    """Yield the given arguments that have no effect, grouped by their common reason. Values that
    are off or equal to the default are ignored."""
    changed = {name for name in given if values[name] != arguments()[name].default}
    groups = [
        ([name for name in names if name in changed], why)
        for names, why in UNUSED_ARGUMENTS.values()
    ]
    requested = [name for name in given if name in changed or values[name] not in (None, False)]
    for need in REQUIREMENTS:
        unmet = [] if _is_met(need, values) else [n for n in need.names.split() if n in requested]
        groups.append((unmet, f"needs {requirement_text(need)}"))
    if not values["num_moe_experts"]:
        experts = [name for name in requested if name.startswith(_EXPERT_PREFIX)]
        groups.append((experts, "needs num_moe_experts"))
    if values["sft"]:
        unused = [name for name in requested if name in TEXT_ONLY]
        groups.append((unused, "conversations are apart, and their order is another in each pass"))
    if values["multi_latent_attention"] and documents_are_separate(values):
        reason = "documents are apart, and of rotary positions attention takes the distances"
        groups.append(([name for name in requested if name == "reset_position_ids"], reason))
    if uses_external_data(values):
        unused = [name for name in requested if name in _FILES_ONLY]
        groups.append((unused, "external_data makes the batches"))
    for master, names in _unused_by_family(values["family"], requested):
        groups.append((names, f"needs {master}"))
    return ((names, reason) for names, reason in groups if names)


def _unused_by_family(family: str, requested: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield requested arguments that only other model families use, with the families that would
    need to be chosen."""
    supported, by_families = arguments_of_family(family), dict[str, list[str]]()
    for name, owners in families_by_argument().items():
        if name in requested and name not in supported:
            by_families.setdefault(_family_requirement(owners), []).append(name)
    yield from by_families.items()


def _family_requirement(owners: Collection[str]) -> str:
    return f"family: {' or '.join(owners)}"


def unused_note(names: Collection[str], reason: str) -> str:
    """Return the note about names, as given by the user, that have no effect."""
    return f"no effect of {', '.join(names)}: {reason}"


def describe_support(name: str) -> str:
    """Return the text to append to the documentation of an argument; empty if the argument has an
    effect."""
    if name in REFUSED_ARGUMENTS:
        default = arguments()[name].default
        what = f"anything but {format_value(default)}" if default else "it"
        return f"This trainer refuses {what}: {REFUSED_ARGUMENTS[name]}."
    reasons = [reason for names, reason in UNUSED_ARGUMENTS.values() if name in names]
    if reasons:
        return f"Taken and without effect: {reasons[0]}."
    needs = [requirement_text(need) for need in REQUIREMENTS if name in need.names.split()]
    needs += (
        [_family_requirement(families_by_argument()[name])]
        if name in families_by_argument()
        else []
    )
    return f"Without effect unless `{needs[0]}`." if needs else ""


def requirement_text(need: Requirement) -> str:
    """Return the required argument and value as a YAML would write them."""
    return need.master + (f": {' or '.join(need.wanted)}" if need.wanted else "")


def _requests_anything(value: object, default: object) -> bool:
    """Return whether a value requests anything. Zero and an empty list do not."""
    nothing = value is None or value == [] or (value == 0 and value is not False)
    return value != default and not nothing


def _is_met(need: Requirement, values: Values) -> bool:
    value = values[need.master]
    return value in need.wanted if need.wanted else bool(value)
