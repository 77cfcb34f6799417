"""Assembly of a training run: layout, model, optimizer, checkpoint, data and training loop."""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.checkpoints import open_checkpoints
from flagscale.config.arguments.hetero.microbatch_split import is_split_measured
from flagscale.config.arguments.layout import describe_batch, pad_vocabulary
from flagscale.config.arguments.rules.freezing import freezing_argument
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.config.arguments.rules.resuming import missing_checkpoint
from flagscale.errors import CheckpointError
from flagscale.status import StatusWriter
from flagscale.train import distributed, recompute
from flagscale.train.build import build_state, padded_vocabulary_size, vocabulary_size
from flagscale.train.checkpoint import Checkpointer
from flagscale.train.checkpoint.collective_errors import run_on_rank_0
from flagscale.train.checkpoint.formats.pretrained import load_pretrained, overwrites_all_weights
from flagscale.train.checkpoint.formats.weight_sample import sample_base_model
from flagscale.train.data.datasets import DataIterators, Datasets
from flagscale.train.data.tokenizers import Tokenizer, build_tokenizer, describe_unused_vocabulary
from flagscale.train.device import Device
from flagscale.train.distributed import RankIdentity
from flagscale.train.evaluation.scoring import SequenceScorer
from flagscale.train.evaluation.tasks import TaskEvaluation, TaskOptions
from flagscale.train.generation import Generator
from flagscale.train.layers.fp8_layers import invalidate_fp8_weights
from flagscale.train.memory_checkpoint.copies import (
    MemoryCheckpoints,
    open_memory_checkpoints,
)
from flagscale.train.memory_history import MemoryHistory
from flagscale.train.meshes.auto_layout import resolve_auto_layout
from flagscale.train.microbatch_balancer import MicrobatchBalancer
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.config import build_transformer_config
from flagscale.train.models.freezing import count_trained_weights
from flagscale.train.models.optimized import list_build_notes
from flagscale.train.models.provider import list_parameters
from flagscale.train.profiling import Profiler
from flagscale.train.rank_comparison import RankComparison
from flagscale.train.reference_scores import provide_reference
from flagscale.train.report import TrainingReporter
from flagscale.train.restart import resume_from_own_checkpoint
from flagscale.train.section_recorder import SectionRecorder
from flagscale.train.state import TrainState
from flagscale.train.step import Stepper, gathered_parameters
from flagscale.train.throughput import ThroughputMeter
from flagscale.train.trainer import Trainer


