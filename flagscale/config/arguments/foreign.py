"""Names of Megatron-LM and FlagScale that are no arguments here: what each would do, why not here,
and what to write instead.

A *refused* name ends the start; a *noted* one changes nothing that is trained, saved or read, so a
YAML may keep it, and is told. A switch that is off asks for nothing and is taken in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

_META = "it is what a checkpoint remembers, and here the YAML says what is trained"

REFUSED: Mapping[str, str] = {
    "params_dtype": "it follows from `bf16` and `fp16`",
    "pipeline_dtype": "it follows from `bf16` and `fp16`",
    "autocast_dtype": "it follows from `bf16` and `fp16`",
    "data_parallel_size": "it follows from the number of ranks and the other parallel sizes",
    "local_rank": "torchrun tells every rank its own",
    "padded_vocab_size": "it follows from `vocab_size` and `make_vocab_size_divisible_by`",
    "blend": "it follows from `data_path`",
    "blend_per_split": "it follows from `train_data_path`, `valid_data_path` and `test_data_path`",
    "data_args_path": "write its contents as `data_path`",
    "per_split_data_args_path": "write its contents as `train_data_path`, `valid_data_path` and "
    "`test_data_path`",
    "per_dataset_sequences_path": "data sets are counted when they are opened; leave it out",
    "rampup_save_interval": "it would be the `save_interval` while the batch grows; there is one "
    "for the whole run",
    "save_when_num_microbatches_change": "it would save when the batch has grown; `save_interval` "
    "says when",
    "decrease_batch_size_if_needed": "it would train on fewer sequences than the YAML says; give a "
    "`global_batch_size` that the replicas can share",
    "phase_transition_iterations": "it says where data_path is exchanged by hand; write the "
    "mixtures as `data_phases`",
    "spec": "it names a Python function that builds the layers; this version builds its own",
    "use_legacy_models": "only megatron.core's models exist here",
    "yaml_cfg": "this YAML is it",
    "use_checkpoint_args": _META,
    "use_mp_args_from_checkpoint_args": _META + ", in any layout",
    "ckpt_step": "it would load this step and not the newest; write the step into "
    "latest_checkpointed_iteration.txt in the directory of `load`",
    "no_weight_decay_cond_type": "biases and norms alone have no weight decay here; "
    "`apply_wd_to_qk_layernorm` adds the norms of queries and keys",
    "checkpoint_activations": "write `recompute_granularity: full`, `recompute_method: uniform` "
    "and `recompute_num_layers: 1`",
    "most_recent_k": "`keep_last` says how many checkpoints are kept",
    "skip_iters_range": "it would pass over the data of these steps; list them as "
    "`iterations_to_skip`",
    "skip_samples_range": "it would pass over these samples; list their steps as "
    "`iterations_to_skip`",
    "auto_skip_spiky_loss": "it would leave out steps whose loss jumps; `loss_spike_factor` warns "
    "of them, and `iterations_to_skip` leaves them out of a run from an earlier checkpoint",
    "spiky_loss_threshold": "`loss_spike_factor` warns of a loss that jumps",
    "auto_tune": "there is no automatic tuner; write the sizes that it would find",
    "extra_valid_data_path": "there is one validation set; `valid_data_path` takes a blend",
    "extra_eval_interval": "there is one validation set, evaluated every `eval_interval` steps",
    "vocab_extra_ids": "it is of T5's span masking; there is no T5 here: `family` has gpt and bert",
    "bert_binary_head": "BERT is trained here to tell masked tokens alone, without a head that "
    "tells whether one sentence follows another; leave it out",
    "short_seq_prob": "sequences are full of text and all as long as `seq_length`; leave it out",
    "trust_remote_code": "no code of a tokenizer's directory is run; convert it to tokenizer.json",
    "tokenizer_special_tokens": "special tokens are read from the tokenizer's own files",
    "wandb_api_key": "a key does not belong in a YAML; set WANDB_API_KEY in `experiment.envs` or "
    "where you start from",
    "wandb_mode": "set the variable WANDB_MODE in `experiment.envs`",
    "wandb_log_model": "it would upload checkpoints to Weights & Biases; they stay in `save`",
    "use_dualpipev": "it would run the DualPipeV schedule; take the interleaved one: "
    "`num_virtual_stages_per_pipeline_rank`",
    "moe_fb_overlap": "it belongs to the DualPipeV schedule, which is not built",
    "use_te": "this trainer has layers of its own: `transformer_impl: auto`",
    "num_mtp_predictor": "multi-token prediction is not built",
    "mtp_loss_coeff": "multi-token prediction is not built",
    "qk_layernorm_hidden_dim": "it would normalise queries and keys over all heads together; "
    "`qk_layernorm` does so a head",
    "quick_geglu": "the MLP's functions are GELU, `openai_gelu`, `swiglu` and `squared_relu`",
    "onnx_safe": "the model is not exported",
    "init_method_xavier_uniform": "weights are drawn from a normal distribution of "
    "`init_method_std`",
    "grad_reduce_in_bf16": "gradients of 16-bit weights are added up in fp32",
    "use_tp_pp_dp_mapping": "ranks are ordered tensor, context, data, pipeline",
    "fake_process_group": "it would leave all communication out; ranks here are a real job",
    "data_parallel_random_init": "replicas start from the same weights, whatever the layout",
    "distributed_timeout_seconds_after_init": "`distributed_timeout_minutes` holds for all the run",
    "nccl_communicator_config_path": "write NCCL's options into `comm`",
    "exit_signal": "SIGTERM is the signal that ends a run cleanly",
    "load_main_params_from_ckpt": "with `no_load_optim` the optimizer takes the loaded weights",
    "auto_detect_ckpt_format": "`load` takes this project's checkpoints alone, and "
    "`pretrained_checkpoint` models of Hugging Face",
    "dist_ckpt_strictness": "a checkpoint that does not fit is refused",
}
"""Names with a reason of their own. It ends the sentence "cannot be given: ..."."""


class Family(NamedTuple):
    """Names that have one reason, as a regular expression."""

    title: str
    names: str
    reason: str
    noted: bool = False


FAMILIES: tuple[Family, ...] = (
    Family(
        "reinforcement learning",
        r"(rl|grpo|langrl)_\w+|perform_rl_step|refit_method",
        "it is of reinforcement learning, which is not built; this program pre-trains and "
        "fine-tunes",
    ),
    Family(
        "inference",
        r"inference_\w+|max_tokens_to_oom|use_legacy_static_engine|decode_only_cuda_graphs|"
        r"nccl_all_reduce_for_prefill|(enable|disable)_chunked_prefill|"
        r"moe_pad_experts_for_cuda_graph_inference",
        "it is of inference; this program trains",
    ),
    Family(
        "BERT's second head",
        r"bert_no_binary_head|no_bert_binary_head",
        "BERT is trained here without that head in any case",
        noted=True,
    ),
    Family(
        "T5 and retrieval",
        r"(ict|biencoder|bert|retriever|indexer)_\w+|output_bert_embeddings|titles_data_path|"
        r"query_in_block_prob|use_one_sent_docs|evidence_data_path|block_data_path|embedding_path|"
        r"sample_rate|decoder_(num_layers|seq_length)|relative_attention_\w+|retro_\w+",
        "it is of T5 or retrieval models; `family` has gpt and bert, others need an `entrypoint` "
        "of their own",
    ),
    Family(
        "models of images",
        r"(vision|swin|dino)_\w+|num_classes|num_channels|img_[hw]|patch_dim|classes_fraction|"
        r"data_per_class_fraction|no_data_sharding|head_lr_mult|mask_(type|factor)|iter_per_epoch",
        "it is of models of images; models of text are trained here, others need an `entrypoint` "
        "of their own",
    ),
    Family(
        "fine-tuning by adapters",
        r"lora_\w+",
        "`peft_type: lora` trains low-rank adapters, by `lora_dim`, `lora_alpha`, `lora_dropout` "
        "and `lora_target_modules`; they are drawn as peft draws them",
    ),
    Family(
        "supervised fine-tuning",
        r"sft_\w+|apply_sft_\w+|finetune_dataset_type",
        "`sft: true` trains on conversations, whose form `sft_format` says and whose text "
        "`chat_template` makes",
    ),
    Family(
        "fill-in-the-middle",
        r"fim_\w+",
        "it would train on texts with their middle moved to the end; prepare such data beforehand",
    ),
    Family(
        "conversion of checkpoints",
        r"ckpt_convert_\w+",
        "training converts no checkpoints; `flagscale convert` does",
    ),
    Family(
        "checkpoints beside those of the run",
        r"non_persistent_\w+|replication(_\w+)?|save_[wd]grads_interval",
        "it would keep further copies of the state for a while; to save more often take a shorter "
        "`save_interval` and `async_save`",
    ),
    Family(
        "recomputation by stage and micro-batch",
        r"recompute_(granularity|method|num_layers)_per_stage(_micro_batch)?",
        "it would recompute in some stages and micro-batches only; recomputation is the same in "
        "all: `recompute_granularity`, `recompute_method`, `recompute_num_layers`",
    ),
    Family(
        "the StableLM 2 schedule",
        r"lr_decay_stablelm2_\w+",
        "it is of StableLM 2's schedule, which is not built; `lr_decay_style: WSD` is the nearest",
    ),
    Family(
        "fully sharded data parallelism",
        r"\w*fsdp\w*|enable_full_sharding_in_hsdp|create_all_gather_group",
        "this trainer shards the optimizer only (use_distributed_optimizer)",
    ),
    Family(
        "communication by user buffers and switches",
        r"use_nccl_ub|use_sharp|sharp_\w+|high_priority_stream_groups",
        "communication is tuned by the backend's own options (`comm`) and variables "
        "(`experiment.envs`)",
    ),
    Family(
        "restarts inside a process",
        r"inprocess_\w+|enable_ft_package|calc_ft_timeouts|ft_num_warmup_iters|adlr_autoresume\w*|"
        r"rerun_mode|error_injection_\w+|result_rejected_tracker_filename",
        "`experiment.runner.max_restarts` starts a failed job again from its last checkpoint",
    ),
    Family(
        "layers of other kinds",
        r"hybrid_\w+|heterogeneous_layers_\w+|moe_use_upcycling|moe_upcycling_granularity|"
        r"kitchen_\w+|te_precision_config_file",
        "all layers are attention and MLP (or experts), built alike and in one precision",
    ),
    Family(
        "tokenizers of other kinds",
        r"tiktoken_\w+|tokenizer_(metadata|sentencepiece_legacy|hf_\w+)",
        "special tokens and settings are read from the tokenizer's own files",
    ),
    Family(
        "other programs' records",
        r"no_one_logger|one_logger_\w+|app_tag_run_\w+|run_workload_inspector_server",
        "it is of a service inside NVIDIA",
        noted=True,
    ),
    Family(
        "figures and traces",
        r"wandb_log_model_interval|log_(progress|straggler|energy|memory_interval|"
        r"device_memory_used)|log_(throughput|loss_scale|l2_norm_grad|runtime|world_size|batch_size|"
        r"num_zeros_in_grad)_to_tensorboard|throughput_window_size|timing_log_(level|option)|"
        r"memory_keys|runtime_time_unit|logging_level|filter_warnings|modules_to_filter|"
        r"set_level_for_all_loggers|save_config_filepath|straggler_(ctrlr_port|minmax_count)|"
        r"disable_straggler_on_startup|record_(memory_history|shapes)|memory_snapshot_path|"
        r"nvtx_ranges|use_nsys_profiler|dump_param_to_param_group_map|"
        r"check_for_spiky_loss|check_for_nan_in_loss|check_weight_hash_\w+",
        "this figure, trace or check is not made; docs/configuration.md has those that are",
        noted=True,
    ),
    Family(
        "how Megatron-LM's own loop saves memory and time",
        r"empty_unused_memory_level|train_sync_interval|manual_gc_eval|"
        r"exit_signal_handler_for_dataloader|disable_gloo_process_groups|disable_jit_fuser|"
        r"use_persistent_ckpt_worker|ckpt_assume_constant_structure|save_tokenizer_assets|"
        r"dist_ckpt_\w+|distrib_optim_fully_reshardable_mem_efficient|te_rng_tracker|"
        r"no_scatter_gather_tensors_in_pipeline|no_align_grad_reduce|ddp_num_buckets|"
        r"lazy_mpu_init|enable_experimental|disable_msc|tp_comm_overlap_cfg|muon_no_split_qkv|"
        r"no_use_tokenizer_model_from_checkpoint_args|use_tokenizer_model_from_checkpoint_args",
        "it steers a part of Megatron-LM's training loop that this one does not have",
        noted=True,
    ),
)
"""Names that have no line of their own, in the order in which they are asked."""

EXPERIMENT: Mapping[str, str] = {
    "auto_tuner": "there is no automatic tuner; write the sizes that it would find into `train`",
}
"""Keys of ``experiment``."""

VALUES: Mapping[tuple[str, str], str] = {
    ("action", "auto_tune"): "there is no automatic tuner; write the sizes that it would find",
    ("lr_decay_style", "stablelm2-scheduler"): "a schedule of StableLM 2; WSD is the nearest",
    ("position_embedding_type", "yarn"): "not built; use_rope_scaling scales as Llama 3.1 does",
    ("position_embedding_type", "mrope"): "it is of models of images and video",
    ("position_embedding_type", "relative"): "it is of T5 models",
    ("tokenizer_type", "TikTokenizer"): "convert it to tokenizer.json and take "
    "HuggingFaceTokenizer",
    ("tokenizer_type", "SFTTokenizer"): "take HuggingFaceTokenizer, and `sft: true` to train on "
    "conversations",
    ("tokenizer_type", "MultimodalTokenizer"): "it is of models of images; models of text are "
    "trained here",
    ("tokenizer_type", "NullMultimodalTokenizer"): "it is of models of images; NullTokenizer "
    "counts ids",
    ("tokenizer_type", "Qwen2VLTokenizer"): "it is of models of images; Qwen2TokenizerFS reads the "
    "text's",
    ("tokenizer_type", "BertWordPieceLowerCase"): "HuggingFaceTokenizer reads a model's "
    "tokenizer.json",
    ("tokenizer_type", "BertWordPieceCase"): "HuggingFaceTokenizer reads a model's tokenizer.json",
}
"""Values that are no choices here, by argument: why not, and what to take instead."""


@lru_cache(maxsize=512)
def family(name: str) -> Family | None:
    """The family that a name is of, which is no argument here and has no line of its own."""
    return next((one for one in FAMILIES if re.fullmatch(one.names, name)), None)


def refusal(name: str) -> str | None:
    """Why a name cannot be given; None for one that is noted or that nobody knows."""
    found = family(name)
    return REFUSED.get(name) or (found.reason if found and not found.noted else None)


def remark(name: str) -> str | None:
    """Why a name that may be given has no effect; None for all others."""
    found = None if name in REFUSED else family(name)
    return found.reason if found and found.noted else None
