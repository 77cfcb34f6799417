"""Effect of each argument on a resumed run: handling of a value that differs from the checkpoint.

Every argument that a user may set has one :class:`Effect`. Arguments that this trainer refuses or
does not use (:mod:`..compat.unused`) have none. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

from flagscale.config.arguments.compat.huggingface.models import MODEL_FUNCTION, MTP_LAYERS


class Effect(Enum):
    """Handling of an argument whose value differs from that of the checkpoint."""

    MODEL = "the model"
    """Determines weights or function of the model: refused. With ``finetune``, a change that keeps
    the weights is noted."""
    ADAPTERS = "the adapters"
    """Determines the adapters: refused."""
    OPTIMIZER = "the optimizer"
    """Determines the optimizer's state: refused, unless the optimizer is not loaded."""
    SCHEDULE = "the schedule"
    """A hyperparameter of the optimizer or of its schedule: refused, unless the user chooses
    between the checkpoint and the arguments."""
    STATES = "the optimizer's number formats"
    """Determines the format of the optimizer's states: converted, and noted."""
    TRAINING = "training"
    """Changes the following steps: taken from the arguments, and noted."""
    DATA = "the data"
    """Changes the following samples: taken from the arguments, and noted."""
    START = "the start"
    """Takes effect before the first step only: noted, because it has no effect."""
    EXECUTION = "execution"
    """Changes how steps are computed, distributed, saved or logged, but not what is trained: taken
    from the arguments. Results differ by rounding at most."""


WEIGHTS_KEPT = (
    "layernorm_epsilon",
    "scale_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "squared_relu",
    "openai_gelu",
    "bias_activation_fusion",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "window_rotary_base",
    "softmax_scale",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_apply_probs_on_input",
)
"""Arguments of the model that change its function but neither names nor shapes of its weights."""
FUNCTION = (*MODEL_FUNCTION, "moe_shared_expert_gate", MTP_LAYERS)
"""Arguments that determine the weights of a model and the function that it computes from them."""

