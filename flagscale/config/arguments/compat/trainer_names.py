"""Names of other trainers' settings, with the keys of this project that replace them.

The names are those of Hugging Face's ``TrainingArguments``, of PEFT, TRL, Axolotl, LLaMA-Factory,
PyTorch Lightning and DeepSpeed, and options of torchrun. None of them is accepted: a message states
the key to write, and the value that it has. A name that this project has itself, such as
``weight_decay``, is not listed.

Texts that begin with "leave it out" describe settings that this project needs no key for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.compat.replacement_rules import (
    BATCH,
    MICRO_BATCH,
    RECOMPUTE_ALL,
    SAMPLES,
    STEPS,
    SUPPORTED_LOGGERS,
    Entry,
    Replacement,
    Setting,
    TrainerName,
    advice,
    by_value,
    computed,
    global_batch_of_accumulation,
    interval,
    interval_of_strategy,
    layers_to_train,
    load_of_resume,
    loggers_of_report_to,
    minutes_of_timeout,
    patterns,
    recomputation_of_switch,
    same_value,
    samples_of_epochs,
    split_of_validation,
    steps_of_limit,
    warmup_of_steps,
)
from flagscale.config.arguments.spec.argument import SettingContext

_DECAY_STYLES = (
    "the implemented schedules are constant, linear, cosine, inverse-square-root and WSD "
    "(`train.model.lr_decay_style`)"
)
_LR_DECAY = by_value(
    "train.model.lr_decay_style",
    {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "inverse_sqrt": "inverse-square-root",
        "warmup_stable_decay": "WSD",
        "cosine_with_min_lr": Replacement(
            (Setting("train.model.lr_decay_style", "cosine"),),
            "`train.model.min_lr` sets the learning rate at the end",
        ),
    },
    _DECAY_STYLES,
)
_ADAM = ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_OPTIMIZER = by_value(
    "train.model.optimizer",
    {
        **dict.fromkeys(_ADAM, "adam"),
        **dict.fromkeys(("lion", "lion_32bit"), "lion"),
        **{name: name for name in ("sgd", "muon")},
    },
    "the implemented optimizers are adam (AdamW), muon, lion and sgd (`train.model.optimizer`)",
)
_ATTENTION = by_value(
    "train.model.attention_backend",
    dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "sdpa", "eager"),
        "leave it out: `train.model.attention_backend: auto` selects the kernel",
    ),
    "auto selects the kernel",
)
_DTYPE = by_value(
    "train.system.bf16",
    {
        **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), True),
        **dict.fromkeys(
            ("float16", "fp16", "torch.float16"),
            Replacement((Setting("train.system.fp16", True),)),
        ),
        **dict.fromkeys(
            ("float32", "fp32", "torch.float32", "no"), "leave it out: the default is fp32"
        ),
    },
    "`bf16: true` and `fp16: true` set the precision of training",
)
_ZERO = (
    "`train.system.data_parallel_sharding_strategy` shards over data-parallel ranks: optim, "
    "optim_grads or optim_grads_params (ZeRO stages 1 to 3)"
)
_HUB = (
    "nothing is uploaded; `train.system.export_huggingface` writes the trained model for "
    "transformers"
)
_BEST = by_value(
    "train.system.save_best",
    {
        True: Replacement(
            (Setting("train.system.save_best", True),),
            "the link `best` in the directory of checkpoints names it",
        ),
        False: "leave it out: this is the default",
    },
)
_BEST_METRIC = "leave it out: the best checkpoint is that of the lowest validation loss"
_NO_TRACKIO = f"Trackio is not supported; {SUPPORTED_LOGGERS}"
_LOG_LEVEL = "leave it out: the launcher's messages have no levels"
_METRICS = "leave it out: an evaluation computes loss and perplexity only"
_KERNELS = (
    "leave it out: `train.system.transformer_impl: auto` selects compiled layers and fused kernels"
)
_DDP = "leave it out: gradients are reduced by megatron.core, not by torch's DDP"
_EVAL_BATCH = "leave it out: evaluation uses `train.model.micro_batch_size`"
_NO_EVALUATION = Replacement((Setting("train.model.eval_iters", 0),))
_HUGGING_FACE: Mapping[str, Entry] = {
    # Length, batch and learning rate
    "max_steps": computed(steps_of_limit, STEPS),
    "num_train_epochs": computed(samples_of_epochs, SAMPLES),
    "per_device_train_batch_size": same_value(MICRO_BATCH),
    "per_gpu_train_batch_size": same_value(MICRO_BATCH),
    "gradient_accumulation_steps": computed(global_batch_of_accumulation, BATCH),
    "auto_find_batch_size": advice(
        "`flagscale estimate` predicts the memory of a step without devices; set "
        "`train.model.micro_batch_size`"
    ),
    "learning_rate": same_value("train.model.lr"),
    "lr_scheduler_type": _LR_DECAY,
    "lr_scheduler_kwargs": advice(
        "options of a schedule are arguments: `train.model.min_lr`, `train.model.lr_decay_iters` "
        "and `train.model.lr_wsd_decay_iters`"
    ),
    "warmup_steps": computed(
        warmup_of_steps, "train.model.lr_warmup_iters", "train.model.lr_warmup_fraction"
    ),
    "warmup_ratio": same_value("train.model.lr_warmup_fraction"),
    # Optimizer and loss
    "optim": _OPTIMIZER,
    "optim_args": advice(
        "options of the optimizer are arguments, such as `train.model.adam_beta2`"
    ),
    "optim_target_modules": advice("GaLore and APOLLO are not implemented; `peft_type: lora` is"),
    "adafactor": _OPTIMIZER,
    "adam_epsilon": same_value("train.model.adam_eps"),
    "max_grad_norm": same_value("train.model.clip_grad"),
    "label_smoothing_factor": advice("label smoothing is not implemented"),
    "neftune_noise_alpha": advice("noise in embeddings is not implemented"),
    "average_tokens_across_devices": same_value("train.model.calculate_per_token_loss"),
    # Precision, memory and speed
    "bf16_full_eval": advice("leave it out: evaluation has the precision of training"),
    "fp16_full_eval": advice("leave it out: evaluation has the precision of training"),
    "half_precision_backend": advice(
        "leave it out: `train.system.bf16: true` selects mixed precision"
    ),
    "fp16_opt_level": advice("leave it out: `train.system.fp16: true` selects mixed precision"),
    "tf32": advice(
        "it is no argument; set NVIDIA_TF32_OVERRIDE in `experiment.envs`, or train with "
        "`train.system.bf16: true`"
    ),
    "gradient_checkpointing": computed(
        recomputation_of_switch, *(s.key for s in RECOMPUTE_ALL.settings)
    ),
    "activation_checkpointing": computed(
        recomputation_of_switch, *(s.key for s in RECOMPUTE_ALL.settings)
    ),
    "gradient_checkpointing_kwargs": advice("leave it out"),
    "activation_checkpointing_kwargs": advice("leave it out"),
    "use_reentrant": advice("leave it out: it is an option of another implementation"),
    "torch_compile": advice(_KERNELS),
    "torch_compile_backend": advice(_KERNELS),
    "torch_compile_mode": advice(_KERNELS),
    "use_liger_kernel": advice(_KERNELS),
    "liger_kernel_config": advice(_KERNELS),
    "torch_empty_cache_steps": advice("leave it out: memory of the device is not returned"),
    "use_cache": advice("leave it out: only generation has a cache of keys and values"),
    # Reporting
    "logging_steps": interval("train.system.log_interval"),
    "logging_strategy": interval_of_strategy(
        "train.system.log_interval",
        Replacement((), "progress lines cannot be disabled; increase `train.system.log_interval`"),
    ),
    "logging_first_step": advice("leave it out: the first and the last step are always logged"),
    "logging_dir": same_value("train.system.tensorboard_dir"),
    "logging_nan_inf_filter": advice("leave it out: the loss is reported as it is"),
    "log_on_each_node": advice("leave it out: each host has its own log"),
    "log_level": advice(_LOG_LEVEL),
    "log_level_replica": advice(_LOG_LEVEL),
    "disable_tqdm": advice("leave it out: logs have no progress bars"),
    "include_num_input_tokens_seen": advice(
        "leave it out: the number of trained samples is always reported"
    ),
    "include_tokens_per_second": advice("leave it out: tokens per second are always reported"),
    "report_to": computed(loggers_of_report_to, "train.system.wandb_project"),
    "run_name": same_value("experiment.exp_name"),
    "project": same_value("train.system.wandb_project"),
    "trackio_space_id": advice(_NO_TRACKIO),
    "trackio_bucket_id": advice(_NO_TRACKIO),
    "trackio_static_space_id": advice(_NO_TRACKIO),
    # Evaluation
    "eval_steps": interval("train.model.eval_interval"),
    "eval_strategy": interval_of_strategy("train.model.eval_interval", _NO_EVALUATION),
    "evaluation_strategy": interval_of_strategy("train.model.eval_interval", _NO_EVALUATION),
    "eval_delay": advice("evaluations run every `train.model.eval_interval` steps from the start"),
    "eval_on_start": advice("evaluations run every `train.model.eval_interval` steps"),
    "per_device_eval_batch_size": advice(_EVAL_BATCH),
    "eval_accumulation_steps": advice(_EVAL_BATCH),
    "prediction_loss_only": advice(_METRICS),
    "eval_do_concat_batches": advice(_METRICS),
    "eval_use_gather_object": advice(_METRICS),
    "include_for_metrics": advice(_METRICS),
    "batch_eval_metrics": advice(_METRICS),
    # Checkpoints
    "output_dir": same_value(
        "experiment.exp_dir", "checkpoints are saved in its directory checkpoints"
    ),
    "overwrite_output_dir": advice(
        "leave it out: a run resumes from its newest checkpoint; `train.system.load: null` starts "
        "at step 0"
    ),
    "save_steps": interval("train.system.save_interval"),
    "save_strategy": interval_of_strategy(
        "train.system.save_interval",
        Replacement(
            (Setting("train.system.save", "null"),),
            "without `train.system.save_interval` only the end of training is saved",
        ),
    ),
    "save_total_limit": same_value("train.system.keep_last"),
    "save_only_model": same_value("train.system.no_save_optim"),
    "save_safetensors": advice(_HUB.removeprefix("nothing is uploaded; ")),
    "save_on_each_node": advice(
        "leave it out: with `experiment.runner.no_shared_fs: true` each host saves on its own disk"
    ),
    "enable_jit_checkpoint": advice("leave it out: SIGTERM ends a run after saving a checkpoint"),
    "resume_from_checkpoint": computed(load_of_resume, "train.system.load"),
    "ignore_data_skip": advice("leave it out: a resumed run continues after its last sample"),
    "restore_callback_states_from_checkpoint": advice("leave it out: there are no callbacks"),
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": advice(f"{_BEST_METRIC} (`train.system.save_best: true`)"),
    "greater_is_better": advice(f"{_BEST_METRIC} (`train.system.save_best: true`)"),
    "early_stopping_threshold": same_value("train.model.early_stopping_min_delta"),
    "push_to_hub": advice(_HUB),
    "hub_model_id": advice(_HUB),
    "hub_token": advice(_HUB),
    "hub_strategy": advice(_HUB),
    "hub_private_repo": advice(_HUB),
    "hub_always_push": advice(_HUB),
    "hub_revision": advice(_HUB),
    # Data
    "dataloader_num_workers": same_value("train.data.num_workers"),
    "dataloader_pin_memory": advice("leave it out: batches are copied from pinned memory"),
    "dataloader_persistent_workers": advice("leave it out: workers live as long as the run"),
    "dataloader_prefetch_factor": advice("leave it out: workers prefetch"),
    "dataloader_multiprocessing_context": advice("leave it out"),
    "dataloader_in_order": advice("leave it out: batches are always in order"),
    "dataloader_drop_last": advice("leave it out: incomplete batches are not trained"),
    "remove_unused_columns": advice("leave it out: other fields of a record are ignored"),
    "label_names": advice("leave it out: the labels are the following tokens"),
    "group_by_length": advice("leave it out: `train.data.sft_packing` packs conversations"),
    "train_sampling_strategy": advice("leave it out: `train.data.dataloader_type` sets the order"),
    "length_column_name": advice("leave it out: lengths are counted"),
    "data_seed": same_value("train.system.seed"),
    # Devices and processes
    "use_cpu": by_value(
        "train.system.device",
        {True: "cpu", False: "leave it out: this is the default"},
        "cpu trains without a GPU",
    ),
    "no_cuda": by_value(
        "train.system.device",
        {True: "cpu", False: "leave it out: this is the default"},
        "cpu trains without a GPU",
    ),
    "full_determinism": same_value("train.system.deterministic_mode"),
    "ddp_backend": same_value("train.system.distributed_backend"),
    "ddp_timeout": computed(minutes_of_timeout, "train.system.distributed_timeout_minutes"),
    "ddp_bucket_cap_mb": advice(
        "`train.system.bucket_size` is the number of parameters in a bucket of gradients"
    ),
    "ddp_find_unused_parameters": advice(_DDP),
    "ddp_broadcast_buffers": advice(_DDP),
    "ddp_static_graph": advice(_DDP),
    "fsdp": advice(_ZERO),
    "fsdp_config": advice(_ZERO),
    "fsdp_min_num_params": advice(_ZERO),
    "fsdp_transformer_layer_cls_to_wrap": advice(_ZERO),
    "deepspeed": advice(f"DeepSpeed is not supported; {_ZERO}"),
    "accelerator_config": advice("leave it out: Accelerate is not used"),
    "parallelism_config": advice(
        "the sizes are arguments: `train.system.tensor_model_parallel_size`, "
        "`train.system.pipeline_model_parallel_size` and `train.system.context_parallel_size`"
    ),
    "debug": advice("leave it out: hangs and failures are always diagnosed"),
    "skip_memory_metrics": advice("leave it out: peak memory is always reported"),
    # What is done
    "do_train": by_value(
        "train.model.skip_train",
        {True: "leave it out: a run trains", False: True},
        "its opposite evaluates without training",
    ),
    "do_eval": by_value(
        "train.model.eval_iters",
        {True: "leave it out: `train.model.eval_interval` sets how often", False: 0},
        "0 disables evaluation",
    ),
    "do_predict": advice("generation is not an action; `train.data.eval_prompts` is"),
}
_WHOLE_TEXT = (
    "the loss of conversations covers answers only; for a loss of all tokens, tokenize the text "
    "with tools/data/preprocess.py"
)
_TOKENIZER_FILES = "leave it out: special tokens are read from the files of the tokenizer"
_DPO_LOSS = by_value(
    "train.data.dpo_loss",
    {"sigmoid": "sigmoid", "ipo": "ipo"},
    "the implemented losses are sigmoid and ipo",
)
_WITHOUT_REFERENCE = by_value(
    "train.data.dpo",
    {False: "leave it out: this is the default"},
    "training without a reference model is not implemented",
)
_PAIR_LENGTH = (
    "`train.model.seq_length` limits prompt and answer together, and `train.data.sft_too_long` "
    "truncates their end"
)
_TRL: Mapping[str, Entry] = {
    "max_seq_length": same_value("train.model.seq_length"),
    "max_length": same_value("train.model.seq_length"),
    "model_max_length": same_value("train.model.seq_length"),
    "block_size": same_value("train.model.seq_length"),
    "cutoff_len": same_value("train.model.seq_length"),
    "packing": same_value("train.data.sft_packing"),
    "model_name_or_path": same_value(
        "train.system.pretrained_checkpoint", "a directory with config.json and *.safetensors"
    ),
    "dataset_name": same_value("train.data.data_path", "files of this machine"),
    "attn_implementation": _ATTENTION,
    "torch_dtype": _DTYPE,
    "mixed_precision": _DTYPE,
    "dataset_text_field": advice(
        "`train.data.sft_format` names the form of conversations; tools/data/preprocess.py "
        "--json-keys tokenizes text"
    ),
    "completion_only_loss": by_value(
        "train.data.sft", {True: True, False: _WHOLE_TEXT}, "the loss covers answers only"
    ),
    "assistant_only_loss": by_value(
        "train.data.sft", {True: True, False: _WHOLE_TEXT}, "the loss covers answers only"
    ),
    "train_on_inputs": by_value(
        "train.data.sft", {True: _WHOLE_TEXT, False: True}, "the loss covers answers only"
    ),
    "chat_template_path": same_value("train.data.chat_template", "a .jinja file"),
    "packing_strategy": advice("leave it out: conversations are packed best fit"),
    "eval_packing": advice("leave it out: `train.data.sft_packing` applies to all data"),
    "padding_free": advice("leave it out: `train.data.sft_packing` packs without padding"),
    "pad_to_multiple_of": advice("leave it out: sequences have `train.model.seq_length` tokens"),
    "dataset_num_proc": advice("leave it out: conversations are tokenized once and cached"),
    "dataset_kwargs": advice("leave it out"),
    "eos_token": advice(_TOKENIZER_FILES),
    "pad_token": advice(_TOKENIZER_FILES),
    "model_init_kwargs": advice("leave it out: config.json describes the model"),
    "activation_offloading": advice(
        "set `train.system.cpu_offloading_num_layers` to a number of layers; "
        "`train.system.recompute_granularity: auto` recomputes activations"
    ),
    "use_peft": by_value(
        "train.model.peft_type",
        {True: "lora", False: "leave it out: this is the default"},
        "lora trains adapters",
    ),
    "load_in_4bit": advice("quantized base models are not implemented; `peft_type: lora` is"),
    "load_in_8bit": advice("quantized base models are not implemented; `peft_type: lora` is"),
    "beta": same_value("train.data.dpo_beta"),
    "loss_type": _DPO_LOSS,
    "label_smoothing": same_value("train.data.dpo_label_smoothing"),
    "reference_free": _WITHOUT_REFERENCE,
    "precompute_ref_log_probs": advice("leave it out: the reference model scores pairs once"),
    "precompute_ref_batch_size": advice("leave it out: it is `train.model.micro_batch_size`"),
    "max_prompt_length": advice(_PAIR_LENGTH),
    "max_completion_length": advice(_PAIR_LENGTH),
    "truncation_mode": advice(_PAIR_LENGTH),
}
_FREEZE_KEY, _TRAIN_KEY = "train.model.freeze_parameters", "train.model.trainable_parameters"
_FREEZE = patterns(_FREEZE_KEY)
_FREEZE_MODULES: Mapping[str, Entry] = dict.fromkeys(
    ("freeze_modules", "frozen_modules", "modules_to_freeze", "freeze_params", "frozen_parameters"),
    _FREEZE,
)
_AXOLOTL: Mapping[str, Entry] = {
    "unfrozen_parameters": patterns(_TRAIN_KEY),
    "sequence_len": same_value("train.model.seq_length"),
    "sample_packing": same_value("train.data.sft_packing"),
    "rl_beta": same_value("train.data.dpo_beta"),
    "pad_to_sequence_len": advice("leave it out: sequences have `train.model.seq_length` tokens"),
    "base_model": same_value(
        "train.system.pretrained_checkpoint", "a directory with config.json and *.safetensors"
    ),
    "datasets": same_value("train.data.data_path", "files of this machine"),
    "val_set_size": computed(split_of_validation, "train.data.split"),
    "adapter": by_value(
        "train.model.peft_type",
        {"lora": "lora"},
        "quantized base models (qlora) are not implemented; `peft_type: lora` is",
    ),
    "flash_attention": _ATTENTION,
}
_LLAMA_FACTORY: Mapping[str, Entry] = {
    "lora_target": same_value("train.model.lora_target_modules"),
    "template": same_value("train.data.chat_template"),
    "pref_beta": same_value("train.data.dpo_beta"),
    "pref_loss": _DPO_LOSS,
    "ref_model": advice(
        "the reference model is `train.system.pretrained_checkpoint`, which training starts from"
    ),
    "val_size": computed(split_of_validation, "train.data.split"),
    "freeze_trainable_layers": computed(layers_to_train, _TRAIN_KEY),
    "freeze_trainable_modules": patterns(_TRAIN_KEY),
    "freeze_extra_modules": patterns(_TRAIN_KEY),
    "finetuning_type": by_value(
        "train.model.peft_type",
        {
            "lora": "lora",
            "full": "leave it out: this is the default",
            "freeze": Replacement((Setting(_TRAIN_KEY),), "patterns of the names to train"),
        },
        "lora trains adapters",
    ),
}
_PEFT: Mapping[str, Entry] = {
    "r": same_value("train.model.lora_dim"),
    "target_modules": same_value("train.model.lora_target_modules"),
    "base_model_name_or_path": same_value(
        "train.system.pretrained_checkpoint", "a directory with config.json and *.safetensors"
    ),
    "bias": by_value(
        "train.model.peft_type",
        {"none": "leave it out: biases are frozen", False: "leave it out: biases are frozen"},
        "biases are frozen with adapters",
    ),
    "task_type": advice("leave it out: `train.model.family` selects the model"),
    "modules_to_save": advice(
        "modules trained next to adapters are not implemented; "
        "`train.model.trainable_parameters` trains parts of the model without adapters"
    ),
    "use_rslora": by_value(
        "train.model.lora_alpha",
        {
            True: Replacement((Setting("train.model.lora_alpha"),), "lora_alpha x sqrt(lora_dim)"),
            False: "leave it out: this is the default",
        },
    ),
    "use_dora": by_value(
        "train.model.peft_type",
        {False: "leave it out: this is the default"},
        "DoRA is not implemented; `peft_type: lora` is",
    ),
    "init_lora_weights": advice(
        "`train.model.lora_in_init_method` initializes the first matrix; the second starts at zero"
    ),
    "rank_pattern": advice("all adapters have the rank `train.model.lora_dim`"),
    "alpha_pattern": advice("all adapters have the scale of `train.model.lora_alpha`"),
    "layers_to_transform": advice("the adapted modules are those of all layers"),
    "exclude_modules": advice("`train.model.lora_target_modules` lists the modules to adapt"),
    "fan_in_fan_out": advice("leave it out: it follows from the model"),
}
_LIGHTNING: Mapping[str, Entry] = {
    "max_epochs": computed(samples_of_epochs, SAMPLES),
    "num_epochs": computed(samples_of_epochs, SAMPLES),
    "epochs": computed(samples_of_epochs, SAMPLES),
    "accumulate_grad_batches": computed(global_batch_of_accumulation, BATCH),
    "gradient_clip_val": same_value("train.model.clip_grad"),
    "log_every_n_steps": interval("train.system.log_interval"),
}
_DEEPSPEED: Mapping[str, Entry] = {
    "train_batch_size": same_value(BATCH),
    "train_micro_batch_size_per_gpu": same_value(MICRO_BATCH),
    "gradient_clipping": same_value("train.model.clip_grad"),
    "zero_optimization": advice(_ZERO),
    "zero_stage": advice(_ZERO),
}
_TORCHRUN: Mapping[str, Entry] = {
    **{
        name: same_value(f"experiment.runner.{name}")
        for name in (
            "nproc_per_node",
            "nnodes",
            "rdzv_id",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_conf",
            "master_addr",
            "master_port",
            "max_restarts",
            "monitor_interval",
            "redirects",
            "tee",
            "log_dir",
            "local_addr",
        )
    },
    "nproc": same_value("experiment.runner.nproc_per_node"),
    "num_processes": advice(
        "set `experiment.runner.nproc_per_node`, the ranks of one host, and the hosts by "
        "`experiment.runner.hostfile`"
    ),
    "num_machines": same_value("experiment.runner.nnodes"),
    "num_nodes": same_value("experiment.runner.nnodes"),
    "node_rank": advice("leave it out: the launcher numbers the hosts"),
    "machine_rank": advice("leave it out: the launcher numbers the hosts"),
    "world_size": advice(
        "leave it out: it follows from the hosts and `experiment.runner.nproc_per_node`"
    ),
}
_DATA_PARALLEL = (
    "leave it out: it is the number of ranks divided by the tensor, pipeline and context parallel "
    "sizes"
)
_SHORT_NAMES: Mapping[str, Entry] = {
    "mbs": same_value(MICRO_BATCH),
    "gbs": same_value(BATCH),
    **dict.fromkeys(("dp", "dp_size"), advice(_DATA_PARALLEL)),
    "zero": advice(_ZERO),
    **dict.fromkeys(
        ("lora", "use_lora", "peft"),
        by_value(
            "train.model.peft_type",
            {True: "lora", "lora": "lora", False: "leave it out: this is the default"},
            "lora trains adapters",
        ),
    ),
}
TRAINER_NAMES: Mapping[str, TrainerName] = {
    name: entry(name, origin)
    for origin, names in (
        ("Axolotl", _AXOLOTL),
        ("LLaMA-Factory", _LLAMA_FACTORY),
        ("other trainers", _FREEZE_MODULES),
        ("other trainers", _SHORT_NAMES),
        ("DeepSpeed", _DEEPSPEED),
        ("PyTorch Lightning", _LIGHTNING),
        ("PEFT", _PEFT),
        ("TRL", _TRL),
        ("torchrun", _TORCHRUN),
        ("Hugging Face", _HUGGING_FACE),
    )
    for name, entry in names.items()
}
"""Settings of other trainers by name in snake case."""


def replacement_of(name: str, value: Any = None, context: SettingContext | None = None) -> str:
    """Return the answer to another trainer's name and its value, as the end of a message; empty if
    the name is not listed.
    """
    entry = TRAINER_NAMES.get(name.strip("-").replace("-", "_"))
    if entry is None:
        return ""
    context = context or SettingContext()
    text = entry.rule(value, context).text(is_override=context.is_override)
    return f"is a name of {entry.origin}; {text}"
