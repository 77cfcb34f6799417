"""Names of Megatron-LM and FlagScale that are not arguments of this project.

An *alias* stands for an argument that megatron.core's dataclasses call by another name: with the
same value, the opposite one, or a fixed value when it is switched on. An alias without effect (rule
``none``) has a replacement elsewhere, or repeats a setting that always holds. Parsed arguments have
no attribute for an alias. In addition to this table, any boolean ``x`` can be written ``no_x`` (see
:mod:`..spec.registry`).

An *unsupported* name has a reason, which describes what the name would do and what to write
instead. Most unsupported names are *refused*: the run does not start. An *unused* name does not
change what is trained, saved or read: a YAML may keep it, and a note reports that it has no effect.
A switch that is off is accepted silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from flagscale.config.arguments.compat.unsupported_families import (
    UNSUPPORTED_FAMILIES,
    UnsupportedFamily,
)

Rule = Literal["same", "opposite", "value", "none"]


@dataclass(frozen=True)
class Alias:
    """Another name for an argument."""

    name: str
    target: str
    """Argument that the alias stands for; empty if the alias has no effect."""
    rule: Rule = "same"
    """Value of the target: the same as that of the alias, the opposite, or ``value`` if the alias
    is true. With "none", the alias is accepted without effect."""
    value: Any = None
    doc: str = ""
    """Reason why an alias with rule "none" has no effect."""
    noted_value: bool | None = None
    """Value for which a note is printed that the alias has no effect, if its rule is "none"; None
    if no note is printed. The other value agrees with the behavior of this project."""

    def translate(self, value: Any) -> Any:
        """Return the value of the target; None ("not given") if the alias is a switch that is
        off."""
        if self.rule == "opposite":
            return not value
        if self.rule == "value":
            return self.value if value else None
        return value


def _same(target: str, *names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name, target) for name in names)


def _opposite(target: str, *names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name, target, "opposite") for name in names)


def _no_effect(name: str, reason: str, noted_value: bool | None = None) -> tuple[Alias, ...]:
    return (Alias(name, "", "none", doc=reason, noted_value=noted_value),)


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
        "`num_query_groups` enables grouped-query attention",
    ),
    *_no_effect(
        "no_position_embedding",
        "with rotary positions there is no position embedding; to train without positions, set "
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
    Alias("use_torch_fsdp2", "data_parallel_sharding_strategy", "value", "optim_grads_params"),
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
    *_opposite("muon_use_nesterov", "no_muon_nesterov"),
    *_same("log_straggler", "enable_straggler_detection"),
    *_opposite("muon_split_qkv", "muon_no_split_qkv"),
    *_same("muon_num_ns_steps", "muon_ns_steps"),
    *_same("muon_extra_scale_factor", "muon_matched_adamw_rms"),
    *_same("save_interval", "persistent_save_interval"),
    *_same("verify_checkpoint", "verify_integrity"),
    *_same("ckpt_format", "dist_ckpt_format"),
    *_no_effect("no_shared_fs", "set `experiment.runner.no_shared_fs`", noted_value=True),
    *_no_effect("use_dist_ckpt", "checkpoints are always distributed", noted_value=False),
    # Data
    *_same("data_cache_path", "path_to_cache"),
    *_same("reset_attention_mask", "dataloader_inter_document_masking"),
    *_same("tokenizer_path", "tokenizer_model", "tokenizer_name_or_path", "vocab_file"),
    *_same("fast_cache_load", "dataloader_fast_cache_load"),
    *_same("defer_npy_index_mmap", "dataloader_defer_npy_index_mmap"),
    *_opposite("create_attention_mask", "no_create_attention_mask_in_dataloader"),
)


_FROM_CHECKPOINT = "the arguments of the YAML are used, not those stored in a checkpoint"
# Each message that begins with it adds a script and closes the list: "train_pi0.py, ...]`".
_ROBOTICS_PREFIX = (
    "FlagScale's robotics trainer, whose arguments have another format, is not supported; run it "
    "with `type: command` and `command: [python,"
)
UNSUPPORTED: Mapping[str, str] = {
    "params_dtype": "it follows from `bf16` and `fp16`",
    "pipeline_dtype": "it follows from `bf16` and `fp16`",
    "autocast_dtype": "it follows from `bf16` and `fp16`",
    "data_parallel_size": "it follows from the number of ranks and the other parallel sizes",
    "local_rank": "the launcher sets it for every rank",
    "padded_vocab_size": "write `vocab_size` with this value and `make_vocab_size_divisible_by: "
    "1`, which give the embedding as many rows",
    "blend": "it follows from `data_path`",
    "blend_per_split": "it follows from `train_data_path`, `valid_data_path` and `test_data_path`",
    "data_args_path": "write the contents of the file as `data_path`",
    "per_split_data_args_path": "write the contents of the file as `train_data_path`, "
    "`valid_data_path` and `test_data_path`",
    "per_dataset_sequences_path": "sequences are counted when data sets are opened; leave it out",
    "save_when_num_microbatches_change": "checkpoints are saved every `save_interval` steps",
    "decrease_batch_size_if_needed": "it would train with a smaller batch size than the YAML "
    "gives; set a `global_batch_size` that is divisible by the number of replicas",
    "step_batch_size_schedule": "use `rampup_batch_size`, which increases the batch size in equal "
    "intervals",
    "eval_micro_batch_size": "evaluation uses `micro_batch_size`",
    "eval_global_batch_size": "evaluation uses `global_batch_size`; `eval_iters` sets the number "
    "of steps",
    "start_eval_at_iter": "evaluations run every `eval_interval` steps from the start",
    "override_ckpt_iteration": "the step number of a checkpoint cannot be changed; `finetune: "
    "true` starts from its weights at step 0",
    "load_adapter": "`pretrained_checkpoint` reads the base model, and a run that resumes has its "
    "adapters",
    "freeze_all_layers": "it would train nothing; use `skip_train: true` to evaluate, or "
    "`peft_type: lora` to train adapters of frozen weights",
    "no_pad_vocab_size": "use `make_vocab_size_divisible_by: 1`",
    "null_tokenizer_eod_id": "the end-of-document id of NullTokenizer is `vocab_size`",
    "null_tokenizer_pad_id": "NullTokenizer has no padding id",
    "output_logit_dtype": "logits have the dtype of the weights, and the loss is computed in fp32",
    "fp8_output_proj": "the output layer is computed in 16 bits",
    "cuda_graph_modules": "only whole steps can be captured; use `cuda_graph_impl: local` with "
    "`cuda_graph_scope: full_iteration`",
    "moe_expert_rank_capacity_factor": "use `moe_expert_capacity_factor`, which limits the tokens "
    "per expert, not per rank",
    "moe_router_force_biased": "it would override the router to measure speed; use "
    "`moe_router_force_load_balancing`, which distributes tokens evenly",
    "moe_router_quantile_balancing_ema": "quantile balancing is not implemented; see "
    "`moe_router_load_balancing_type` for the implemented types",
    "phase_transition_iterations": "write the blends of all phases as `data_phases`",
    "spec": "layers cannot be built by a Python function given in the YAML",
    "use_legacy_models": "only megatron.core's models are supported",
    "yaml_cfg": "the arguments of this YAML are used",
    "use_checkpoint_args": _FROM_CHECKPOINT,
    "use_mp_args_from_checkpoint_args": f"{_FROM_CHECKPOINT}; a checkpoint can be loaded with any "
    "parallel layout",
    "ckpt_step": "the newest checkpoint is loaded; to load another step, write its number into "
    "latest_checkpointed_iteration.txt in the directory of `load`",
    "no_weight_decay_cond_type": "biases and norms have no weight decay; "
    "`apply_wd_to_qk_layernorm` applies it to the norms of queries and keys",
    "checkpoint_activations": "use `recompute_granularity: full`, `recompute_method: uniform` and "
    "`recompute_num_layers: 1`",
    "ckpt_convert_format": "it converts the checkpoint of `load` and exits without training; leave "
    "it out to train, or use `flagscale convert`",
    "most_recent_k": "use `keep_last`",
    "skip_iters_range": "list the steps as `iterations_to_skip`",
    "skip_train_iteration_range": "list the steps as `iterations_to_skip`",
    "skip_samples_range": "list the steps of these samples as `iterations_to_skip`",
    "auto_skip_spiky_loss": "`loss_spike_factor` warns of loss spikes; to skip the steps, restart "
    "from an earlier checkpoint with `iterations_to_skip`",
    "spiky_loss_threshold": "use `loss_spike_factor`, which warns of loss spikes",
    "auto_tune": "it is an action: `action=auto_tune` finds the parallel sizes",
    "valid_path": "use `valid_data_path`",
    "extra_valid_data_path": "add it to `valid_data_path` and set `multiple_validation_sets: "
    "true`, which evaluates each set separately",
    "extra_eval_interval": "all validation sets are evaluated every `eval_interval` steps",
    "vocab_extra_ids": "T5 models are not supported; `family` is gpt or bert",
    "bert_binary_head": "BERT is trained by masked-token prediction only, without next-sentence "
    "prediction; leave it out",
    "short_seq_prob": "all sequences have `seq_length` tokens; leave it out",
    "trust_remote_code": "code in a tokenizer's directory is not executed; convert the tokenizer "
    "to tokenizer.json",
    "tokenizer_special_tokens": "special tokens are read from the tokenizer's files",
    "wandb_api_key": "a YAML must not contain secrets; set WANDB_API_KEY in `experiment.envs` or "
    "in the environment of the launcher",
    "wandb_mode": "set WANDB_MODE in `experiment.envs`",
    "mlflow_tags": "set tags at MLflow; the run there has the tag `flagscale.run_id`",
    "mlflow_experiment_name": "use `mlflow_experiment`",
    "comet_api_key": "a YAML must not contain secrets; set COMET_API_KEY in `experiment.envs` or "
    "in the environment of the launcher",
    "comet_tags": "set tags at Comet",
    "swanlab_token": "a YAML must not contain secrets; set SWANLAB_API_KEY in `experiment.envs` or "
    "in the environment of the launcher",
    "swanlab_api_key": "a YAML must not contain secrets; set SWANLAB_API_KEY in "
    "`experiment.envs` or in the environment of the launcher",
    "swanlab_mode": "set SWANLAB_MODE in `experiment.envs`",
    "wandb_log_model": "checkpoints are not uploaded to Weights & Biases; they are saved in `save`",
    "use_te": "use `transformer_impl: auto`, this trainer's own layers",
    "num_mtp_predictor": "use `mtp_num_layers`, the number of multi-token prediction layers",
    "mtp_loss_coeff": "use `mtp_loss_scaling_factor`, the factor of the mean loss of the "
    "multi-token prediction layers",
    "qk_layernorm_hidden_dim": "use `qk_layernorm`, which normalizes queries and keys per head",
    "training_dtype": "use `bf16: true` or `fp16: true`; the default is fp32",
    "log_freq": "use `log_interval`",
    "resume": "a run resumes from its newest checkpoint by default; `load` sets another directory",
    "checkpoint_dir": "use `load`, or `pretrained_checkpoint` for a Hugging Face model",
    "output_directory": "use `save`",
    "project_name": "use `wandb_project`",
    "wandb_enabled": "`wandb_project` enables Weights & Biases",
    "exp_name": "use `experiment.exp_name`, and `wandb_exp_name` for Weights & Biases",
    "quick_geglu": "the supported activations are GELU, `openai_gelu`, `swiglu` and `squared_relu`",
    "onnx_safe": "export to ONNX is not supported",
    "init_method_xavier_uniform": "weights are initialized from a normal distribution with "
    "standard deviation `init_method_std`",
    "grad_reduce_in_bf16": "use `main_grads_dtype: bf16` with `use_precision_aware_optimizer`",
    "use_tp_pp_dp_mapping": "the order of ranks is tensor, context, data, pipeline",
    "fake_process_group": "running without communication is not supported",
    "data_parallel_random_init": "all replicas start from the same weights",
    "distributed_timeout_seconds_after_init": "`distributed_timeout_minutes` applies to the whole "
    "run",
    "nccl_communicator_config_path": "write the options of NCCL as `comm`",
    "exit_signal": "SIGTERM ends a run after saving a checkpoint",
    "load_main_params_from_ckpt": "with `no_load_optim`, the optimizer starts from the loaded "
    "weights",
    "auto_detect_ckpt_format": "`load` supports checkpoints of this project only, and "
    "`pretrained_checkpoint` Hugging Face models",
    "dist_ckpt_strictness": "checkpoints that do not match the model are rejected",
}
"""Unsupported names with the reason, which ends the sentence "is not supported: …"."""
UNUSED_EXPERIMENT_KEYS: Mapping[str, str] = {
    "save_steps": "no key refers to it as ${experiment.save_steps}; checkpoints are saved every "
    "`train.system.save_interval` steps",
}
"""Keys of ``experiment`` that are accepted without effect, with the reason."""
UNSUPPORTED_VALUES: Mapping[tuple[str, str], str] = {
    ("backend", "pi0"): f"{_ROBOTICS_PREFIX} train_pi0.py, ...]`",
    **{
        ("backend", name): "FlagScale's native trainer, whose arguments have another format, is "
        "not supported; run its program with `type: command`"
        for name in ("native", "native_train")
    },
    ("backend", "robotics"): f"{_ROBOTICS_PREFIX} train_robotics.py, ...]`",
    ("type", "inference"): "only training is supported; `export_huggingface` writes a model for "
    "vLLM or transformers",
    ("type", "serve"): "only training is supported; `export_huggingface` writes a model for vLLM",
    ("type", "compress"): "only training is supported; models are saved in the training precision",
    (
        "type",
        "rl",
    ): "reinforcement learning is not supported; only pre-training and fine-tuning are",
    ("lr_decay_style", "stablelm2-scheduler"): "the schedule of StableLM 2 is not implemented; the "
    "most similar schedule is WSD",
    ("position_embedding_type", "yarn"): "YaRN is implemented for `multi_latent_attention` only; "
    "`use_rope_scaling` scales positions like Llama 3.1",
    ("lora_in_init_method", "zero"): "with both matrices initialized to zero, adapters would never "
    "change",
    **{
        (
            "lora_out_init_method",
            name,
        ): "the second matrix of an adapter is initialized to zero, so "
        "that training starts from the base model"
        for name in ("xavier", "normal", "kaiming")
    },
    ("position_embedding_type", "mrope"): "models of images and video are not supported",
    ("position_embedding_type", "relative"): "T5 models are not supported",
    ("tokenizer_type", "TikTokenizer"): "convert the tokenizer to tokenizer.json and use "
    "HuggingFaceTokenizer",
    ("tokenizer_type", "SFTTokenizer"): "use HuggingFaceTokenizer, and `sft: true` to train on "
    "conversations",
    ("tokenizer_type", "MultimodalTokenizer"): "models of images are not supported",
    ("tokenizer_type", "NullMultimodalTokenizer"): "models of images are not supported; use "
    "NullTokenizer",
    ("tokenizer_type", "Qwen2VLTokenizer"): "models of images are not supported; use "
    "Qwen2TokenizerFS for text",
    ("tokenizer_type", "BertWordPieceLowerCase"): "use HuggingFaceTokenizer with a tokenizer.json",
    ("tokenizer_type", "BertWordPieceCase"): "use HuggingFaceTokenizer with a tokenizer.json",
}
"""Unsupported values by argument, with the reason."""


@lru_cache(maxsize=512)
def unsupported_family(name: str) -> UnsupportedFamily | None:
    """Return the family of unsupported names that a name belongs to; None if there is none."""
    return next(
        (family for family in UNSUPPORTED_FAMILIES if re.fullmatch(family.names, name)), None
    )


def why_unsupported(name: str) -> str | None:
    """Return the reason why a name is refused; None for unused and unknown names."""
    family = unsupported_family(name)
    return UNSUPPORTED.get(name) or (family.reason if family and not family.unused else None)


def why_unused(name: str) -> str | None:
    """Return the reason why a name is accepted without effect; None for all other names."""
    family = None if name in UNSUPPORTED else unsupported_family(name)
    return family.reason if family and family.unused else None
