"""Arguments of the section ``model``: architecture, training length, learning rate and adapters.

Names, meanings and, unless stated otherwise, defaults are Megatron-LM's. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flagscale.config.arguments.spec.argument import Values, arg


@dataclass(frozen=True)
class Model:
    """Arguments of the model that are not in megatron.core's TransformerConfig."""

    family: str = arg(
        "gpt",
        "Model family: gpt (causal language model), bert (bidirectional, masked-token prediction), "
        "or one of an installed package (docs/reference/models.md)",
    )
    optimizer: str = arg(
        "adam",
        "Optimizer: adam (AdamW), sgd, lion, or muon (Muon for matrices, AdamW for other weights); "
        "Megatron-LM's dist_muon is muon with use_distributed_optimizer "
        "(docs/guides/optimizers.md)",
    )
    fp8_recipe: str = arg(
        "tensorwise",
        "Scaling of fp8 GEMMs (fp8: hybrid or e4m3): one scale per tensor (tensorwise), per row "
        "(rowwise), or per 128 elements of a row and 128 x 128 of a weight (blockwise, like "
        "DeepSeek-V3)",
        choices=("tensorwise", "rowwise", "delayed", "mxfp8", "blockwise", "custom"),
    )
    position_embedding_type: str = arg(
        "learned_absolute",
        "Type of position embedding",
        choices=("learned_absolute", "rope", "none"),
    )
    max_position_embeddings: int | None = arg(
        None, "Maximum sequence length of the positions (default: seq_length)", minimum=1
    )
    rotary_base: int = arg(10000, "Base of the frequencies of rotary positions", minimum=1)
    rotary_percent: float = arg(
        1.0, "Fraction of the head dimensions that are rotated", minimum=0, maximum=1
    )
    rotary_seq_len_interpolation_factor: int | None = arg(
        None, "Divide positions by this before rotating, for longer sequences", minimum=1
    )
    use_rope_scaling: bool = arg(False, "Scale rotary frequencies like Llama 3.1")
    rope_scaling_factor: float = arg(8.0, "Scaling factor of use_rope_scaling", minimum=1)
    untie_embeddings_and_output_weights: bool = arg(
        False, "Use separate weights for the output layer instead of those of the embedding"
    )
    norm_init_weight: float | None = arg(None, "Initial weight of norms (default: 1)")
    multiple_of: int | None = arg(
        None,
        "With swiglu, if ffn_hidden_size is not set: use 8/3 x hidden_size rounded up to a "
        "multiple of this",
        minimum=1,
    )
    hidden_dim_multiplier: float | None = arg(
        None, "With multiple_of: multiply the width by this before rounding", minimum=0.001
    )
    swiglu: bool = arg(False, "Use gated linear units with SiLU in the MLP (SwiGLU)")
    squared_relu: bool = arg(False, "Use squared ReLU in the MLP instead of GELU")
    openai_gelu: bool = arg(False, "Use the tanh approximation of GELU, like GPT-2")
    fp16_lm_cross_entropy: bool = arg(
        False, "Compute the loss in the precision of the model instead of fp32"
    )
    bias_activation_fusion: bool = arg(
        True, "Fuse bias and activation of the MLP by torch.compile (CUDA only)"
    )
    bias_dropout_fusion: bool = arg(
        True, "Fuse bias, dropout and residual by torch.compile (CUDA only)"
    )
    use_mcore_models: bool = arg(
        True, "Use megatron.core's models, the only ones; accepted for compatibility"
    )


