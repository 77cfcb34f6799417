"""The training program's arguments that are no field of megatron.core's own dataclasses.

Names, meanings and, where nothing else is said, defaults are Megatron-LM's, so that one YAML also
drives a Megatron-LM checkout. A name declared here that megatron.core has too (``split``,
``transformer_impl``, ``min_lr``) replaces the core's: the training program's default counts.

This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.adapters import Adapters
from flagscale.config.arguments.architecture import Architecture
from flagscale.config.arguments.checkpointing import Checkpointing
from flagscale.config.arguments.conversations import Conversations, Prompts
from flagscale.config.arguments.external import EXTERNAL, External
from flagscale.config.arguments.families import Masking
from flagscale.config.arguments.hetero import Heterogeneous
from flagscale.config.arguments.latent import Latent
from flagscale.config.arguments.recompute import Recomputation
from flagscale.config.arguments.spec import Section, arg

TOKENIZERS = (
    "HuggingFaceTokenizer",
    "Llama3TokenizerFS",
    "QwenTokenizerFS",
    "Qwen2TokenizerFS",
    "HFTokenizerFS",
    "HFTokenizersTokenizerFS",
    "GPT2BPETokenizer",
    "AquilaTokenizerFS",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


@dataclass(frozen=True)
class Runtime:
    """Device, process groups, random numbers, housekeeping of the process."""

    device: str = arg(
        "auto",
        "Kind of device to train on: cpu, cuda, or one that an installed package brings "
        "(docs/accelerators.md); auto takes the first that this machine has, otherwise the CPU",
    )
    distributed_backend: str = arg(
        "auto",
        "Backend of the process groups: nccl, gloo, fsccl, a plug-in or a map such as "
        "cpu:gloo,cuda:nccl (`flagscale comm list`); auto: nccl on CUDA, otherwise gloo",
    )
    comm: tuple[str, ...] | None = arg(
        None,
        "Options of that backend, NAME=VALUE; a YAML may write a map. "
        "`flagscale comm list` shows each backend's",
    )
    distributed_timeout_minutes: float = arg(
        10.0,
        "Minutes after which a collective that does not finish fails",
        minimum=0.01,
        maximum=500_000,
    )
    seed: int = arg(1234, "Seed of the initial weights, dropout and data order", minimum=0)
    manual_gc: bool = arg(
        False, "Run Python's garbage collector at fixed steps instead of when it likes"
    )
    manual_gc_interval: int = arg(
        100, "Steps between garbage collections with --manual-gc", minimum=1
    )
    exit_signal_handler: bool = arg(
        True, "On SIGTERM save a checkpoint (with --save) and end cleanly after the current step"
    )
    exit_interval: int | None = arg(
        None, "End after a step that this number divides, saving a checkpoint first", minimum=1
    )
    exit_duration_in_mins: float | None = arg(
        None, "End after this many minutes, saving a checkpoint first", minimum=0, maximum=500_000
    )
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "Layers of a model chunk of the interleaved pipeline schedule", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, "Model chunks a pipeline rank of the interleaved schedule holds", minimum=1
    )
    transformer_impl: str = arg(
        "auto",
        "Transformer layers: compiled is the fastest on CUDA (layers compiled whole, weight "
        "gradients added by the matrix product, a loss without fp32 logits), local is "
        "megatron.core's own with this project's attention and norm, auto is compiled on CUDA and "
        "with fp8, otherwise local; transformer_engine, for entry points that bring Transformer "
        "Engine, is auto here, with a note",
        choices=("auto", "compiled", "local", "transformer_engine"),
    )
    allow_fallbacks: bool = arg(
        True,
        "Take another value, with a note, for one that this trainer cannot have and that does "
        "nearly the same (transformer_impl: transformer_engine, ckpt_format: torch, "
        "sequence_parallel without tensor parallelism); false refuses it",
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True, "End the job, naming step and rank, when the loss or the gradient is not finite"
    )
    loss_spike_factor: float = arg(
        2.0,
        "Warn when a step's loss is this multiple of the recent median and 0.5 above it; "
        "0 never warns",
        minimum=0,
    )
    peak_tflops: float | None = arg(
        None,
        "Peak dense TFLOP/s of a device in the training precision, for MFU and estimates; known "
        "for many GPUs. Where devices are unlike, estimates take it for those that are not known",
        minimum=0.001,
    )


@dataclass(frozen=True)
class Logging:
    """What is reported, how often, and to whom."""

    log_interval: int = arg(100, "Steps between progress lines", minimum=1)
    log_throughput: bool = arg(
        False, "Write tokens/s, TFLOP/s and MFU to TensorBoard and W&B too, not only the console"
    )
    log_params_norm: bool = arg(False, "Report the L2 norm of all parameters")
    log_learning_rate_to_tensorboard: bool = arg(True, "Write the learning rate to TensorBoard")
    log_timers_to_tensorboard: bool = arg(False, "Write the seconds a step took to TensorBoard")
    log_memory_to_tensorboard: bool = arg(False, "Write the peak memory of a rank to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = arg(
        False, "Write the validation perplexity to TensorBoard"
    )
    tensorboard_dir: str | None = arg(None, "Directory of TensorBoard's event files")
    tensorboard_log_interval: int = arg(
        1, "Steps between TensorBoard entries, in multiples of which progress is read", minimum=1
    )
    tensorboard_queue_size: int = arg(
        1000, "Entries that TensorBoard's writer holds before it writes", minimum=1
    )
    wandb_project: str | None = arg(None, "Weights & Biases project; without it W&B is off")
    wandb_exp_name: str | None = arg(None, "Name of the Weights & Biases run")
    wandb_save_dir: str | None = arg(None, "Directory of Weights & Biases' local files")
    wandb_entity: str | None = arg(None, "Weights & Biases entity, a user or a team")


@dataclass(frozen=True)
class Profiling:
    """Looking at single steps."""

    profile: bool = arg(
        False,
        "Record some steps: a trace, and with CUDA a summary of what the device's time went to",
    )
    profile_step_start: int = arg(10, "First step that is recorded", minimum=1)
    profile_step_end: int = arg(12, "First step that is not recorded any more", minimum=2)
    profile_ranks: tuple[int, ...] | None = arg(None, "Ranks that record; rank 0 without it")
    profile_dir: str | None = arg(
        None, "Directory of the traces; without it tensorboard_dir, or where training runs"
    )
    use_pytorch_profiler: bool = arg(
        True,
        "Record by torch's profiler; without it only a range of the chip's own profiler is marked, "
        "such as for nsys profile --capture-range=cudaProfilerApi",
    )


@dataclass(frozen=True)
class Model:
    """Model choices that are no field of megatron.core's TransformerConfig."""

    family: str = arg(
        "gpt",
        "Family of models: gpt (text token by token), bert (masked tokens, from both sides), or "
        "one that an installed package brings (docs/models.md)",
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
    """How learning rate and weight decay change with the samples consumed."""

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


@dataclass(frozen=True)
class Data:
    """Which text is trained on."""

    data_path: tuple[str, ...] | None = arg(
        None, "Data set prefixes (of .bin and .idx), or weights and prefixes: 0.3 a 0.7 b"
    )
    train_data_path: tuple[str, ...] | None = arg(None, "As data_path, for training alone")
    valid_data_path: tuple[str, ...] | None = arg(None, "As data_path, for validation alone")
    test_data_path: tuple[str, ...] | None = arg(None, "As data_path, for the test alone")
    data_phases: tuple[str, ...] | None = arg(
        None,
        "Mixtures of training data that follow that of data_path, each from a number of samples "
        "or tokens on: a list of {samples: 100000, data_path: [0.2, web, 0.8, code]}; data sets "
        "go on where the phase before left them",
    )
    split: str | None = arg(
        None, "Shares of data_path for training, validation and test: 949,50,1 (or 1)"
    )
    mock_data: bool = arg(False, "Train on made-up tokens; needs neither data nor tokenizer files")
    data_cache_path: str | None = arg(None, "Directory of the data sets' index caches")
    dataloader_type: str = arg(
        "single",
        "Order of samples: single walks the data set's own shuffle, cyclic reshuffles each epoch; "
        "external takes what external_data gives",
        choices=("single", "cyclic", EXTERNAL),
    )
    num_workers: int = arg(2, "Loader processes a rank; 0 loads in the training process", minimum=0)
    create_attention_mask: bool = arg(
        False, "Make a mask for every sequence; attention here needs none, and none is made"
    )
    reset_position_ids: bool = arg(
        False, "Restart positions, learned or rotary, after an end-of-document token"
    )
    reset_attention_mask: bool = arg(
        False,
        "Keep documents apart: attention does not cross an end-of-document token, which is of the "
        "document that it ends",
    )
    eod_mask_loss: bool = arg(False, "Leave end-of-document tokens out of the loss")


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens."""

    tokenizer_type: str | None = arg(
        None,
        "NullTokenizer, HuggingFaceTokenizer (a local directory; Llama3TokenizerFS means the "
        "same), SentencePieceTokenizer or ByteLevelTokenizer",
        choices=TOKENIZERS,
    )
    tokenizer_path: str | None = arg(None, "The tokenizer's directory or file")
    merge_file: str | None = arg(
        None, "GPT-2's merges.txt, where tokenizer_path (vocab_file) is its vocab.json"
    )
    special_tokens_file: str | None = arg(
        None, "Of AquilaTokenizerFS: special tokens, a line each, whose ids follow the vocabulary"
    )
    vocab_size: int | None = arg(
        None, "Tokens of the vocabulary before padding; the tokenizer's own without it", minimum=1
    )
    make_vocab_size_divisible_by: int = arg(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size", minimum=1
    )
    legacy_tokenizer: bool = arg(
        False, "Chooses between Megatron-LM's two tokenizer classes; of no effect here"
    )


TRAINING_GROUPS: tuple[tuple[type, Section], ...] = (
    (Runtime, "system"),
    (Checkpointing, "system"),
    (Logging, "system"),
    (Profiling, "system"),
    (Heterogeneous, "system"),
    (Recomputation, "system"),
    (Model, "model"),
    (Architecture, "model"),
    (Latent, "model"),
    (TrainingLength, "model"),
    (LearningRate, "model"),
    (Adapters, "model"),
    (Data, "data"),
    (External, "data"),
    (Masking, "data"),
    (Conversations, "data"),
    (Prompts, "data"),
    (Tokenizer, "data"),
)
"""Each group of arguments with the section of a train YAML that it belongs to."""
