"""Puts a run together: layout, model, optimizer, checkpoint, data, loop."""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist

from flagscale.config.arguments.rules import missing_checkpoint
from flagscale.config.arguments.shares import are_measured
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.errors import CheckpointError
from flagscale.status import StatusWriter
from flagscale.train import distributed, recompute
from flagscale.train.build import build_state, vocabulary_size
from flagscale.train.checkpoint import Checkpointer
from flagscale.train.checkpoint.formats.pretrained import brings_every_weight, start_from
from flagscale.train.checkpoint.formats.sample import base_sample
from flagscale.train.data.datasets import DataIterators, Datasets
from flagscale.train.data.tokenizers import build_tokenizer, unlearned
from flagscale.train.device import Device
from flagscale.train.distributed import Rank
from flagscale.train.generation import Generator
from flagscale.train.meshes.splitting import settle
from flagscale.train.meter import Meter
from flagscale.train.microbatch_balancer import Sharing
from flagscale.train.models.base import spec_of
from flagscale.train.models.config import transformer_config
from flagscale.train.models.fast import notes
from flagscale.train.models.provider import parameters_of
from flagscale.train.profiling import Profiler
from flagscale.train.report import Reporter
from flagscale.train.restart import go_on_from_own_checkpoints
from flagscale.train.state import TrainState
from flagscale.train.step import Stepper
from flagscale.train.trainer import Trainer


def prepare(
    args: argparse.Namespace,
    rank: Rank,
    device: Device,
    status: StatusWriter,
    *,
    alike: bool = True,
) -> tuple[Trainer, TrainState]:
    """A trainer that is ready to run, and the state it trains. All ranks call it, joined.
    ``alike``: they are on one kind of device.

    Raises:
        ConfigError: megatron.core refuses the model's configuration.
        DataError: the tokenizer or the data is missing, damaged or does not fit the model.
        CheckpointError: the checkpoint to start from cannot be used, or none could be saved.
    """
    groups = distributed.lay_out(args)
    reporter = Reporter(args, status, speaks=rank.rank == 0)
    args.base_sample = base_sample(args)
    checkpointer = Checkpointer(args, warn=reporter.warn)
    fresh = checkpointer.try_out()
    tokenizer = build_tokenizer(args)
    if warning := unlearned(tokenizer, args.vocab_size):
        reporter.warn(warning)
    size = vocabulary_size(args, tokenizer)
    args, groups = settle(args, groups, size, device, reporter.say)
    if groups is not None and not alike:
        groups = groups.on_unlike_devices()
    vocabulary = padded_vocabulary(size, vars(args))
    args = recompute.settle(args, vocabulary, device, reporter.say)
    # Replicas would start from unlike models.
    args.use_cpu_initialization = args.use_cpu_initialization or not alike
    config = transformer_config(args, device)
    state = build_state(args, config, vocabulary, device, draw=not brings_every_weight(args))
    devices = f"{rank.world_size} x {device.name}"
    if not alike:
        devices = f"{rank.world_size} ranks on unlike devices, rank 0 on {device.name}"
    reporter.say(f"{devices} ({dist.get_backend()}) | {_describe(args, state, vocabulary)}")
    for note in (*args.remarks, *notes(args, config, device)):
        reporter.say(note)
    _resume(args, state, checkpointer, reporter, fresh=fresh)
    sharing = None
    if are_measured(vars(args)):
        sharing = Sharing(args, state, rank.rank, device, reporter.say)
    else:
        state.measured_shares = None  # of a checkpoint whose run measured it
    datasets = Datasets(args, tokenizer)
    for note in datasets.remarks:
        reporter.say(note)
    load = partial(_load, datasets, state)
    profiler = Profiler(args, rank.rank, device, reporter.say)
    stopwatch = sharing.stopwatch if sharing is not None else None
    stepper = Stepper(args, config, state, device, profiler, groups, stopwatch)
    meter = Meter(args, vocabulary=vocabulary, device=device, world_size=rank.world_size)
    trainer = Trainer(args, state, stepper, load, checkpointer, reporter, meter, sharing)
    if args.eval_prompts:
        trainer.generator = Generator(args, config, state, tokenizer, device)
    return trainer, state