_NAMES: Mapping[Effect, str] = {
    Effect.MODEL: f"family multiple_of hidden_dim_multiplier {' '.join(FUNCTION)}",
    Effect.ADAPTERS: "peft_type lora_dim lora_alpha lora_target_modules",
    Effect.OPTIMIZER: "optimizer use_distributed_optimizer fp16 bf16 freeze_parameters "
    "data_parallel_sharding_strategy trainable_parameters",
    Effect.STATES: "main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    Effect.SCHEDULE: """
    adam_beta1 adam_beta2 adam_eps decoupled_lr decoupled_min_lr end_weight_decay lr lr_decay_iters
    lion_beta1 lion_beta2 lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init
    lr_warmup_iters
    lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style min_lr
    sgd_momentum start_weight_decay train_iters train_samples weight_decay weight_decay_incr_style
    """,
    Effect.TRAINING: """
    apply_query_key_layer_scaling apply_wd_to_qk_layernorm attention_dropout
    attention_softmax_in_fp32 calculate_per_token_loss clip_grad decoupled_weight_decay
    dpo_beta dpo_label_smoothing dpo_loss
    enable_autocast first_last_layers_bf16 fp8 fp8_recipe fp8_wgrad global_batch_size
    grad_reduce_in_fp32 hidden_dropout hysteresis iterations_to_skip lora_dropout main_grads_dtype
    lora_dropout_position loss_scale loss_scale_window make_vocab_size_divisible_by min_loss_scale
    moe_aux_loss_coeff moe_enable_routing_replay moe_expert_capacity_factor moe_input_jitter_eps
    moe_pad_expert_input_to_capacity moe_router_bias_update_rate moe_router_dtype
    moe_router_force_load_balancing moe_router_load_balancing_type moe_token_drop_policy
    moe_z_loss_coeff mtp_loss_scaling_factor muon_extra_scale_factor muon_fp32_matmul_prec
    muon_momentum muon_num_ns_steps muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    rampup_batch_size
    """,
    Effect.DATA: """
    chat_template data_path data_phases dataloader_type dpo eod_mask_loss external_data mask_prob
    merge_file mid_level_dataset_surplus mock_data multiple_validation_sets reset_attention_mask
    reset_position_ids seed seq_length sft sft_format sft_packing sft_too_long special_tokens_file
    split test_data_path tokenizer_path tokenizer_type train_data_path valid_data_path
    """,
    Effect.START: """
    embedding_init_method_std init_method_std initial_loss_scale lora_in_init_method
    lora_out_init_method norm_init_weight perform_initialization
    """,
    Effect.EXECUTION: """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split align_param_gather
    allow_fallbacks apply_rope_fusion async_save attention_backend average_in_collective
    barrier_with_L1_time batch_p2p_comm batch_p2p_sync bias_dropout_fusion bucket_size
    check_for_large_grads check_for_nan_in_grad check_for_nan_in_loss_and_grad ckpt_format
    ckpt_fully_parallel_load ckpt_fully_parallel_save clone_scatter_output_in_embedding comm
    context_parallel_size cp_comm_type hierarchical_context_parallel_sizes
    cpu_offloading cpu_offloading_num_layers
    fine_grained_activation_offloading min_offloaded_tensor_size offload_modules
    cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps data_cache_path
    deallocate_pipeline_outputs deterministic_mode device disable_symmetric_registration
    best_metric early_stopping_min_delta early_stopping_patience
    distribute_saved_activations distributed_backend distributed_timeout_minutes enable_hetero
    eval_interval eval_iters eval_prompt_tokens eval_prompts eval_tasks eval_tasks_fewshot
    eval_tasks_interval eval_tasks_limit exit_duration_in_mins exit_interval
    exit_on_missing_checkpoint exit_signal_handler expert_model_parallel_size
    expert_tensor_parallel_size expert_tensor_parallel_size_per_process_mesh export_huggingface
    export_each_checkpoint
    export_peft finetune fused_single_qkv_rope gradient_accumulation_fusion hetero_device_types
    hetero_eager_1f1b hetero_micro_batch_sizes hetero_mode hetero_num_microbatches
    hetero_pipeline_layer_split hetero_process_meshes hetero_use_cpu_communication keep_last load
    log_interval log_learning_rate_to_tensorboard log_memory_to_tensorboard log_num_zeros_in_grad
    log_params_norm log_straggler log_throughput log_timers_to_tensorboard
    log_validation_ppl_to_tensorboard loss_spike_factor manual_gc manual_gc_interval
    micro_batch_size memory_snapshot_path memory_snapshot_step
    microbatch_group_size_per_vp_stage mmap_bin_files moe_deepep_num_sms moe_enable_deepep
    moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms moe_layer_recompute
    moe_shared_expert_overlap moe_token_dispatcher_type nccl_ub no_load_optim no_load_rng
    no_save_optim no_save_rng non_persistent_ckpt_type non_persistent_save_interval
    num_dataset_builder_threads num_distributed_optimizer_instances
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_layers_per_virtual_pipeline_stage num_microbatches_with_partial_activation_checkpoints
    num_virtual_stages_per_pipeline_rank num_workers optimizer_cpu_offload
    optimizer_offload_fraction overlap_grad_reduce overlap_p2p_comm
    overlap_p2p_comm_warmup_flush overlap_param_gather overlap_param_gather_with_optimizer_step
    override_opt_param_scheduler pad_buckets_for_high_nccl_busbw peak_tflops
    pipeline_model_parallel_layout pipeline_model_parallel_size pretrained_checkpoint profile
    record_memory_history
    profile_dir profile_ranks profile_step_end profile_step_start rampup_save_interval
    recompute_granularity recompute_granularity_per_stage_micro_batch recompute_memory_gib
    recompute_method recompute_method_per_stage_micro_batch recompute_modules recompute_num_layers
    recompute_num_layers_per_stage_micro_batch reduce_scatter_with_fp32_accumulation replication
    replication_jump save
    save_best save_interval save_retain_interval save_staging_dir sequence_parallel skip_train
    standalone_embedding_stage store_param_remainders straggler_threshold
    tensor_model_parallel_size tensorboard_dir tensorboard_log_interval tensorboard_queue_size
    test_mode tp_comm_overlap transformer_impl use_checkpoint_opt_param_scheduler
    use_cpu_initialization use_fused_weighted_squared_relu use_precision_aware_optimizer
    use_pytorch_profiler
    variable_seq_lengths verify_checkpoint virtual_pipeline_model_parallel_size wandb_entity
    wandb_exp_name wandb_project wandb_save_dir comet_experiment_name comet_project comet_workspace
    metrics_sinks mlflow_experiment mlflow_run_name mlflow_tracking_uri swanlab_exp_name
    swanlab_project swanlab_workspace
    """,
}
RECORDED = (Effect.STATES, Effect.TRAINING, Effect.DATA, Effect.START)
"""Effects of arguments that a checkpoint records so that a later run can note their changes."""


@lru_cache(maxsize=1)
def resume_effects() -> Mapping[str, Effect]:
    """Return the effect of each argument by name."""
    return MappingProxyType(
        {name: effect for effect, names in _NAMES.items() for name in names.split()}
    )