def prepare_training(
    args: argparse.Namespace,
    rank: RankIdentity,
    device: Device,
    status: StatusWriter,
    *,
    same_device_kind: bool = True,
    memory_history: MemoryHistory | None = None,
) -> tuple[Trainer, TrainState]:
    """Return a trainer that is ready to run, and its training state.

    All ranks call it after the default process group is initialized.

    Args:
        args: resolved arguments of this rank.
        rank: identity of this process.
        device: device of this rank.
        status: writer of status events.
        same_device_kind: whether all ranks have the same kind of device.
        memory_history: recorder of this rank's allocations.

    Raises:
        ConfigError: megatron.core does not support the model's configuration.
        DataError: the tokenizer or the data is missing, corrupt or does not fit the model.
        CheckpointError: the checkpoint to load is not usable, or checkpoints cannot be saved.
    """
    mesh_groups = distributed.init_model_parallel(args)
    reporter = TrainingReporter(args, status, is_reporting_rank=rank.rank == 0)
    # Identifies the base model of adapters: checkpoints of another base model are rejected.
    args.base_sample = sample_base_model(args)
    checkpointer = Checkpointer(args, warn=reporter.warn)
    is_new_run = checkpointer.check_writable()
    tokenizer = build_tokenizer(args)
    if warning := describe_unused_vocabulary(tokenizer, args.vocab_size):
        reporter.warn(warning)
    unpadded_vocabulary = vocabulary_size(args, tokenizer)
    args, mesh_groups = resolve_auto_layout(
        args, mesh_groups, unpadded_vocabulary, device, reporter.log
    )
    if mesh_groups is not None and not same_device_kind:
        mesh_groups = mesh_groups.with_mixed_devices()
    vocabulary = pad_vocabulary(unpadded_vocabulary, vars(args))
    args = recompute.resolve_auto_recompute(args, vocabulary, device, reporter.log)
    # Random number generators differ between device kinds, and so would the replicas' weights.
    args.use_cpu_initialization = args.use_cpu_initialization or not same_device_kind
    config = build_transformer_config(args, device)
    initialize_all = not overwrites_all_weights(args)
    state = build_state(args, config, vocabulary, device, initialize_all=initialize_all)
    devices = f"{rank.world_size} x {device.name}"
    if not same_device_kind:
        devices = f"{rank.world_size} ranks on heterogeneous devices, rank 0 on {device.name}"
    reporter.log(f"{devices} ({dist.get_backend()}) | {_describe_run(args, state, vocabulary)}")
    _log_notes(args, state, config, device, reporter)
    datasets, has_start_weights = _prepare_preferences(
        args, config, state, device, tokenizer, vocabulary, reporter
    )
    memory_checkpoints = open_memory_checkpoints(args, rank, reporter.warn)
    _resume(
        args,
        state,
        checkpointer,
        memory_checkpoints,
        reporter,
        is_new_run=is_new_run,
        has_start_weights=has_start_weights,
    )
    # The scores of a reference model may have been computed with other weights.
    for model in state.modules():
        invalidate_fp8_weights(model)
    balancer = None
    if is_split_measured(vars(args)):
        balancer = MicrobatchBalancer(args, state, rank.rank, device, reporter.log)
    else:
        # The checkpoint may be of a run that measured the micro-batch counts of replicas.
        state.measured_shares = None
    datasets = datasets or _build_datasets(args, tokenizer, reporter)
    load_data = partial(_load_data, datasets, state)
    profiler = Profiler(args, rank.rank, device, reporter.log)
    stopwatch = balancer.stopwatch if balancer is not None else None
    sections = _create_section_recorder(args, device)
    stepper = Stepper(args, config, state, device, profiler, mesh_groups, stopwatch, sections)
    throughput_meter = ThroughputMeter(
        args, vocabulary=vocabulary, device=device, world_size=rank.world_size
    )
    trainer = Trainer(
        args, state, stepper, load_data, checkpointer, reporter, throughput_meter, balancer
    )
    trainer.prepare_evaluations(*_build_evaluations(args, config, state, tokenizer, device))
    # After the loaders have started their processes, which must not inherit locks of other threads.
    reporter.start_sinks(state.progress.iteration)
    trainer.memory_checkpoints, trainer.memory_history = memory_checkpoints, memory_history
    if sections is not None:
        trainer.rank_comparison = RankComparison(args, device, reporter, sections)
    if memory_history is not None and memory_history.lacks_support:
        reporter.log(
            "record_memory_history has no effect: allocations are recorded on CUDA devices only"
        )
    return trainer, state


def _log_notes(
    args: argparse.Namespace,
    state: TrainState,
    config: TransformerConfig,
    device: Device,
    reporter: TrainingReporter,
) -> None:
    """Log how many weights are trained, and what arguments mean here."""
    if argument := freezing_argument(vars(args)):
        counts = count_trained_weights(state.modules(), config)
        reporter.log(
            f"{argument}: {counts.trained / 1e6:,.2f} M of {counts.total / 1e6:,.2f} M weights are "
            "trained"
        )
    for note in (*args.remarks, *list_build_notes(args, config, device)):
        reporter.log(note)


def _create_section_recorder(args: argparse.Namespace, device: Device) -> SectionRecorder | None:
    # The passes of captured steps are one launch, which has no sections.
    if not args.log_straggler or captures_steps(vars(args)):
        return None
    return SectionRecorder(device)


