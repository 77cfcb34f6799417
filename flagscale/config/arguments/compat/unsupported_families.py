"""Families of unsupported names that share one reason, as regular expressions.

:mod:`.unsupported` looks a name up here if it has no line of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class UnsupportedFamily(NamedTuple):
    """Names that have one reason, as a regular expression."""

    title: str
    names: str
    reason: str
    noted: bool = False


UNSUPPORTED_FAMILIES: tuple[UnsupportedFamily, ...] = (
    UnsupportedFamily(
        "reinforcement learning",
        r"(rl|grpo|langrl)_\w+|perform_rl_step|refit_method",
        "it is of reinforcement learning, which is not built; this program pre-trains and "
        "fine-tunes",
    ),
    UnsupportedFamily(
        "inference",
        r"inference_\w+|max_tokens_to_oom|use_legacy_static_engine|decode_only_cuda_graphs|"
        r"nccl_all_reduce_for_prefill|(enable|disable)_chunked_prefill|"
        r"moe_pad_experts_for_cuda_graph_inference|mamba_inference_\w+|num_speculative_tokens|"
        r"use_same_sampling_seed_across_dp_ranks",
        "it is of inference; this program trains",
    ),
    UnsupportedFamily(
        "BERT's second head",
        r"bert_no_binary_head|no_bert_binary_head",
        "BERT is trained here without that head in any case",
        noted=True,
    ),
    UnsupportedFamily(
        "T5 and retrieval",
        r"(ict|biencoder|bert|retriever|indexer)_\w+|output_bert_embeddings|titles_data_path|"
        r"query_in_block_prob|use_one_sent_docs|evidence_data_path|block_data_path|embedding_path|"
        r"sample_rate|decoder_(num_layers|seq_length)|relative_attention_\w+|retro_\w+",
        "it is of T5 or retrieval models; `family` has gpt and bert, others need an `entrypoint` "
        "of their own",
    ),
    UnsupportedFamily(
        "models of images",
        r"(vision|swin|dino)_\w+|num_classes|num_channels|img_[hw]|patch_dim|classes_fraction|"
        r"data_per_class_fraction|no_data_sharding|head_lr_mult|mask_(type|factor)|iter_per_epoch|"
        r"freeze_(LM|ViT)|allow_missing_vision_\w+|disable_vision_class_token|language_model_type|"
        r"image_\w+|mm_\w+|interleaved_dataset|training_dataset_only|dataloader_save|"
        r"enable_variable_seq_lengths|max_padding_length|extra_vocab_size|prompt_path",
        "it is of models of images; models of text are trained here, others need an `entrypoint` "
        "of their own",
    ),
    UnsupportedFamily(
        "robots' models",
        r"action_(horizon|steps|key|token_key)|state_key|stat_path|assets_base_dir|config_name|"
        r"ckpt_overwrite|tokenizer_max_length",
        "it is of FlagScale's models of robots' motions; models of text are trained here, and "
        "another's program runs by `experiment.task.type: command`",
    ),
    UnsupportedFamily(
        "mixers of other kinds",
        r"rwkv_\w+|gdp_\w+|mhc_\w+|enable_mhc_connections|dsa_\w+|mamba_training_\w+",
        "all layers are attention and MLP (or experts), with one residual stream",
    ),
    UnsupportedFamily(
        "distillation",
        r"logits_(save|load)_\w+|(knowledge_)?distill(ation)?_\w+|export_kd_\w+",
        "it is of learning from another model's answers, which is not built; the loss is the "
        "text's own",
    ),
    UnsupportedFamily(
        "maximal update parametrisation",
        r"use_mup|mup_\w+",
        "it would scale rates and initial weights by the width of the model, which is not built; "
        "write `lr` and `init_method_std` of this width",
    ),
    UnsupportedFamily(
        "multi-token prediction of other kinds",
        r"mtp_(use_repeated_layer|detach_heads|hsm|hybrid_override_pattern)",
        "it changes how further tokens are predicted, in a way that this trainer does not know",
    ),
    UnsupportedFamily(
        "yarn by other names",
        r"(no_)?yarn_\w+",
        "yarn scales the positions of `multi_latent_attention` alone, by "
        "`rotary_scaling_factor`, `original_max_position_embeddings`, `beta_fast` and `beta_slow`",
    ),
    UnsupportedFamily(
        "weights in shards",
        r"(expert_)?tensor_parallel_num_weight_shards|gtp_\w+",
        "it would keep weights in shards and gather them layer by layer; this trainer shards the "
        "optimizer only (use_distributed_optimizer)",
    ),
    UnsupportedFamily(
        "activations in pages",
        r"moe_paged_stash\w*|mlp_chunks_for_training",
        "it would save memory for activations; `recompute_granularity` does",
    ),
    UnsupportedFamily(
        "faults on purpose",
        r"fault_injector_\w+|error_injection_\w+",
        "it would make ranks fail on purpose; end a process by hand to see what a run does then",
    ),
    UnsupportedFamily(
        "the DualPipeV schedule",
        r"use_dualpipev|moe_fb_overlap",
        "it orders the passes of a step, and overlaps them, as DualPipeV does; steps are the same "
        "without, and `num_virtual_stages_per_pipeline_rank` shortens their pipeline",
        noted=True,
    ),
    UnsupportedFamily(
        "variables of NCCL's flight recorder",
        r"flight_recorder_\w+",
        "torch reads variables such as TORCH_FR_BUFFER_SIZE; give them in `experiment.envs`",
        noted=True,
    ),
    UnsupportedFamily(
        "kernels of Transformer Engine",
        r"use_transformer_engine_op_fuser|use_grouped_gemm_for_(dense_mlp|shared_expert)|"
        r"moe_(use_grouped_tensor|single_grouped_(weight|bias))|fused_residual_rmsnorm|"
        r"moe_(shared_expert|mlp)_glu_interleave_size|batch_invariant_backend|"
        r"mla_down_proj_fusion|flash_attention_version|overlap_dispatch_backward_with_\w+|"
        r"moe_(flex_dispatcher_num_sms|hybridep_\w+|ncclep_\w+|permute_fusion_into_hybridep)|"
        r"moe_(combine_bwd|dispatch_fwd)_dtype|high_priority_a2a_comm_stream|optimizer_cuda_graph",
        "it chooses among kernels and buffers that this trainer's own layers do not have",
        noted=True,
    ),
    UnsupportedFamily(
        "offloading in detail",
        r"activation_offload_fraction|delay_offload_until_cuda_graph|"
        r"delta_offload_bytes_across_pp_ranks|fine_grained_offloading_\w+|"
        r"cpu_offloading_retain_pinned_cpu_buffers",
        "it is of offloading activations, which needs Transformer Engine",
        noted=True,
    ),
    UnsupportedFamily(
        "optimizers of other kinds",
        r"lion_beta[12]|muon_(scalar_optimizer|coefficient_type|use_syrk)|"
        r"(no_)?use_layer_wise_param_layout",
        "it is of Muon and Lion; `optimizer` is adam or sgd",
        noted=True,
    ),
    UnsupportedFamily(
        "fine-tuning by adapters",
        r"lora_\w+",
        "`peft_type: lora` trains low-rank adapters, by `lora_dim`, `lora_alpha`, `lora_dropout` "
        "and `lora_target_modules`; they are drawn as peft draws them",
    ),
    UnsupportedFamily(
        "masks beside the text",
        r"apply_sft_dataset_separated_loss_mask_if_existed",
        "FlagScale's train_aquila_sft.py alone reads a data set of masks beside that of text; "
        "`sft: true` makes masks of conversations",
        noted=True,
    ),
    UnsupportedFamily(
        "supervised fine-tuning",
        r"sft_\w+|finetune_dataset_type",
        "`sft: true` trains on conversations, whose form `sft_format` says and whose text "
        "`chat_template` makes",
    ),
    UnsupportedFamily(
        "fill-in-the-middle",
        r"fim_\w+",
        "it would train on texts with their middle moved to the end; prepare such data beforehand",
    ),
    UnsupportedFamily(
        "conversion of checkpoints",
        r"ckpt_convert_\w+",
        "it would convert the checkpoint of `load` and end without training, which `flagscale "
        "convert` does; to train leave it out, and `export_huggingface` writes the result",
    ),
    UnsupportedFamily(
        "checkpoints beside those of the run",
        r"non_persistent_\w+|replication(_\w+)?|save_[wd]grads_interval",
        "it would keep further copies of the state for a while; to save more often take a shorter "
        "`save_interval` and `async_save`",
    ),
    UnsupportedFamily(
        "recomputation by stage alone",
        r"recompute_(granularity|method|num_layers)_per_stage",
        "it would recompute in some stages only; `recompute_granularity_per_stage_micro_batch` and "
        "its relatives choose layers by stage and micro-batch",
    ),
    UnsupportedFamily(
        "the StableLM 2 schedule",
        r"lr_decay_stablelm2_\w+",
        "it is of StableLM 2's schedule, which is not built; `lr_decay_style: WSD` is the nearest",
    ),
    UnsupportedFamily(
        "fully sharded data parallelism",
        r"\w*fsdp\w*|enable_full_sharding_in_hsdp|create_all_gather_group",
        "this trainer shards the optimizer only (use_distributed_optimizer)",
    ),
    UnsupportedFamily(
        "communication by user buffers and switches",
        r"use_nccl_ub|use_sharp|sharp_\w+|high_priority_stream_groups",
        "communication is tuned by the backend's own options (`comm`) and variables "
        "(`experiment.envs`)",
    ),
    UnsupportedFamily(
        "restarts inside a process",
        r"inprocess_\w+|enable_ft_package|calc_ft_timeouts|ft_num_warmup_iters|adlr_autoresume\w*|"
        r"rerun_mode|result_rejected_tracker_filename",
        "`experiment.runner.max_restarts` starts a failed job again from its last checkpoint",
    ),
    UnsupportedFamily(
        "layers of other kinds",
        r"hybrid_\w+|heterogeneous_layers_\w+|moe_use_upcycling|moe_upcycling_granularity|"
        r"kitchen_\w+|te_precision_config_file",
        "all layers are attention and MLP (or experts), built alike and in one precision",
    ),
    UnsupportedFamily(
        "tokenizers of other kinds",
        r"tiktoken_\w+|tokenizer_(metadata|sentencepiece_\w+|hf_\w+)",
        "special tokens and settings are read from the tokenizer's own files",
    ),
    UnsupportedFamily(
        "other programs' records",
        r"no_one_logger|one_logger_\w+|otel_\w+|app_tag_run_\w+|run_workload_inspector_server",
        "it is of a service that this program does not report to",
        noted=True,
    ),
    UnsupportedFamily(
        "figures and traces",
        r"wandb_log_model_interval|log_(progress|straggler|energy|memory_interval|"
        r"device_memory_used)|log_(throughput|loss_scale|l2_norm_grad|runtime|world_size|batch_size|"
        r"num_zeros_in_grad)_to_tensorboard|throughput_window_size|timing_log_(level|option)|"
        r"memory_keys|runtime_time_unit|logging_level|filter_warnings|modules_to_filter|"
        r"set_level_for_all_loggers|save_config_filepath|straggler_(ctrlr_port|minmax_count)|"
        r"disable_straggler_on_startup|record_(memory_history|shapes)|memory_snapshot_path|"
        r"nvtx_ranges|use_nsys_profiler|dump_param_to_param_group_map|"
        r"moe_routing_trace_\w+|gpu_sniff_test_interval|pytorch_profiler_collect_\w+|"
        r"save_(activations|params|tokens_per_expert)_interval|"
        r"check_for_spiky_loss|check_for_nan_in_loss|check_weight_hash_\w+",
        "this figure, trace or check is not made; docs/reference/configuration/logging.md lists "
        "the available ones",
        noted=True,
    ),
    UnsupportedFamily(
        "how Megatron-LM's own loop saves memory and time",
        r"empty_unused_memory_level|train_sync_interval|manual_gc_eval|"
        r"exit_signal_handler_for_dataloader|disable_gloo_process_groups|disable_jit_fuser|"
        r"use_persistent_ckpt_worker|ckpt_assume_constant_structure|save_tokenizer_assets|"
        r"dist_ckpt_\w+|distrib_optim_fully_reshardable_mem_efficient|te_rng_tracker|"
        r"no_scatter_gather_tensors_in_pipeline|ddp_num_buckets|"
        r"lazy_mpu_init|enable_experimental|disable_msc|tp_comm_overlap_cfg|muon_no_split_qkv|"
        r"(no_)?use_tokenizer_model_from_checkpoint_args|(no_)?align_grad_reduce|enable_msc|"
        r"async_(ckpt_\w+|strategy)|ckpt_(pg_tensors_cache_\w+|drop_redundant_extra_state)|"
        r"ckpt_fully_parallel_(save|load)_\w+|(no_)?ckpt_load_validate_sharding_integrity|"
        r"exit_signal_handler_for_training|use_gloo_process_groups|use_gigatoken|"
        r"overlap_p2p_communication_warmup_flush|ddp_param_name_patterns_for_fp32_\w+",
        "it steers a part of Megatron-LM's training loop that this one does not have",
        noted=True,
    ),
)
"""Names that have no line of their own, in the order in which they are asked."""
