"""Arguments of the section ``system``: devices, checkpoints, logging, meshes and recomputation.

Names, meanings and, unless stated otherwise, defaults are Megatron-LM's (those of heterogeneous
training FlagScale's), so that one YAML also drives their checkouts. A name that megatron.core has
too replaces the core's: the training program's default counts. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.spec.argument import arg

COMM = "comm"
"""Options of the communication backend, which a YAML may write as a map."""


@dataclass(frozen=True)
class Runtime:
    """Device, process groups, random numbers and housekeeping of the process."""

    device: str = arg(
        "auto",
        "Kind of device to train on: cpu, cuda, or one that an installed package brings "
        "(docs/guides/add-a-chip.md); auto takes the first that this machine has, otherwise the "
        "CPU",
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
    """Progress reports and the services that receive them."""

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
class Checkpointing:
    """Saving and loading of checkpoints."""

    save: str | None = arg(None, "Directory to save checkpoints in")
    load: str | None = arg(
        None, "Directory to start from: its latest whole checkpoint, if it has one"
    )
    pretrained_checkpoint: str | None = arg(
        None,
        "Where load holds no checkpoint, start from these weights, at step 0: a directory of "
        "Hugging Face (config.json, *.safetensors), whose config.json also gives the arguments of "
        "the model that the YAML leaves out, or one of checkpoints "
        "(docs/guides/convert-checkpoints.md)",
    )
    export_huggingface: str | None = arg(
        None,
        "Directory below which a run that has come to its end writes its last checkpoint for "
        "transformers, in iter_<steps>: safetensors, config.json and the tokenizer (needs save)",
    )
    save_interval: int | None = arg(
        None, "Steps between checkpoints; without it only the end is saved", minimum=1
    )
    rampup_save_interval: int | None = arg(
        None, "Steps between checkpoints while the batch grows; save_interval without it", minimum=1
    )
    keep_last: int | None = arg(
        None, "Keep this many newest checkpoints in --save; without it all", minimum=1
    )
    save_retain_interval: int | None = arg(
        None,
        "Keep checkpoints of steps that are multiples of this for ever; of the others keep_last, "
        "without it the newest",
        minimum=1,
    )
    async_save: bool = arg(False, "Write checkpoints from a forked process while training goes on")
    ckpt_format: str = arg(
        "torch_dist",
        "Format of the checkpoints that are saved: torch_dist; it is taken, with a note, for "
        "Megatron-LM's others too",
        choices=("torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"),
    )
    ckpt_fully_parallel_save: bool = arg(
        True, "Spread the writing of a checkpoint over all data-parallel ranks"
    )
    ckpt_fully_parallel_load: bool = arg(
        False, "Spread the reading of a checkpoint over all data-parallel ranks"
    )
    verify_checkpoint: bool = arg(
        True,
        "Compare the checksums of everything in a checkpoint before it is loaded: every rank reads "
        "a part",
    )
    finetune: bool = arg(
        False, "Load the weights only and start from step 0 without optimizer, RNG and data state"
    )
    no_load_optim: bool = arg(False, "Do not load the optimizer's and the scheduler's state")
    no_load_rng: bool = arg(False, "Do not load the state of the random number generators")
    no_save_optim: bool = arg(False, "Do not save the optimizer's and the scheduler's state")
    no_save_rng: bool = arg(False, "Do not save the state of the random number generators")
    exit_on_missing_checkpoint: bool = arg(
        False, "Fail when --load has no checkpoint, instead of starting from step 0"
    )


@dataclass(frozen=True)
class Heterogeneous:
    """Meshes: which ranks hold which pipeline stages, each with parallel sizes of its own."""

    enable_hetero: bool = arg(
        False,
        "Train one model on meshes: pipeline stages on unlike devices, each mesh with its "
        "own tensor-, context-, expert- and data-parallel sizes and number of layers",
    )
    hetero_mode: str = arg(
        "pp",
        "What unlike devices share: pp, the layers of one pipeline (hetero_process_meshes); dp, a "
        "step's samples, each with the whole model (hetero_micro_batch_sizes)",
        choices=("pp", "dp"),
    )
    hetero_micro_batch_sizes: tuple[int, ...] | None = arg(
        None,
        "With hetero_mode: dp, pairs of how many replicas and the micro-batch size that each of "
        "them takes, in the order of ranks: 8 2 8 1. The loss is per token then "
        "(calculate_per_token_loss)",
    )
    hetero_num_microbatches: tuple[str, ...] | None = arg(
        None,
        "With hetero_mode: dp, pairs of how many replicas and the micro-batches that each of them "
        "takes a step; without it all take as many. auto: as many as suit the times that the "
        "replicas take in the first steps",
    )
    hetero_process_meshes: tuple[str, ...] | None = arg(
        None,
        "The meshes, in the pipeline's order: five sizes each (tensor, context, expert, data and "
        "pipeline parallel), or words such as tp=2,dp=4,layers=18,device_type=A800, which a YAML "
        "writes as a list of maps of device_type, tp, cp, ep, etp, dp, pp and layers (a list: of "
        "each stage). A micro-batch has micro_batch_size x dp of the first mesh sequences. "
        "ranks=16 alone leaves a mesh's sizes to be chosen, by measuring before training starts "
        "what takes how long; auto makes such a mesh of each type= of the hostfile. Then "
        "micro_batch_size is the most sequences that a rank takes at once",
    )
    hetero_pipeline_layer_split: tuple[str, ...] | None = arg(
        None,
        "Layers of each pipeline stage, over all meshes, or auto: those by which a step is "
        "shortest and fits, by what a layer takes on each mesh, which is measured before training "
        "starts and kept for the next time; without it all stages have as many",
    )
    hetero_device_types: tuple[str, ...] | None = arg(
        None,
        "The device type of each mesh, as the hostfile has it in `type=`: ranks are numbered by "
        "mesh, so hosts are ordered by these types first",
    )
    hetero_current_device_type: str | None = arg(
        None, "The device type of this rank's host; the launcher tells it from the hostfile"
    )
    hetero_use_cpu_communication: bool = arg(
        False,
        "What stages of different meshes send each other goes through the hosts' memory, by Gloo, "
        "whatever the communication backend",
    )
    hetero_eager_1f1b: bool = arg(
        False,
        "Every stage of the meshes does twice as many forward passes ahead as there are stages "
        "after it, instead of as many: what stages send each other over a slow link is hidden, and "
        "activations of as many more micro-batches are kept",
    )
    use_partial_reduce_for_shared_embedding: bool = arg(
        True,
        "Gradients of an embedding tied to the output layer are summed by the rows that ranks of "
        "the two ends share, never as a whole: always so here",
    )
    standalone_embedding_stage: bool = arg(
        False, "The first pipeline stage holds the embedding and no layers"
    )
    expert_tensor_parallel_size_per_process_mesh: tuple[int, ...] | None = arg(
        None, "Tensor parallel size of the experts, of each mesh", minimum=1
    )


RECOMPUTE_AUTO = "auto"
STAGE_GRANULARITY = "recompute_granularity_per_stage_micro_batch"
STAGE_METHOD = "recompute_method_per_stage_micro_batch"
STAGE_LAYERS = "recompute_num_layers_per_stage_micro_batch"
STAGE_RECOMPUTE = (STAGE_GRANULARITY, STAGE_METHOD, STAGE_LAYERS)
RECOMPUTE_MODULES = (
    "core_attn",
    "mlp",
    "moe",
    "shared_experts",
    "layernorm",
    "moe_act",
    "mla_up_proj",
)
"""What selective recomputation can be of, as megatron.core names it."""


@dataclass(frozen=True)
class Recomputation:
    """Recomputation of activations; per stage and micro-batch, each argument is a list of rows."""

    recompute_granularity: str | None = arg(
        None,
        "full: layers keep their input alone, as recompute_method and recompute_num_layers say, "
        "and compute the rest again in the backward pass. selective: what recompute_modules names. "
        "auto: full, of as few layers of each stage as fit its devices' memory by calculation",
        choices=("full", "selective", RECOMPUTE_AUTO),
    )
    recompute_memory_gib: float | None = arg(
        None,
        "GiB of a rank that recompute_granularity: auto plans with; without it 93 % of what is "
        "free when training starts",
        minimum=0.001,
    )
    recompute_granularity_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None,
        "Rows of [stages, micro-batches, value, micro-batches, value, ...]: 1 recomputes these "
        "stages' layers in that many micro-batches, as recompute_granularity: full does, 0 keeps "
        "their activations. The stages of all rows are the pipeline's (times virtual stages), the "
        "micro-batches of a row those of a step",
    )
    recompute_method_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Such rows for recompute_method: 0 is uniform, 1 is block"
    )
    recompute_num_layers_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Such rows for recompute_num_layers; 0 recomputes nothing"
    )


SPLIT_SIZES, SPLIT_COUNTS = "hetero_micro_batch_sizes", "hetero_num_microbatches"
MESHES, LAYER_SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