def _prepare_preferences(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    device: Device,
    tokenizer: Tokenizer,
    vocabulary: int,
    reporter: TrainingReporter,
) -> tuple[Datasets | None, bool]:
    """Build the datasets of preference training, with the scores of the reference model.

    This has to be done before a checkpoint is loaded, which replaces the weights to start from.

    Returns:
        The datasets, None for other training, and whether the weights of the reference model are
        loaded.
    """
    if not args.dpo:
        return None, False
    datasets = _build_datasets(args, tokenizer, reporter)
    assert datasets.conversations is not None
    load_reference = partial(_load_pretrained, args, state, reporter)
    is_loaded = provide_reference(
        args, config, state, device, datasets.conversations, vocabulary, reporter, load_reference
    )
    return datasets, is_loaded


def _build_datasets(
    args: argparse.Namespace, tokenizer: Tokenizer, reporter: TrainingReporter
) -> Datasets:
    datasets = Datasets(args, tokenizer)
    for note in datasets.remarks:
        reporter.log(note)
    return datasets


def _build_evaluations(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    tokenizer: Tokenizer,
    device: Device,
) -> tuple[Generator | None, TaskEvaluation | None]:
    """Return what answers ``eval_prompts`` and what evaluates ``eval_tasks``, if they are set."""
    create_scorer = partial(SequenceScorer, args, config, state.chunks, device)
    generator = None
    if args.eval_prompts:
        generator = Generator(args, create_scorer(tokenizer.vocab_size), tokenizer)
    if not args.eval_tasks:
        return generator, None
    # As in an exported model, which has all rows of the embedding if there is no vocab_size.
    scorer = create_scorer(args.vocab_size or padded_vocabulary_size(args, tokenizer))
    options = TaskOptions(
        args.eval_tasks, "eval_tasks", args.eval_tasks_fewshot, args.eval_tasks_limit
    )
    return generator, TaskEvaluation(options, scorer, tokenizer)


def _load_data(datasets: Datasets, state: TrainState) -> DataIterators:
    """Return the data iterators of this rank, starting after the consumed samples."""
    # A loader draws a seed for its workers. On a CPU it would use the generator of dropout, and a
    # resumed run would no longer draw the same numbers as an uninterrupted run.
    with torch.random.fork_rng(devices=[]):
        return datasets.build_iterators(state.progress, model_chunks=len(state.chunks))


def _resume(
    args: argparse.Namespace,
    state: TrainState,
    checkpointer: Checkpointer,
    memory_checkpoints: MemoryCheckpoints | None,
    reporter: TrainingReporter,
    *,
    is_new_run: bool,
    has_start_weights: bool,
) -> None:
    """Restore the state from the memory of the hosts if that is newer than the checkpoint; or else
    load the checkpoint of ``load``, or the weights of ``pretrained_checkpoint``.

    Args:
        args: resolved arguments of this rank.
        state: training state without progress.
        checkpointer: loads checkpoints.
        memory_checkpoints: checkpoints in the memory of the hosts; None without.
        reporter: gets messages.
        is_new_run: whether the directory to which the run saves its checkpoints is new.
        has_start_weights: whether ``pretrained_checkpoint`` is loaded already.
    """
    resume_from_own_checkpoint(args)
    if memory_checkpoints is not None:
        iteration = memory_checkpoints.find(state)
        if iteration is not None and iteration > _find_saved_iteration(args):
            reporter.log(memory_checkpoints.restore(state, iteration))
            _finish_rampup(args, state)
            return
    # Adapter checkpoints do not contain the base model.
    loads_base_model = bool(args.peft_type and args.pretrained_checkpoint)
    if loads_base_model and not has_start_weights:
        _load_pretrained(args, state, reporter)
    load_report = None
    if args.load:
        with gathered_parameters(args, state.chunks):
            load_report = checkpointer.load(state)
    _finish_rampup(args, state)
    if load_report is None and args.pretrained_checkpoint:
        if not (loads_base_model or has_start_weights):
            _load_pretrained(args, state, reporter)
        return
    if load_report is None:
        _start_without_checkpoint(
            args, reporter, is_first_run=is_new_run and args.load == args.save
        )
        return
    for reason in load_report.skipped_checkpoints:
        reporter.warn(f"a checkpoint was skipped: {reason}")
    notes = "".join(f"; {note}" for note in load_report.notes)
    reporter.log(f"loaded iteration {load_report.iteration} from {load_report.path}{notes}")
    if state.progress.iteration >= args.train_iters and not args.skip_train:
        reporter.log(_describe_nothing_to_train(args))