def _load(datasets: Datasets, state: TrainState) -> DataIterators:
    """This rank's part of the data that comes next."""
    # A loader draws a seed for its workers. On a CPU it would come from the generator of dropout,
    # and a resumed run would no longer draw what the uninterrupted one does.
    with torch.random.fork_rng(devices=[]):
        return datasets.iterators(state.progress, chunks=len(state.chunks))


def _resume(
    args: argparse.Namespace,
    state: TrainState,
    checkpointer: Checkpointer,
    reporter: Reporter,
    *,
    fresh: bool,
) -> None:
    """Start from the checkpoint in ``load``, or else from a model's weights. ``fresh``: the run's
    own directory is new."""
    go_on_from_own_checkpoints(args)
    # Checkpoints of adapters are without the model that these are of.
    based = bool(args.peft_type and args.pretrained_checkpoint)
    if based:
        reporter.say(start_from(args, state))
    report = checkpointer.load(state) if args.load else None
    if args.growth is not None:  # which may have grown otherwise before
        done = state.progress
        more = args.growth.steps(done.consumed_train_samples, args.train_samples)
        args.train_iters = done.iteration + more
    if report is None and args.pretrained_checkpoint:
        if not based:
            reporter.say(start_from(args, state))
        return
    if report is None:
        _start_without(args, reporter, first_run=fresh and args.load == args.save)
        return
    for reason in report.skipped:
        reporter.warn(f"a checkpoint was passed over: {reason}")
    notes = "".join(f"; {note}" for note in report.notes)
    reporter.say(f"loaded iteration {report.iteration} from {report.path}{notes}")
    if state.progress.iteration >= args.train_iters:
        reporter.say(_nothing_to_train(args))


def _start_without(args: argparse.Namespace, reporter: Reporter, *, first_run: bool) -> None:
    """There is no checkpoint: a mistake, worth a line, or as it is in every ``first_run``."""
    message, hint = missing_checkpoint(vars(args))
    if hint is not None:
        raise CheckpointError(f"load: {message}", hint=hint)
    if args.load and not first_run:
        reporter.say(f"load: {message}")


def _nothing_to_train(args: argparse.Namespace) -> str:
    more = "raise train_iters (or train_samples)"
    if not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        # The schedule in the checkpoint is as long as the run that saved it.
        more += " and set override_opt_param_scheduler: true"
    return (
        f"{args.train_iters:,} steps are done already: nothing to train. To go on, {more}; to "
        "start anew, choose another exp_dir"
    )


def _describe(args: argparse.Namespace, state: TrainState, vocabulary: int) -> str:
    every = parameters_of(state.chunks)
    own = sum(parameter.numel() for parameter in every)
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    weights = f"{own / 1e6:,.1f} M weights on rank 0"
    if trained < own:
        weights += f", {trained / 1e6:,.2f} M of them trained"
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
        f"{spec_of(args).shown}, {weights}, vocabulary {vocabulary:,} | "
        f"{args.train_iters:,} steps of {_batches(args)} x {args.seq_length} tokens, "
        f"{_counts(args)} micro-batches a step"
    )


def _batches(args: argparse.Namespace) -> str:
    grows = f"{args.growth.start} to " if args.growth is not None else ""
    return f"{grows}{args.global_batch_size}"


def _counts(args: argparse.Namespace) -> str:
    """Micro-batches of a rank, or of the ranks with the fewest and the most."""
    counts = {args.num_microbatches, *(share.count for share in args.shares or ())}
    if args.growth is not None:
        counts.add(args.growth.micro_batches(args.growth.start, args.num_microbatches))
    return " to ".join(map(str, sorted({min(counts), max(counts)})))
