"""Families of unsupported names that share one reason, as regular expressions.

:mod:`.names` looks a name up here if its own tables do not list it.
"""

from __future__ import annotations

from typing import NamedTuple


class UnsupportedFamily(NamedTuple):
    """Unsupported names that share one reason."""

    title: str
    """Heading in docs/reference."""
    names: str
    """Regular expression that matches whole names."""
    reason: str
    """End of the sentence "is not supported: …" or "has no effect: …"."""
    unused: bool = False
    """True if the names are accepted without effect, with a note; otherwise they are refused."""


UNSUPPORTED_FAMILIES: tuple[UnsupportedFamily, ...] = (
    UnsupportedFamily(
        "reinforcement learning",
        r"(rl|grpo|langrl)_\w+|perform_rl_step|refit_method",
        "reinforcement learning is not supported; only pre-training and fine-tuning are",
    ),
    UnsupportedFamily(
        "inference",
        r"inference_\w+|max_tokens_to_oom|use_legacy_static_engine|decode_only_cuda_graphs|"
        r"nccl_all_reduce_for_prefill|(enable|disable)_chunked_prefill|"
        r"moe_pad_experts_for_cuda_graph_inference|mamba_inference_\w+|num_speculative_tokens|"
        r"use_same_sampling_seed_across_dp_ranks",
        "inference is not supported; only training is",
    ),
    UnsupportedFamily(
        "next-sentence prediction of BERT",
        r"bert_no_binary_head|no_bert_binary_head",
        "BERT is always trained without next-sentence prediction",
        unused=True,
    ),
    UnsupportedFamily(
        "T5 and retrieval models",
        r"(ict|biencoder|bert|retriever|indexer)_\w+|output_bert_embeddings|titles_data_path|"
        r"query_in_block_prob|use_one_sent_docs|evidence_data_path|block_data_path|embedding_path|"
        r"sample_rate|decoder_(num_layers|seq_length)|relative_attention_\w+|retro_\w+",
        "T5 and retrieval models are not supported; `family` is gpt or bert, and other models "
        "need their own `entrypoint`",
    ),
    UnsupportedFamily(
        "models of images",
        r"(vision|swin|dino)_\w+|num_classes|num_channels|img_[hw]|patch_dim|classes_fraction|"
        r"data_per_class_fraction|no_data_sharding|head_lr_mult|mask_(type|factor)|iter_per_epoch|"
        r"freeze_(LM|ViT)|allow_missing_vision_\w+|disable_vision_class_token|language_model_type|"
        r"image_\w+|mm_\w+|interleaved_dataset|training_dataset_only|dataloader_save|"
        r"enable_variable_seq_lengths|max_padding_length|extra_vocab_size|prompt_path|"
        r"(temporal_)?patch_size|spatial_merge_size|dataset_config|max_samples_per_sequence|"
        r"shuffle_buffer_size|add_faster_video|(use_)?pos_skipping(_range)?|"
        r"convert_checkpoint_from_megatron_to_transformers|(no_)?use_system_prompt",
        "models of images are not supported; they need their own `entrypoint`",
    ),
    UnsupportedFamily(
        "robotics",
        r"action_(horizon|steps|key|token_key|discretization_bins)|state_key|stat_path|"
        r"assets_base_dir|config_(name|file)|ckpt_overwrite|tokenizer_max_length|dataset_type|"
        r"video_backend",
        "FlagScale's robotics models are not supported; run their training program with "
        "`experiment.task.type: command`",
    ),
    UnsupportedFamily(
        "other sequence mixers",
        r"rwkv_\w+|gdp_\w+|mhc_\w+|enable_mhc_connections|dsa_\w+|mamba_training_\w+",
        "all layers consist of attention and an MLP (or experts), with one residual stream",
    ),
    UnsupportedFamily(
        "Engram's memory",
        r"use_engram|engram_\w+|max_ngram_size|n_(embed|head)_per_ngram",
        "layers with a memory of n-grams are not implemented",
    ),
    UnsupportedFamily(
        "attention of DeepSeek-V4",
        r"csa_compress_ratios|o_groups|o_lora_rank",
        "compressed attention is not implemented; DeepSeek-V2 and V3 are",
    ),
    UnsupportedFamily(
        "knowledge distillation",
        r"logits_(save|load)_\w+|(knowledge_)?distill(ation)?_\w+|export_kd_\w+",
        "knowledge distillation is not implemented",
    ),
    UnsupportedFamily(
        "maximal update parametrization",
        r"use_mup|mup_\w+",
        "muP is not implemented; set `lr` and `init_method_std` for the width of the model",
    ),
    UnsupportedFamily(
        "variants of multi-token prediction",
        r"mtp_(use_repeated_layer|detach_heads|hsm|hybrid_override_pattern)",
        "this variant of multi-token prediction is not implemented",
    ),
    UnsupportedFamily(
        "YaRN by other names",
        r"(no_)?yarn_\w+",
        "YaRN scales the positions of `multi_latent_attention` only, with "
        "`rotary_scaling_factor`, `original_max_position_embeddings`, `beta_fast` and "
        "`beta_slow`",
    ),
    UnsupportedFamily(
        "sharded weights",
        r"(expert_)?tensor_parallel_num_weight_shards|gtp_\w+",
        "weights are sharded over data-parallel ranks, by "
        "`data_parallel_sharding_strategy: optim_grads_params`",
    ),
    UnsupportedFamily(
        "memory of activations",
        r"moe_paged_stash\w*|mlp_chunks_for_training",
        "use `recompute_granularity` to save memory of activations",
    ),
    UnsupportedFamily(
        "fault injection",
        r"fault_injector_\w+|error_injection_\w+",
        "fault injection is not implemented; to test recovery, kill a process",
    ),
    UnsupportedFamily(
        "the DualPipeV schedule",
        r"use_dualpipev|moe_fb_overlap",
        "the DualPipeV schedule is not implemented, but results are the same without it; "
        "`num_virtual_stages_per_pipeline_rank` reduces the pipeline bubble",
        unused=True,
    ),
    UnsupportedFamily(
        "NCCL flight recorder",
        r"flight_recorder_\w+",
        "set the environment variables of torch, such as TORCH_FR_BUFFER_SIZE, in "
        "`experiment.envs`",
        unused=True,
    ),
    UnsupportedFamily(
        "kernels of Transformer Engine",
        r"use_transformer_engine_op_fuser|use_grouped_gemm_for_(dense_mlp|shared_expert)|"
        r"moe_(use_grouped_tensor|single_grouped_(weight|bias))|fused_residual_rmsnorm|"
        r"moe_(shared_expert|mlp)_glu_interleave_size|batch_invariant_backend|"
        r"mla_down_proj_fusion|flash_attention_version|overlap_dispatch_backward_with_\w+|"
        r"moe_(flex_dispatcher_num_sms|hybridep_\w+|ncclep_\w+|permute_fusion_into_hybridep)|"
        r"no_dsa_kernel_fusion|moe_(combine_bwd|dispatch_fwd)_dtype|high_priority_a2a_comm_stream|optimizer_cuda_graph",
        "it selects kernels or buffers that this trainer's own layers do not have",
        unused=True,
    ),
    UnsupportedFamily(
        "details of offloading",
        r"activation_offload_fraction|delay_offload_until_cuda_graph|"
        r"delta_offload_bytes_across_pp_ranks|fine_grained_offloading_\w+|"
        r"cpu_offloading_retain_pinned_cpu_buffers",
        "copies of offloaded activations are spread over the passes",
        unused=True,
    ),
    UnsupportedFamily(
        "other optimizers",
        r"soap_(shampoo_beta|precondition_frequency|use_kl_shampoo)",
        "it is an option of SOAP, but `optimizer` is adam, muon, lion or sgd",
        unused=True,
    ),
    UnsupportedFamily(
        "other Muons",
        r"muon_(scalar_optimizer|coefficient_type)",
        "leave it out: Muon has the coefficients `quintic`, and Adam trains weights that are not "
        "matrices",
    ),
    UnsupportedFamily(
        "kernels and layout of Muon",
        r"muon_use_syrk|(no_)?use_layer_wise_param_layout|use_padded_layerwise_optimizer",
        "it selects kernels or the place of whole matrices; with `use_distributed_optimizer` every "
        "rank orthogonalizes some of the matrices",
        unused=True,
    ),
    UnsupportedFamily(
        "fine-tuning with adapters",
        r"lora_\w+",
        "`peft_type: lora` trains low-rank adapters, with `lora_dim`, `lora_alpha`, "
        "`lora_dropout` and `lora_target_modules`; they are initialized like peft's",
    ),
    UnsupportedFamily(
        "separate loss masks",
        r"apply_sft_dataset_separated_loss_mask_if_existed",
        "only FlagScale's train_aquila_sft.py reads a separate data set of loss masks; `sft: "
        "true` computes the masks from the conversations",
        unused=True,
    ),
    UnsupportedFamily(
        "supervised fine-tuning",
        r"sft_\w+|finetune_dataset_type",
        "`sft: true` trains on conversations; `sft_format` sets their format and "
        "`chat_template` how they are converted to text",
    ),
    UnsupportedFamily(
        "fill-in-the-middle",
        r"fim_\w+",
        "fill-in-the-middle is not implemented; transform the data before training",
    ),
    UnsupportedFamily(
        "conversion of checkpoints",
        r"ckpt_convert_\w+",
        "it belongs to `ckpt_convert_format`, which converts a checkpoint instead of training; "
        "`flagscale convert` does",
        unused=True,
    ),
    UnsupportedFamily(
        "additional checkpoints",
        r"non_persistent_(global|local)_\w+|replication_factor|save_[wd]grads_interval",
        "copies between checkpoints are in the memory of two hosts "
        "(`non_persistent_save_interval`); files of them are not implemented",
    ),
    UnsupportedFamily(
        "recomputation per stage",
        r"recompute_(granularity|method|num_layers)_per_stage",
        "use `recompute_granularity_per_stage_micro_batch` and related arguments, which choose "
        "recomputation per stage and micro-batch",
    ),
    UnsupportedFamily(
        "the StableLM 2 schedule",
        r"lr_decay_stablelm2_\w+",
        "the schedule of StableLM 2 is not implemented; the most similar is `lr_decay_style: WSD`",
    ),
    UnsupportedFamily(
        "fully sharded data parallelism",
        r"\w*fsdp\w*|enable_full_sharding_in_hsdp|create_all_gather_group",
        "weights, gradients and the optimizer state are sharded by "
        "`data_parallel_sharding_strategy: optim_grads_params`",
    ),
    UnsupportedFamily(
        "NCCL user buffers and SHARP",
        r"use_nccl_ub|use_sharp|sharp_\w+|high_priority_stream_groups",
        "tune communication by the options of the backend (`comm`) and environment variables "
        "(`experiment.envs`)",
    ),
    UnsupportedFamily(
        "in-process restarts",
        r"inprocess_\w+|enable_ft_package|calc_ft_timeouts|ft_num_warmup_iters|adlr_autoresume\w*|"
        r"rerun_mode|result_rejected_tracker_filename",
        "`experiment.runner.max_restarts` restarts a failed job from its last checkpoint",
    ),
    UnsupportedFamily(
        "other kinds of layers",
        r"hybrid_\w+|heterogeneous_layers_\w+|moe_use_upcycling|moe_upcycling_granularity|"
        r"kitchen_\w+|te_precision_config_file",
        "all layers consist of attention and an MLP (or experts), with the same sizes and "
        "precision",
    ),
    UnsupportedFamily(
        "settings of tokenizers",
        r"tiktoken_\w+|tokenizer_(metadata|sentencepiece_\w+|hf_\w+)",
        "special tokens and settings are read from the tokenizer's files",
    ),
    UnsupportedFamily(
        "external telemetry",
        r"no_one_logger|one_logger_\w+|otel_\w+|app_tag_run_\w+|run_workload_inspector_server",
        "this program does not report to that service",
        unused=True,
    ),
    UnsupportedFamily(
        "FlagScale's performance monitor",
        r"enable_perf_monitor|(no_)?perf_(log_(interval|dir|format)|console_output|"
        r"memory_tracking|breakdown|max_log_files|model_type)",
        "progress lines and TensorBoard report throughput and memory every `log_interval` steps",
        unused=True,
    ),
    UnsupportedFamily(
        "details of the detection of stragglers",
        r"(no_)?straggler_(profiling_interval|report_interval|warmup_steps|"
        r"enable_(comm_logging|gpu_profile)|log_dir)|straggler_(ctrlr_port|minmax_count)|"
        r"disable_straggler_on_startup",
        "all ranks are compared at every report, without the first one (`log_straggler`, "
        "`straggler_threshold`)",
        unused=True,
    ),
    UnsupportedFamily(
        "kernels of FlagOS",
        r"te_fl_(prefer|per_op|allow_vendors|deny_vendors)|mg_fl_prefer|enable_flag_gems|"
        r"flag_gems_(log_path|unused)",
        "it selects kernels of FlagOS's libraries; this trainer's layers use torch's, compiled "
        "(`transformer_impl`)",
        unused=True,
    ),
    UnsupportedFamily(
        "metrics, traces and checks",
        r"wandb_log_model_interval|log_(progress|energy|memory_interval|"
        r"device_memory_used)|log_(throughput|loss_scale|l2_norm_grad|runtime|world_size|batch_size|"
        r"num_zeros_in_grad)_to_tensorboard|throughput_window_size|timing_log_(level|option)|"
        r"memory_keys|runtime_time_unit|logging_level|filter_warnings|modules_to_filter|"
        r"set_level_for_all_loggers|save_config_filepath|record_shapes|"
        r"nvtx_ranges|use_nsys_profiler|dump_param_to_param_group_map|"
        r"moe_routing_trace_\w+|gpu_sniff_test_interval|pytorch_profiler_collect_\w+|"
        r"save_(activations|params|tokens_per_expert)_interval|"
        r"check_for_spiky_loss|check_for_nan_in_loss|check_weight_hash_\w+",
        "this metric, trace or check is not implemented; "
        "docs/reference/configuration/logging.md lists the available ones",
        unused=True,
    ),
    UnsupportedFamily(
        "internals of Megatron-LM's training loop",
        r"empty_unused_memory_level|train_sync_interval|manual_gc_eval|"
        r"exit_signal_handler_for_dataloader|disable_gloo_process_groups|disable_jit_fuser|"
        r"use_persistent_ckpt_worker|ckpt_assume_constant_structure|save_tokenizer_assets|"
        r"dist_ckpt_\w+|distrib_optim_fully_reshardable_mem_efficient|te_rng_tracker|"
        r"no_scatter_gather_tensors_in_pipeline|ddp_num_buckets|"
        r"lazy_mpu_init|enable_experimental|disable_msc|tp_comm_overlap_cfg|"
        r"(no_)?use_tokenizer_model_from_checkpoint_args|(no_)?align_grad_reduce|enable_msc|"
        r"async_(ckpt_\w+|strategy)|ckpt_(pg_tensors_cache_\w+|drop_redundant_extra_state)|"
        r"ckpt_fully_parallel_(save|load)_\w+|(no_)?ckpt_load_validate_sharding_integrity|"
        r"exit_signal_handler_for_training|use_gloo_process_groups|use_gigatoken|"
        r"overlap_p2p_communication_warmup_flush|ddp_param_name_patterns_for_fp32_\w+",
        "it controls a part of Megatron-LM's training loop that this trainer does not have",
        unused=True,
    ),
)
"""The families, in the order in which names are matched."""
