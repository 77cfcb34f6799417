"""Arguments of the section ``model``: architecture, training length, learning rate and adapters.

Names, meanings and, unless stated otherwise, defaults are Megatron-LM's. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flagscale.config.arguments.spec.argument import Values, arg


@dataclass(frozen=True)
class Model:
    """Model choices that are no field of megatron.core's TransformerConfig."""

    family: str = arg(
        "gpt",
        "Family of models: gpt (text token by token), bert (masked tokens, from both sides), or "
        "one that an installed package brings (docs/reference/models.md)",
    )
    fp8_recipe: str = arg(
        "tensorwise",
        "How the numbers of 8-bit matrix products (fp8: hybrid or e4m3) are scaled: by the largest "
        "magnitude of the tensor, of each row, or (blockwise, as DeepSeek-V3 does it) of every 128 "
        "numbers of a row, and 128 x 128 of a weight",
        choices=("tensorwise", "rowwise", "delayed", "mxfp8", "blockwise", "custom"),
    )
    position_embedding_type: str = arg(
        "learned_absolute",
        "How positions enter the model",
        choices=("learned_absolute", "rope", "none"),
    )
    max_position_embeddings: int | None = arg(
        None, "Longest sequence the model's positions serve; seq_length without it", minimum=1
    )
    rotary_base: int = arg(10000, "Base of the rotary embedding's frequencies", minimum=1)
    rotary_percent: float = arg(
        1.0, "Share of a head's dimensions that are rotated", minimum=0, maximum=1
    )
    rotary_seq_len_interpolation_factor: int | None = arg(
        None, "Divide positions by this before rotating, for longer sequences", minimum=1
    )
    use_rope_scaling: bool = arg(False, "Scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = arg(8.0, "Factor of --use-rope-scaling", minimum=1)
    untie_embeddings_and_output_weights: bool = arg(
        False, "Give the output layer its own weights instead of the embedding's"
    )
    norm_init_weight: float | None = arg(
        None, "Value that the norms' weights start from; 1 without it"
    )
    multiple_of: int | None = arg(
        None,
        "With swiglu and without ffn_hidden_size: round its 8/3 x hidden_size up to a multiple of "
        "this",
        minimum=1,
    )
    hidden_dim_multiplier: float | None = arg(
        None, "With multiple_of: multiply that width by this before rounding", minimum=0.001
    )
    swiglu: bool = arg(False, "Gated linear units with SiLU in the MLP (SwiGLU)")
    squared_relu: bool = arg(False, "Squared ReLU in the MLP instead of GELU")
    openai_gelu: bool = arg(False, "GELU as GPT-2 has it, approximated by tanh")
    fp16_lm_cross_entropy: bool = arg(
        False, "Compute the loss in the model's precision instead of fp32"
    )
    bias_activation_fusion: bool = arg(
        True, "Fuse the MLP's bias and activation by torch.compile; of effect on CUDA only"
    )
    bias_dropout_fusion: bool = arg(
        True, "Fuse bias, dropout and residual by torch.compile; of effect on CUDA only"
    )
    use_mcore_models: bool = arg(
        True, "Only megatron.core's models exist here; accepted because many YAMLs say it"
    )


@dataclass(frozen=True)
class TrainingLength:
    """Batch sizes, how long to train, when to evaluate."""

    micro_batch_size: int = arg(1, "Sequences a model replica takes at once", minimum=1)
    global_batch_size: int | None = arg(
        None,
        "Sequences a step takes over all replicas; micro-batch x data-parallel size without it",
        minimum=1,
    )
    rampup_batch_size: tuple[int, ...] | None = arg(
        None,
        "Let the batch grow to global_batch_size: first size, increment, and the sequences over "
        "which it grows evenly, such as 32 32 100000; needs train_samples",
        minimum=1,
    )
    seq_length: int | None = arg(None, "Tokens of a sequence", minimum=1)
    train_iters: int | None = arg(None, "Steps to train; either this or train_samples", minimum=0)
    train_samples: int | None = arg(
        None, "Sequences to train on; either this or train_iters", minimum=0
    )
    iterations_to_skip: tuple[int, ...] | None = arg(
        None, "Steps whose data is passed over, without training", minimum=1
    )
    skip_train: bool = arg(False, "Evaluate what is loaded, and end")
    eval_iters: int = arg(100, "Steps of one evaluation; 0 switches it off", minimum=0)
    eval_interval: int | None = arg(1000, "Training steps between evaluations", minimum=1)


@dataclass(frozen=True)
class LearningRate:
    """Schedules of learning rate and weight decay over the consumed samples."""

    lr_decay_style: str = arg(
        "linear",
        "Shape of the learning rate's decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    min_lr: float = arg(0.0, "Learning rate the decay ends at", minimum=0)
    lr_decay_iters: int | None = arg(None, "Steps of the decay; train_iters without it", minimum=1)
    lr_decay_samples: int | None = arg(
        None, "Samples of the decay; train_samples without it", minimum=1
    )
    lr_warmup_fraction: float | None = arg(
        None, "Share of the decay steps to warm up for", minimum=0, maximum=1
    )
    lr_warmup_iters: int = arg(0, "Steps to warm up for", minimum=0)
    lr_warmup_samples: int = arg(0, "Samples to warm up for", minimum=0)
    lr_warmup_init: float = arg(0.0, "Learning rate the warm-up starts from", minimum=0)
    lr_wsd_decay_style: str = arg(
        "exponential",
        "Shape of WSD's last phase",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = arg(None, "Steps of WSD's last phase", minimum=0)
    lr_wsd_decay_samples: int | None = arg(None, "Samples of WSD's last phase", minimum=0)
    start_weight_decay: float | None = arg(
        None, "Weight decay to start from; weight_decay without it", minimum=0
    )
    end_weight_decay: float | None = arg(
        None, "Weight decay to end at; weight_decay without it", minimum=0
    )
    weight_decay_incr_style: str = arg(
        "constant",
        "How weight decay goes from its start to its end",
        choices=("constant", "linear", "cosine"),
    )
    override_opt_param_scheduler: bool = arg(
        False, "On resume take the schedule of the arguments, not of the checkpoint"
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False, "On resume take the schedule of the checkpoint, whatever the arguments say"
    )


SINKHORN = "sinkhorn"
LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", SINKHORN, "none")
"""How routers are kept from choosing the same experts always."""


@dataclass(frozen=True)
class Latent:
    """Options of multi-latent attention whose megatron.core defaults cannot express "off"."""

    q_lora_rank: int | None = arg(
        None,
        "Latent numbers that a token's queries are made of; without it they are made of its "
        "hidden state",
        minimum=1,
    )
    rope_type: str | None = arg(
        None,
        "Rotary positions of multi-latent attention: rope, or yarn, which scales them for longer "
        "sequences (without it yarn); all other attention takes rope",
        choices=("rope", "yarn"),
    )


@dataclass
class Architecture:
    """Options of layers in addition to megatron.core's (docs/reference/models.md). Not frozen,
    because it is part of the configuration from which layers are built."""

    sandwich_norm: bool = arg(
        False,
        "Norms behind attention and MLP too, before their outputs are added to what they came from "
        "(Gemma 2 and 3)",
    )
    scale_embeddings: bool = arg(
        False, "Multiply a token's embedding by the root of hidden_size (Gemma)"
    )
    attn_logit_softcapping: float | None = arg(
        None,
        "Bound attention's scores s to this c by c tanh(s / c) (Gemma 2); attention is then "
        "computed in plain steps, with all scores in memory",
        minimum=0.001,
    )
    final_logit_softcapping: float | None = arg(
        None, "Bound the logits in the same way (Gemma 2)", minimum=0.001
    )
    window_rotary_base: int | None = arg(
        None,
        "Base of the rotary frequencies of layers with a window (window_size); rotary_base and its "
        "scaling are then of the others (Gemma 3)",
        minimum=1,
    )


ARCHITECTURE_OPTIONS = tuple(field.name for field in fields(Architecture))


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters next to frozen weights (docs/guides/fine-tune.md)."""

    peft_type: str | None = arg(
        None,
        "lora: train low-rank adapters beside linear layers, and nothing else; all weights without "
        "it",
        choices=("lora",),
    )
    lora_dim: int = arg(16, "Rank of the adapters", minimum=1)
    lora_alpha: float = arg(
        32.0, "What adapters add is multiplied by this over their rank", minimum=0.001
    )
    lora_dropout: float = arg(
        0.0,
        "Share that is dropped in training, of an adapter's inputs or of what it adds",
        minimum=0,
        maximum=0.99,
    )
    lora_dropout_position: str = arg(
        "pre",
        "Where that is: pre, before the first of an adapter's matrices, as in peft; post, behind "
        "the second",
        choices=("pre", "post"),
    )
    lora_in_init_method: str = arg(
        "kaiming",
        "How the first of an adapter's matrices is drawn: kaiming, with the spread of peft's, "
        "1 / sqrt(3 in); xavier, with sqrt(2 / (in + rank)); normal, with 0.2",
        choices=("kaiming", "xavier", "normal"),
    )
    lora_out_init_method: str | None = arg(
        None,
        "How the second is drawn: zero, so that training starts from the base, which is so "
        "without it",
        choices=("zero",),
    )
    lora_target_modules: tuple[str, ...] | None = arg(
        None,
        "Layers that get adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or "
        "transformers' names (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), or "
        "all-linear; without it all, but for a mixture's experts. "
        "Multi-latent attention has linear_q_down_proj and linear_q_up_proj (q_a_proj, q_b_proj; "
        "linear_q_proj without q_lora_rank), linear_kv_down_proj and linear_kv_up_proj",
    )
    export_peft: str | None = arg(
        None,
        "Directory below which a run that has come to its end writes its adapters for peft, in "
        "iter_<steps> (needs save)",
    )


def gated_ffn_width(values: Values) -> int:
    """Width of a gated MLP that is not given: Megatron-LM's two thirds of 4 x hidden in multiples
    of 64, or, with ``multiple_of``, those of FlagScale and Llama."""
    width = 4 * values["hidden_size"] * 2 / 3
    step = values["multiple_of"]
    if step is None:
        return int(width / 64) * 64
    scaled = int(int(width) * (values["hidden_dim_multiplier"] or 1))
    return int(-(-scaled // step) * step)
