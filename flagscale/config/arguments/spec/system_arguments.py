"""Arguments of the section ``system``: devices, checkpoints, logging, meshes and recomputation.

Names, meanings and, unless stated otherwise, defaults are Megatron-LM's (those of heterogeneous
training FlagScale's), so that one YAML also drives their checkouts. A name that megatron.core has
too replaces the core's: the training program's default counts. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.spec.argument import arg

COMM = "comm"
"""Argument with the options of the communication backend, which a YAML may write as a map."""


@dataclass(frozen=True)
class Runtime:
    """Device, process groups, random numbers and housekeeping of the process."""

    device: str = arg(
        "auto",
        "Kind of device to train on: cpu, cuda, or one of an installed package "
        "(docs/guides/add-a-chip.md); auto uses the first kind that the host has, otherwise cpu",
    )
    distributed_backend: str = arg(
        "auto",
        "Backend of the process groups: nccl, gloo, fsccl, a plug-in or a map such as "
        "cpu:gloo,cuda:nccl (`flagscale comm list`); auto: nccl on CUDA, otherwise gloo",
    )
    comm: tuple[str, ...] | None = arg(
        None,
        "Options of the communication backend, NAME=VALUE or a map in YAML. `flagscale comm list` "
        "lists the options of each backend",
    )
    distributed_timeout_minutes: float = arg(
        10.0,
        "Timeout of collectives in minutes",
        minimum=0.01,
        maximum=500_000,
    )
    seed: int = arg(1234, "Random seed of initial weights, dropout and data order", minimum=0)
    manual_gc: bool = arg(
        False,
        "Run Python's garbage collector every manual_gc_interval steps instead of automatically",
    )
    manual_gc_interval: int = arg(
        100, "Steps between garbage collections with manual_gc", minimum=1
    )
    exit_signal_handler: bool = arg(
        True, "On SIGTERM, save a checkpoint (with save) and exit after the current step"
    )
    exit_interval: int | None = arg(
        None, "Save a checkpoint and exit after a step that is a multiple of this", minimum=1
    )
    exit_duration_in_mins: float | None = arg(
        None, "Save a checkpoint and exit after this many minutes", minimum=0, maximum=500_000
    )
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "Layers per virtual stage of the interleaved pipeline schedule", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, "Virtual stages per pipeline rank of the interleaved pipeline schedule", minimum=1
    )
    transformer_impl: str = arg(
        "auto",
        "Implementation of transformer layers. compiled: the fastest on CUDA (whole layers are "
        "compiled, weight gradients accumulate in the GEMM, no fp32 logits in the loss); local: "
        "megatron.core's own layers with this project's attention and norm; auto: compiled on CUDA "
        "and with fp8, otherwise local. transformer_engine is replaced by auto, with a note",
        choices=("auto", "compiled", "local", "transformer_engine"),
    )
    allow_fallbacks: bool = arg(
        True,
        "Replace an unsupported value by one that does nearly the same, with a note "
        "(transformer_impl: transformer_engine, ckpt_format: torch, sequence_parallel without "
        "tensor parallelism). False rejects such values",
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True, "Fail with step and rank if the loss or the gradient is not finite"
    )
    loss_spike_factor: float = arg(
        2.0,
        "Warn if the loss of a step exceeds the recent median by this factor and by 0.5; 0 "
        "disables the warning",
        minimum=0,
    )
    peak_tflops: float | None = arg(
        None,
        "Peak dense TFLOP/s of a device in the training precision, for MFU and estimates (default: "
        "known for many GPUs). With heterogeneous devices, it applies to unknown devices only",
        minimum=0.001,
    )


@dataclass(frozen=True)
class Logging:
    """Progress logs and metrics sinks: TensorBoard, Weights & Biases, MLflow, Comet, SwanLab."""

    log_interval: int = arg(100, "Steps between progress lines", minimum=1)
    log_throughput: bool = arg(
        False,
        "Write tokens/s (of the job and per GPU), TFLOP/s and MFU to metrics sinks, too, not only "
        "to the console",
    )
    log_straggler: bool = arg(
        True,
        "Measure the time of a step by section (data, forward, backward, optimizer, waiting for "
        "others) on each rank, and warn of ranks that work longer than equal ranks",
    )
    straggler_threshold: float = arg(
        1.1,
        "Working time of a straggler, as a multiple of the median of equal ranks",
        minimum=1,
    )
    log_params_norm: bool = arg(False, "Log the L2 norm of all parameters")
    log_learning_rate_to_tensorboard: bool = arg(True, "Write the learning rate to metrics sinks")
    log_timers_to_tensorboard: bool = arg(
        False, "Write the step time and its sections in seconds to metrics sinks"
    )
    log_memory_to_tensorboard: bool = arg(False, "Write the peak memory of a rank to metrics sinks")
    log_validation_ppl_to_tensorboard: bool = arg(
        False, "Write the validation perplexity to metrics sinks"
    )
    tensorboard_dir: str | None = arg(None, "Directory of TensorBoard event files")
    tensorboard_log_interval: int = arg(
        1,
        "Steps between entries of all metrics sinks, not only of TensorBoard",
        minimum=1,
    )
    tensorboard_queue_size: int = arg(
        1000,
        "Number of steps whose metrics wait at most while TensorBoard files cannot be written, at "
        "least 100; the oldest are dropped",
        minimum=1,
    )
    wandb_project: str | None = arg(None, "Weights & Biases project; not set: W&B is disabled")
    wandb_exp_name: str | None = arg(None, "Name of the Weights & Biases run")
    wandb_save_dir: str | None = arg(None, "Directory of local Weights & Biases files")
    wandb_entity: str | None = arg(None, "Weights & Biases entity: a user or a team")
    mlflow_experiment: str | None = arg(None, "MLflow experiment; not set: MLflow is disabled")
    mlflow_run_name: str | None = arg(None, "Name of the MLflow run")
    mlflow_tracking_uri: str | None = arg(
        None,
        "Address of the MLflow server or store, such as http://host:5000 or sqlite:////a/file.db "
        "(default: MLFLOW_TRACKING_URI, otherwise mlflow/mlflow.db next to the checkpoints)",
    )
    comet_project: str | None = arg(None, "Comet project; not set: Comet is disabled")
    comet_workspace: str | None = arg(None, "Comet workspace: a user or a team")
    comet_experiment_name: str | None = arg(None, "Name of the Comet experiment")
    swanlab_project: str | None = arg(None, "SwanLab project; not set: SwanLab is disabled")
    swanlab_workspace: str | None = arg(None, "SwanLab workspace: a user or a team")
    swanlab_exp_name: str | None = arg(None, "Name of the SwanLab experiment")
    metrics_sinks: tuple[str, ...] | None = arg(
        None,
        "Additional metrics sinks, by the names of entry points (flagscale.metrics_sinks) of "
        "installed packages",
    )


@dataclass(frozen=True)
class Profiling:
    """Profiling of steps."""

    profile: bool = arg(
        False, "Profile some steps: write a trace and, with CUDA, a summary of device time"
    )
    profile_step_start: int = arg(10, "First profiled step", minimum=1)
    profile_step_end: int = arg(12, "Step at which profiling stops (exclusive)", minimum=2)
    profile_ranks: tuple[int, ...] | None = arg(None, "Profiled ranks (default: rank 0)")
    profile_dir: str | None = arg(
        None, "Directory of traces (default: tensorboard_dir, or the working directory)"
    )
    use_pytorch_profiler: bool = arg(
        True,
        "Use torch's profiler. False only marks the range for the profiler of the device, such as "
        "nsys profile --capture-range=cudaProfilerApi",
    )

    record_memory_history: bool = arg(
        False,
        "On CUDA, record allocations with their stacks. A rank that runs out of memory writes a "
        "snapshot of them for https://pytorch.org/memory_viz",
    )
    memory_snapshot_path: str | None = arg(
        None,
        "File of memory snapshots, to whose name rank and step are added (default: memory.pickle "
        "in profile_dir, tensorboard_dir, or the working directory)",
    )
    memory_snapshot_step: int | None = arg(
        None,
        "Step after which profile_ranks (default: rank 0) write a memory snapshot, in addition to "
        "that of a rank that runs out of memory",
        minimum=1,
    )


@dataclass(frozen=True)
class Checkpointing:
    """Saving and loading of checkpoints."""

    save: str | None = arg(
        None,
        "Directory in which checkpoints are saved, or an address of object storage "
        "(s3://bucket/prefix, gs://…)",
    )
    save_staging_dir: str | None = arg(
        None,
        "Directory on each host to which checkpoints are written before they are uploaded, if save "
        "is an address (default: checkpoint_staging in the run's directory). It holds one "
        "checkpoint, and only its owner may write it",
    )
    load: str | None = arg(
        None,
        "Directory or address from which the newest complete checkpoint is loaded, if there is one "
        "(default: the run's own checkpoints)",
    )
    pretrained_checkpoint: str | None = arg(
        None,
        "Weights to start from at step 0 if load contains no checkpoint: a Hugging Face directory "
        "(config.json, *.safetensors), whose config.json also sets arguments of the model that the "
        "YAML leaves out, or a directory of checkpoints (docs/guides/convert-checkpoints.md)",
    )
    export_huggingface: str | None = arg(
        None,
        "Directory in which a completed run writes its last checkpoint for transformers, as "
        "iter_<steps>: safetensors, config.json and the tokenizer; requires save",
    )
    export_each_checkpoint: bool = arg(
        False,
        "Write export_huggingface and export_peft for each checkpoint when it is complete, in the "
        "background, not only for the last one; an export is deleted together with its checkpoint",
    )
    save_interval: int | None = arg(
        None, "Steps between checkpoints (default: only the end of training is saved)", minimum=1
    )
    rampup_save_interval: int | None = arg(
        None,
        "Steps between checkpoints during the batch-size ramp-up (default: save_interval)",
        minimum=1,
    )
    keep_last: int | None = arg(
        None, "Number of newest checkpoints to keep in save (default: all)", minimum=1
    )
    save_retain_interval: int | None = arg(
        None,
        "Always keep checkpoints of steps that are multiples of this; of the other checkpoints, "
        "keep the keep_last newest (default: the newest)",
        minimum=1,
    )
    save_best: bool = arg(
        False,
        "Save a checkpoint after each evaluation with the lowest validation loss so far, and keep "
        "it until there is a better one, independent of keep_last. The link `best` in save names "
        "it: load: <save>/best",
    )
    non_persistent_save_interval: int | None = arg(
        None,
        "Steps between copies of the training state in the memory of the hosts, from which a job "
        "that is started again goes on (docs/guides/resume-and-restart.md); default: none",
        minimum=1,
    )
    non_persistent_ckpt_type: str | None = arg(
        None,
        "Place of the copies of non_persistent_save_interval: local, the memory of the hosts",
        choices=("local",),
    )
    replication: bool | None = arg(
        None,
        "Send each copy in memory to another host as well, so that a lost host loses none "
        "(default: if there are several hosts)",
    )
    replication_jump: int | None = arg(
        None,
        "Distance of the rank that receives a rank's copy (default: the number of ranks per host)",
        minimum=1,
    )
    async_save: bool = arg(False, "Write checkpoints in a forked process while training continues")
    ckpt_format: str = arg(
        "torch_dist",
        "Format of saved checkpoints. The other formats of Megatron-LM are replaced by torch_dist, "
        "with a note",
        choices=("torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"),
    )
    ckpt_fully_parallel_save: bool = arg(
        True, "Distribute the writing of a checkpoint over all data-parallel ranks"
    )
    ckpt_fully_parallel_load: bool = arg(
        False, "Distribute the reading of a checkpoint over all data-parallel ranks"
    )
    verify_checkpoint: bool = arg(
        True,
        "Verify the checksums of a checkpoint's tensors as each rank reads them",
    )
    finetune: bool = arg(
        False, "Load the weights only, and start from step 0 without optimizer, RNG and data state"
    )
    no_load_optim: bool = arg(False, "Do not load the state of optimizer and scheduler")
    no_load_rng: bool = arg(False, "Do not load the state of the random number generators")
    no_save_optim: bool = arg(False, "Do not save the state of optimizer and scheduler")
    no_save_rng: bool = arg(False, "Do not save the state of the random number generators")
    exit_on_missing_checkpoint: bool = arg(
        False, "Fail if load contains no checkpoint, instead of starting from step 0"
    )


@dataclass(frozen=True)
class Heterogeneous:
    """Training on heterogeneous devices: meshes of a pipeline, or data-parallel replicas."""

    enable_hetero: bool = arg(
        False,
        "Train one model on heterogeneous devices. With meshes, each mesh has its own tensor-, "
        "context-, expert- and data-parallel sizes and number of layers",
    )
    hetero_mode: str = arg(
        "pp",
        "Parallelism over heterogeneous devices. pp: pipeline stages (hetero_process_meshes); dp: "
        "replicas of the whole model (hetero_micro_batch_sizes)",
        choices=("pp", "dp"),
    )
    hetero_micro_batch_sizes: tuple[int, ...] | None = arg(
        None,
        "For hetero_mode: dp: pairs of a number of replicas and their micro-batch size, in rank "
        "order: 8 2 8 1. Enables calculate_per_token_loss",
    )
    hetero_num_microbatches: tuple[str, ...] | None = arg(
        None,
        "For hetero_mode: dp: pairs of a number of replicas and their micro-batches per step "
        "(default: the same number for all). auto: chosen by the speed of the replicas in the "
        "first steps",
    )
    hetero_process_meshes: tuple[str, ...] | None = arg(
        None,
        "Meshes in pipeline order. Each is five numbers (tensor, context, expert, data and "
        "pipeline parallel size) or a map in YAML (tp=2,dp=4,layers=18,device_type=A800 on the "
        "command line) with the keys device_type, tp, cp, ep, etp, dp, pp and layers (a list: per "
        "stage). A micro-batch has micro_batch_size x dp of the first mesh sequences. With only "
        "ranks=16, the sizes of a mesh are chosen by measurement before training starts, and "
        "micro_batch_size is the maximum number of sequences per rank. auto makes such a mesh of "
        "each type= in the hostfile",
    )
    hetero_pipeline_layer_split: tuple[str, ...] | None = arg(
        None,
        "Number of layers of each pipeline stage, over all meshes (default: equal). auto: chosen "
        "for the shortest step that fits in memory, by the speed of layers on each mesh, which is "
        "measured before training starts and cached",
    )
    hetero_device_types: tuple[str, ...] | None = arg(
        None,
        "Device type of each mesh, as in `type=` in the hostfile. Hosts are ordered by type, "
        "because ranks are numbered by mesh",
    )
    hetero_current_device_type: str | None = arg(
        None, "Device type of the host of this rank; the launcher sets it"
    )
    hetero_use_cpu_communication: bool = arg(
        False,
        "Transfer data between stages of different meshes through host memory by Gloo, with any "
        "communication backend",
    )
    hetero_eager_1f1b: bool = arg(
        False,
        "Let each stage run twice as many forward passes ahead as there are later stages, instead "
        "of as many. It hides transfers over slow links and needs memory for the activations of "
        "more micro-batches",
    )
    use_partial_reduce_for_shared_embedding: bool = arg(
        True,
        "Reduce the gradient of an embedding that is tied to the output layer by the rows that "
        "ranks of both stages share",
    )
    standalone_embedding_stage: bool = arg(
        False, "The first pipeline stage holds only the embedding, no layers"
    )
    expert_tensor_parallel_size_per_process_mesh: tuple[int, ...] | None = arg(
        None, "Tensor-parallel size of experts, for each mesh", minimum=1
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
"""megatron.core's names of modules that selective recomputation can recompute."""
OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)
"""megatron.core's names of modules whose activations can be offloaded."""