def _finish_rampup(args: argparse.Namespace, state: TrainState) -> None:
    """Set the last step after loading, because the loaded run may have used another ramp-up."""
    if (rampup := args.rampup) is not None:
        progress = state.progress
        remaining_steps = rampup.steps(progress.consumed_train_samples, args.train_samples)
        args.train_iters = progress.iteration + remaining_steps


def _find_saved_iteration(args: argparse.Namespace) -> int:
    """Return the iteration of the checkpoint that training would continue from; -1 without any.
    Collective.
    """

    def find() -> int:
        # A model that is fine-tuned has taken its steps in another training.
        continues = args.load and not args.finetune
        newest = open_checkpoints(args.load).find_latest() if continues else None
        return -1 if newest is None else newest.iteration

    return run_on_rank_0(find)


def _load_pretrained(
    args: argparse.Namespace, state: TrainState, reporter: TrainingReporter
) -> None:
    with gathered_parameters(args, state.chunks):
        reporter.log(load_pretrained(args, state))


def _start_without_checkpoint(
    args: argparse.Namespace, reporter: TrainingReporter, *, is_first_run: bool
) -> None:
    """Handle a missing checkpoint: an error, a log line, or nothing in the first run."""
    message, hint = missing_checkpoint(vars(args))
    if hint is not None:
        raise CheckpointError(f"load: {message}", hint=hint)
    if args.load and not is_first_run:
        reporter.log(f"load: {message}")


def _describe_nothing_to_train(args: argparse.Namespace) -> str:
    advice = "raise train.model.train_iters (or train_samples)"
    if not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        # The learning-rate schedule in the checkpoint is as long as the run that saved it.
        advice += " and set train.model.override_opt_param_scheduler: true"
    return (
        f"{args.train_iters:,} steps are done already: nothing to train. To go on, {advice}; to "
        "start anew, choose another exp_dir"
    )


def _describe_run(args: argparse.Namespace, state: TrainState, vocabulary: int) -> str:
    parameters = list_parameters(state.chunks)
    weight_count = sum(parameter.numel() for parameter in parameters)
    trained_count = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    weights = f"{weight_count / 1e6:,.1f} M weights on rank 0"
    if trained_count < weight_count:
        weights += f", {trained_count / 1e6:,.2f} M of them trained"
    layout = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
        "dp": args.data_parallel_size,
    }
    sizes = " ".join(f"{name}{size}" for name, size in layout.items() if size > 1) or "one rank"
    if args.meshes is not None:
        sizes = f"meshes {args.meshes.describe()}"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    return (
        f"{sizes} | {precision} | "
        f"{get_model_spec(args).display_name}, {weights}, vocabulary {vocabulary:,} | "
        f"{_describe_steps(args)} of {_describe_ramp(args)}{describe_batch(vars(args))}, "
        f"{_describe_micro_batches(args)} micro-batches a step"
    )


def _describe_steps(args: argparse.Namespace) -> str:
    if args.skip_train:
        return f"no training (skip_train), {args.eval_iters:,} evaluation steps"
    return f"{args.train_iters:,} steps"


def _describe_ramp(args: argparse.Namespace) -> str:
    return f"{args.rampup.start} to " if args.rampup is not None else ""


def _describe_micro_batches(args: argparse.Namespace) -> str:
    """Format the micro-batches of a rank, or of the ranks with the fewest and the most."""
    counts = {args.num_microbatches, *(share.count for share in args.shares or ())}
    if args.rampup is not None:
        counts.add(args.rampup.micro_batches(args.rampup.start, args.num_microbatches))
    return " to ".join(map(str, sorted({min(counts), max(counts)})))
