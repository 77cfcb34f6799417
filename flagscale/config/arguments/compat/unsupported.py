"""Names of Megatron-LM and FlagScale that are no arguments of this project, each with the reason.

Every reason says what the name would do and what to write instead. A *refused* name stops the
start. A *noted* one changes nothing that is trained, saved or read: a YAML may keep it, and a note
reports that it has no effect. A switch that is off is accepted silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from flagscale.config.arguments.compat.unsupported_families import (
    UNSUPPORTED_FAMILIES,
    UnsupportedFamily,
)

_META = "it is what a checkpoint remembers, and here the YAML says what is trained"
_ROBOTS = (
    "it is FlagScale's trainer of robots' models, which gets its arguments in another form; models "
    "of text are trained here, and another's program runs by `type: command` and `command: [python,"
)
UNSUPPORTED: Mapping[str, str] = {
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
    "save_when_num_microbatches_change": "it would save when the batch has grown; `save_interval` "
    "says when",
    "decrease_batch_size_if_needed": "it would train on fewer sequences than the YAML says; give a "
    "`global_batch_size` that the replicas can share",
    "step_batch_size_schedule": "it would change the batch at steps of its own; "
    "`rampup_batch_size` lets it grow evenly",
    "eval_micro_batch_size": "evaluations take `micro_batch_size` sequences at once",
    "eval_global_batch_size": "a step of an evaluation takes `global_batch_size` sequences; "
    "`eval_iters` says how many steps",
    "start_eval_at_iter": "it would leave the first evaluations out; they come every "
    "`eval_interval` steps",
    "override_ckpt_iteration": "it would call a checkpoint's step another; `finetune: true` starts "
    "from its weights at step 0",
    "freeze_all_layers": "it would train nothing; `skip_train: true` evaluates, and `peft_type: "
    "lora` trains adapters beside frozen weights",
    "no_pad_vocab_size": "write `make_vocab_size_divisible_by: 1`",
    "null_tokenizer_eod_id": "the id that ends a document is `vocab_size`, behind all others",
    "null_tokenizer_pad_id": "no id of NullTokenizer is padding",
    "output_logit_dtype": "logits are of the weights' type, and the loss is computed in fp32",
    "fp8_output_proj": "the head is computed in 16 bits",
    "cuda_graph_modules": "only whole steps are captured: `cuda_graph_impl: local` with "
    "`cuda_graph_scope: full_iteration`",
    "moe_expert_rank_capacity_factor": "it would drop tokens of a rank's experts together; "
    "`moe_expert_capacity_factor` bounds each of them",
    "moe_router_force_biased": "it would send tokens elsewhere than the router says, to measure "
    "speed; `moe_router_force_load_balancing` spreads them evenly",
    "moe_router_quantile_balancing_ema": "it is of balancing by quantiles; "
    "`moe_router_load_balancing_type` has the ways that there are",
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
    "skip_train_iteration_range": "it would pass over the data of these steps; list them as "
    "`iterations_to_skip`",
    "skip_samples_range": "it would pass over these samples; list their steps as "
    "`iterations_to_skip`",
    "auto_skip_spiky_loss": "it would leave out steps whose loss jumps; `loss_spike_factor` warns "
    "of them, and `iterations_to_skip` leaves them out of a run from an earlier checkpoint",
    "spiky_loss_threshold": "`loss_spike_factor` warns of a loss that jumps",
    "auto_tune": "there is no automatic tuner; write the sizes that it would find",
    "valid_path": "write `valid_data_path`",
    "extra_valid_data_path": "write it as one more of `valid_data_path`, with "
    "`multiple_validation_sets: true`: each is evaluated by itself",
    "extra_eval_interval": "all validation sets are evaluated every `eval_interval` steps",
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
    "use_te": "this trainer has layers of its own: `transformer_impl: auto`",
    "num_mtp_predictor": "write `mtp_num_layers`, how many layers predict further tokens",
    "mtp_loss_coeff": "write `mtp_loss_scaling_factor`, by which the mean of their losses counts",
    "qk_layernorm_hidden_dim": "it would normalise queries and keys over all heads together; "
    "`qk_layernorm` does so a head",
    "training_dtype": "write `bf16: true` or `fp16: true`; without them it is float32",
    "log_freq": "write `log_interval`",
    "resume": "a run goes on from its newest checkpoint by itself; `load` names another directory",
    "checkpoint_dir": "write `load`, or `pretrained_checkpoint` for a model of Hugging Face",
    "output_directory": "write `save`",
    "project_name": "write `wandb_project`",
    "wandb_enabled": "`wandb_project` switches Weights & Biases on",
    "exp_name": "`experiment.exp_name` is the experiment's name; in Weights & Biases "
    "`wandb_exp_name`",
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
UNUSED_EXPERIMENT_KEYS: Mapping[str, str] = {
    "auto_tuner": "it is of the action auto_tune, which is not here; `flagscale explain action` "
    "has those that are",
}
"""Keys of ``experiment`` that may be given and have no effect."""
UNSUPPORTED_VALUES: Mapping[tuple[str, str], str] = {
    ("action", "auto_tune"): "it would try sizes in short runs and keep the fastest; estimate "
    "tells memory and time of sizes without devices, `-m train.system.NAME=1,2,4` runs each, and "
    "`hetero_process_meshes: auto` chooses the meshes of unlike devices",
    ("backend", "pi0"): f"{_ROBOTS} train_pi0.py, ...]",
    ("backend", "robotics"): f"{_ROBOTS} train_robotics.py, ...]",
    ("type", "inference"): "models are trained here; `export_huggingface` writes one that vLLM or "
    "transformers loads",
    ("type", "serve"): "models are trained here; `export_huggingface` writes one that vLLM serves",
    ("type", "compress"): "models are trained here, in the precision that they are saved in",
    ("type", "rl"): "models are pre-trained and fine-tuned here; reinforcement learning is not "
    "built",
    ("lr_decay_style", "stablelm2-scheduler"): "a schedule of StableLM 2; WSD is the nearest",
    ("position_embedding_type", "yarn"): "not built; use_rope_scaling scales as Llama 3.1 does",
    ("lora_in_init_method", "zero"): "with both matrices as zeros neither would ever change",
    **{
        ("lora_out_init_method", name): "the second matrix of an adapter starts as zeros, so that "
        "training starts from the base"
        for name in ("xavier", "normal", "kaiming")
    },
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
def unsupported_family(name: str) -> UnsupportedFamily | None:
    """The family that a name is of, which is no argument here and has no line of its own."""
    return next(
        (family for family in UNSUPPORTED_FAMILIES if re.fullmatch(family.names, name)), None
    )


def why_unsupported(name: str) -> str | None:
    """Why a name cannot be given; None for one that is noted or that nobody knows."""
    family = unsupported_family(name)
    return UNSUPPORTED.get(name) or (family.reason if family and not family.noted else None)


def why_unused(name: str) -> str | None:
    """Why a name that may be given has no effect; None for all others."""
    family = None if name in UNSUPPORTED else unsupported_family(name)
    return family.reason if family and family.noted else None