@dataclass(frozen=True)
class TrainingLength:
    """Batch sizes, length of training, and evaluation."""

    micro_batch_size: int = arg(1, "Sequences per micro-batch of a model replica", minimum=1)
    global_batch_size: int | None = arg(
        None,
        "Sequences per step over all replicas (default: micro_batch_size x data-parallel size)",
        minimum=1,
    )
    rampup_batch_size: tuple[int, ...] | None = arg(
        None,
        "Ramp up the batch size to global_batch_size: initial batch size, increment, and number of "
        "sequences of the ramp-up, such as 32 32 100000; requires train_samples",
        minimum=1,
    )
    seq_length: int | None = arg(None, "Sequence length in tokens", minimum=1)
    train_iters: int | None = arg(
        None, "Number of training steps; give either this or train_samples", minimum=0
    )
    train_samples: int | None = arg(
        None, "Number of training sequences; give either this or train_iters", minimum=0
    )
    iterations_to_skip: tuple[int, ...] | None = arg(
        None, "Steps to skip: their data is consumed without training", minimum=1
    )
    skip_train: bool = arg(
        False,
        "Evaluate the loaded model and exit without training; requires a checkpoint, but neither "
        "lr nor a training length, because optimizer and schedule are not loaded",
    )
    eval_iters: int = arg(100, "Number of steps per evaluation; 0 disables evaluation", minimum=0)
    eval_interval: int | None = arg(1000, "Training steps between evaluations", minimum=1)
    early_stopping_patience: int | None = arg(
        None,
        "End training after this many evaluations in a row without an improvement of the "
        "validation loss, or of best_metric (default: never). With several validation sets their "
        "mean counts",
        minimum=1,
    )
    early_stopping_min_delta: float = arg(
        0.0,
        "Decrease of the validation loss in nats, or change of best_metric, that counts as an "
        "improvement for early_stopping_patience",
        minimum=0,
    )
    best_metric: str | None = arg(
        None,
        "Metric of eval_tasks by which save_best and early_stopping_patience judge, such as "
        "hellaswag/acc_norm (default: the validation loss)",
    )