@dataclass(frozen=True)
class ContextParallelism:
    """Communication of attention when ranks share sequences (``context_parallel_size``)."""

    cp_comm_type: tuple[str, ...] | None = arg(
        None,
        "Communication of context parallelism. a2a: exchange a part of the sequence for a part of "
        "the heads, which context_parallel_size must divide; all_gather: gather keys and values "
        "while attention to the rank's own ones is computed; p2p: send keys and values around a "
        "ring, which needs the memory of two ranks' keys and values, not of all; a2a+p2p: a2a "
        "among neighbors, and a ring of these groups. By default a2a if the heads can be divided, "
        "otherwise all_gather. With separate documents or attention dropout, a ring is answered "
        "by all_gather",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = arg(
        None,
        "With cp_comm_type: a2a+p2p, the number of neighboring ranks that exchange a part of the "
        "sequence for a part of the heads, such as those of a host, and the number of these "
        "groups. The product is context_parallel_size",
        minimum=1,
    )


SHARDING = "data_parallel_sharding_strategy"
INSTANCES = "num_distributed_optimizer_instances"
NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = (
    "no_shard",
    "optim",
    "optim_grads",
    "optim_grads_params",
)


@dataclass(frozen=True)
class Sharding:
    """Sharding over data-parallel ranks."""

    data_parallel_sharding_strategy: str = arg(
        NO_SHARD,
        "State that is sharded over data-parallel ranks. optim: the optimizer state, as with "
        "use_distributed_optimizer (ZeRO-1); optim_grads: gradients too (ZeRO-2); "
        "optim_grads_params: weights too, which are gathered layer by layer (ZeRO-3, FSDP). "
        "no_shard: as use_distributed_optimizer says",
        choices=(NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS),
    )
    num_distributed_optimizer_instances: int = arg(
        1,
        "Number of groups of consecutive data-parallel ranks. State is sharded within a group, and "
        "each group has a replica (hybrid sharding, HSDP). With one group per host, only the "
        "gradients' shards are reduced between hosts, once per step. It must divide the "
        "data-parallel size times the context-parallel size",
        minimum=1,
    )


@dataclass(frozen=True)
class OptimizerOffload:
    """Optimizer state in host memory."""

    optimizer_cpu_offload: bool = arg(
        False,
        "Keep fp32 weights and both moments of Adam in the host's memory, 12 bytes a weight, or "
        "fewer with use_precision_aware_optimizer, which makes the update faster. Requires "
        "use_distributed_optimizer. The shorter a step, the larger the part of it that the update "
        "takes",
    )
    optimizer_offload_fraction: float = arg(
        1.0, "Fraction of the weights whose state is in host memory", minimum=0.0, maximum=1.0
    )


@dataclass(frozen=True)
class Recomputation:
    """Recomputation of activations; per stage and micro-batch, each argument is a list of rows."""

    recompute_granularity: str | None = arg(
        None,
        "Activation recomputation. full: recompute whole layers in the backward pass, as set by "
        "recompute_method and recompute_num_layers; selective: recompute recompute_modules; auto: "
        "the cheapest of these that fits the memory of the devices of each stage, by calculation: "
        "modules of some or all layers where they cost less than whole layers, then whole layers",
        choices=("full", "selective", RECOMPUTE_AUTO),
    )
    recompute_memory_gib: float | None = arg(
        None,
        "Memory per rank in GiB that recompute_granularity: auto may use (default: 97 % of the "
        "memory that is free when training starts, less a tenth of it, at most 8 GiB)",
        minimum=0.001,
    )
    recompute_granularity_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None,
        "Rows of [stages, micro-batches, value, micro-batches, value, ...]. Value 1 recomputes the "
        "layers of these stages in this number of micro-batches, like recompute_granularity: full; "
        "0 keeps their activations. All rows together cover the stages of the pipeline (times "
        "virtual stages), and each row the micro-batches of a step",
    )
    recompute_method_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Rows of the same form for recompute_method: 0 is uniform, 1 is block"
    )
    recompute_num_layers_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Rows of the same form for recompute_num_layers; 0 recomputes nothing"
    )


SPLIT_SIZES, SPLIT_COUNTS = "hetero_micro_batch_sizes", "hetero_num_microbatches"
MESHES, LAYER_SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