@dataclass(frozen=True)
class LearningRate:
    """Schedules of learning rate and weight decay over the consumed samples."""

    lr_decay_style: str = arg(
        "linear",
        "Shape of the decay of the learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    min_lr: float = arg(0.0, "Learning rate at the end of the decay", minimum=0)
    lr_decay_iters: int | None = arg(
        None, "Length of the decay in steps (default: train_iters)", minimum=1
    )
    lr_decay_samples: int | None = arg(
        None, "Length of the decay in samples (default: train_samples)", minimum=1
    )
    lr_warmup_fraction: float | None = arg(
        None, "Length of the warm-up as a fraction of the decay", minimum=0, maximum=1
    )
    lr_warmup_iters: int = arg(0, "Length of the warm-up in steps", minimum=0)
    lr_warmup_samples: int = arg(0, "Length of the warm-up in samples", minimum=0)
    lr_warmup_init: float = arg(0.0, "Learning rate at the start of the warm-up", minimum=0)
    lr_wsd_decay_style: str = arg(
        "exponential",
        "Shape of the final phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = arg(
        None, "Length of the final phase of WSD in steps", minimum=0
    )
    lr_wsd_decay_samples: int | None = arg(
        None, "Length of the final phase of WSD in samples", minimum=0
    )
    start_weight_decay: float | None = arg(
        None, "Initial weight decay (default: weight_decay)", minimum=0
    )
    end_weight_decay: float | None = arg(
        None, "Final weight decay (default: weight_decay)", minimum=0
    )
    weight_decay_incr_style: str = arg(
        "constant",
        "Shape of the change of weight decay from start_weight_decay to end_weight_decay",
        choices=("constant", "linear", "cosine"),
    )
    override_opt_param_scheduler: bool = arg(
        False,
        "When resuming, use learning rates, schedule and the optimizer's other hyperparameters of "
        "the arguments, not of the checkpoint",
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False,
        "When resuming, use learning rates, schedule and the optimizer's other hyperparameters of "
        "the checkpoint, not of the arguments",
    )


_FORMATS_OF_MOMENTS = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class OptimizerStates:
    """Number formats of Adam's states."""

    use_precision_aware_optimizer: bool = arg(
        False,
        "Keep Adam's states and gradients in the formats of main_params_dtype, exp_avg_dtype, "
        "exp_avg_sq_dtype and main_grads_dtype. With their defaults and bf16 weights, results are "
        "those of fp32 states, and a weight takes 2 bytes less. Requires use_distributed_optimizer",
    )
    store_param_remainders: bool = arg(
        True,
        "With use_precision_aware_optimizer, main_params_dtype: fp32 and bf16: store of each fp32 "
        "weight only the 16 bits that the bf16 weight lacks",
    )
    main_params_dtype: str = arg(
        "fp32",
        "Format of the weights that Adam updates: fp32, or the model's, bf16 or fp16. The latter "
        "need no second copy and are rounded stochastically",
        choices=_FORMATS_OF_MOMENTS,
    )
    main_grads_dtype: str = arg(
        "fp32",
        "Format in which gradients are accumulated and reduced: fp32, or bf16 with bf16: true",
        choices=_FORMATS_OF_MOMENTS,
    )
    exp_avg_dtype: str = arg(
        "fp32",
        "Format of Adam's first moment, rounded stochastically. fp16 and fp8: blocks of 128 values "
        "share a scale; fp8 has 4 bits of exponent and 3 of significand",
        choices=_FORMATS_OF_MOMENTS,
    )
    exp_avg_sq_dtype: str = arg(
        "fp32",
        "Format of Adam's second moment, as exp_avg_dtype; fp8 has no sign, 5 bits of exponent and "
        "3 of significand",
        choices=_FORMATS_OF_MOMENTS,
    )


@dataclass(frozen=True)
class Muon:
    """Options of Muon, which trains the matrices of layers (docs/guides/optimizers.md)."""

    muon_momentum: float = arg(
        0.95, "Decay rate of Muon's moving average of gradients", minimum=0, maximum=1
    )
    muon_use_nesterov: bool = arg(
        False, "Orthogonalize Nesterov's momentum: the average once more averaged with the gradient"
    )
    muon_num_ns_steps: int = arg(
        5, "Newton-Schulz iterations that orthogonalize an update", minimum=1
    )
    muon_scale_mode: str = arg(
        "spectral",
        "Scale of the update of a matrix [out, in]: spectral, sqrt(max(out, in)); unit_rms_norm, "
        "sqrt(out / in); shape_scaling, sqrt(max(1, out / in))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = arg(
        1.0,
        "Additional factor of Muon's updates. With muon_scale_mode: spectral, 0.2 makes them about "
        "as large as Adam's, so that the same learning rate fits both",
        minimum=0,
    )
    muon_split_qkv: bool = arg(
        True,
        "Orthogonalize queries, keys and values of linear_qkv as three matrices instead of one",
    )
    muon_fp32_matmul_prec: str = arg(
        "medium",
        "Precision of the matrix products of Muon: medium, bf16 (fp32 on CPUs that do not support "
        "it); high, TF32 on GPUs; highest, fp32",
        choices=("medium", "high", "highest"),
    )
    muon_tp_mode: str = arg(
        "duplicated",
        "Orthogonalization of a matrix that is split over tensor-parallel ranks: duplicated, every "
        "rank gathers the matrix and orthogonalizes it; distributed, the ranks share the products; "
        "blockwise (Megatron-LM's default), every rank orthogonalizes its own part, so that "
        "results depend on tensor_model_parallel_size",
        choices=("duplicated", "distributed", "blockwise"),
    )


@dataclass(frozen=True)
class Lion:
    """Options of Lion (docs/guides/optimizers.md)."""

    lion_beta1: float = arg(
        0.95,
        "Weight of the momentum, compared with the gradient, in Lion's update",
        minimum=0,
        maximum=1,
    )
    lion_beta2: float = arg(
        0.98, "Decay rate of Lion's moving average of gradients", minimum=0, maximum=1
    )


SINKHORN = "sinkhorn"
LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", SINKHORN, "none")
"""Types of load balancing over experts."""


@dataclass(frozen=True)
class Latent:
    """Options of multi-latent attention whose megatron.core defaults cannot express "off"."""

    q_lora_rank: int | None = arg(
        None,
        "Rank of the low-rank projection of queries; without it, queries are projected directly",
        minimum=1,
    )
    rope_type: str | None = arg(
        None,
        "Rotary positions of multi-latent attention: rope, or yarn (the default), which scales "
        "them for longer sequences; all other attention uses rope",
        choices=("rope", "yarn"),
    )


@dataclass
class Architecture:
    """Options of layers in addition to megatron.core's (docs/reference/models.md). Not frozen,
    because it is part of the configuration from which layers are built."""

    sandwich_norm: bool = arg(
        False,
        "Add norms after attention and MLP, before the residual addition (Gemma 2 and 3)",
    )
    scale_embeddings: bool = arg(
        False, "Multiply embeddings by the square root of hidden_size (Gemma)"
    )
    attn_logit_softcapping: float | None = arg(
        None,
        "Bound c of attention scores s: c tanh(s / c) (Gemma 2). Attention is then not fused and "
        "keeps all scores in memory",
        minimum=0.001,
    )
    final_logit_softcapping: float | None = arg(
        None, "Bound c of logits s: c tanh(s / c) (Gemma 2)", minimum=0.001
    )
    window_rotary_base: int | None = arg(
        None,
        "Base of the rotary frequencies of layers with a sliding window (window_size); rotary_base "
        "and its scaling apply to the other layers (Gemma 3)",
        minimum=1,
    )


ARCHITECTURE_OPTIONS = tuple(field.name for field in fields(Architecture))


@dataclass(frozen=True)
class Freezing:
    """Parameters that keep their values (docs/guides/fine-tune.md)."""

    freeze_parameters: tuple[str, ...] | None = arg(
        None,
        "Patterns of names of parameters to freeze, such as embedding.*, decoder.layers.[0-3].* or "
        "decoder.layers.*.mlp; layers are numbered from 0 over the whole model",
    )
    trainable_parameters: tuple[str, ...] | None = arg(
        None, "Patterns of names of parameters to train; all others are frozen"
    )


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters next to frozen weights (docs/guides/fine-tune.md)."""

    peft_type: str | None = arg(
        None,
        "lora: train low-rank adapters of linear layers and freeze all other weights",
        choices=("lora",),
    )
    lora_dim: int = arg(16, "Rank of the adapters", minimum=1)
    lora_alpha: float = arg(
        32.0,
        "Scale of adapters: their output is multiplied by lora_alpha / lora_dim",
        minimum=0.001,
    )
    lora_dropout: float = arg(
        0.0, "Dropout probability of adapters during training", minimum=0, maximum=0.99
    )
    lora_dropout_position: str = arg(
        "pre",
        "Position of the dropout: pre, before the first matrix of an adapter, like peft; post, "
        "after the second",
        choices=("pre", "post"),
    )
    lora_in_init_method: str = arg(
        "kaiming",
        "Initialization of the first matrix of an adapter, by its standard deviation: kaiming, "
        "1 / sqrt(3 in) like peft; xavier, sqrt(2 / (in + rank)); normal, 0.2",
        choices=("kaiming", "xavier", "normal"),
    )
    lora_out_init_method: str | None = arg(
        None,
        "Initialization of the second matrix: always zero, so that training starts from the base "
        "model",
        choices=("zero",),
    )
    lora_target_modules: tuple[str, ...] | None = arg(
        None,
        "Layers that get adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or names of "
        "transformers (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), or "
        "all-linear. Default: all, but no MLP layers in a model with experts, which get adapters "
        "if they are named: each expert its own. "
        "Multi-latent attention has linear_q_down_proj and linear_q_up_proj (q_a_proj, q_b_proj; "
        "linear_q_proj without q_lora_rank), linear_kv_down_proj and linear_kv_up_proj",
    )
    export_peft: str | None = arg(
        None,
        "Directory in which a completed run writes its adapters for peft, as iter_<steps>; "
        "requires save",
    )


def gated_ffn_width(values: Values) -> int:
    """Return the default width of a gated MLP: two thirds of 4 x hidden_size, rounded down to a
    multiple of 64 like Megatron-LM, or rounded up to ``multiple_of`` like FlagScale and Llama."""
    width = 4 * values["hidden_size"] * 2 / 3
    step = values["multiple_of"]
    if step is None:
        return int(width / 64) * 64
    scaled = int(int(width) * (values["hidden_dim_multiplier"] or 1))
    return int(-(-scaled // step) * step)
