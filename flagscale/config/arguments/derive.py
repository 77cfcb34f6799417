"""Derivation of the arguments that training runs with from those that a user gives.

Sizes that follow from others are filled in, and options that only work together are set together.
The rules between arguments are in :mod:`flagscale.config.arguments.check`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

from flagscale.config.arguments.check import check_values
from flagscale.config.arguments.compat.substitutions import apply_substitutions, note_substitutions
from flagscale.config.arguments.compat.unused import note_unused, unused_note
from flagscale.config.arguments.hetero.meshes import Meshes, are_automatic, mesh_view, meshes_of
from flagscale.config.arguments.hetero.microbatch_split import (
    MicrobatchShare,
    replica_ranks,
    shares_of,
    uses_microbatch_split,
)
from flagscale.config.arguments.layout import (
    check_world_size,
    data_parallel_size,
    global_batch_size,
)
from flagscale.config.arguments.rules.adapters import note_adapters
from flagscale.config.arguments.rules.parallel_layout import virtual_chunks
from flagscale.config.arguments.rules.schedule import rampup_of
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.model_arguments import gated_ffn_width
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.system_arguments import MESHES
from flagscale.errors import ConfigError, Problem


def derive_arguments(args: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """A copy of ``args`` with every derived value set, for ``world_size`` ranks.

    Sets ``global_batch_size``, ``train_iters``, ``train_samples``, ``data_parallel_size``,
    ``num_microbatches``, ``virtual_pipeline_model_parallel_size``, the point-to-point options of
    the interleaved schedule, ``ffn_hidden_size`` and ``max_position_embeddings``; ``growth``, how
    the batch grows, None where it does not; ``remarks``, a
    line for each value that another stands in for or that has no effect; and ``meshes``, None
    unless training is heterogeneous, when ``data_parallel_size`` is the first mesh's.

    Raises:
        ConfigError: with every problem found.
    """
    broken = check_values(vars(args))
    out = argparse.Namespace(**apply_substitutions(vars(args)))
    out.remarks = _collect_remarks(vars(args))
    broken = broken or check_world_size(vars(out), world_size)
    if not broken:
        _set_batch(out, world_size)
        # Again: a schedule in samples can be compared with one in steps only now.
        broken = check_values(vars(out))
    if are_automatic(vars(out)):
        message = (
            "auto is written out by the launcher, with the ranks of each device type: by hand, "
            "give words such as device_type=A800,ranks=16"
        )
        broken = [*broken, (MESHES, message)]
    if broken:
        raise ConfigError([Problem(name, message) for name, message in broken])
    _set_length(out)
    _set_virtual_stages(out)
    if out.skip_train and not out.override_opt_param_scheduler:
        # Evaluation has no schedule of its own: that of the checkpoint is loaded as it is.
        out.use_checkpoint_opt_param_scheduler = True
    if out.ffn_hidden_size is None and out.swiglu:
        out.ffn_hidden_size = gated_ffn_width(vars(out))
    return out


_SET_BY_LAUNCHER = ("wandb_save_dir",)
"""What the launcher gives, whatever else is given: nobody asked for an effect of it."""


def _collect_remarks(values: Values) -> list[str]:
    names = [name for name in arguments() if name not in _SET_BY_LAUNCHER]
    changed = [name for name in names if values[name] != arguments()[name].default]
    replaced = [f"{name}: {message}" for name, message in note_substitutions(values)]
    without = [unused_note(*unused) for unused in note_unused(values, changed)]
    return [*replaced, *note_adapters(values), *without]


def rank_arguments(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Resolved arguments as one rank has them: in heterogeneous training with the sizes of its own
    mesh, and ``stage``, which it holds; ``micro_batch_size`` is its own part of a micro-batch."""
    if args.shares is not None:
        return _replica_arguments(args, rank)
    meshes: Meshes | None = args.meshes
    if meshes is None:
        return args
    stage = meshes.stage_of(rank)
    out = argparse.Namespace(**mesh_view(vars(args), meshes, stage.mesh_index))
    out.stage = stage
    out.data_parallel_size = stage.mesh.dp
    out.micro_batch_size = len(meshes.sequences_of(stage.mesh, stage.place(rank)[0]))
    _set_virtual_stages(out)
    return out


def _replica_arguments(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Arguments of a rank of one of the unlike replicas: its own micro-batches. ``share`` is what
    it takes of a step."""
    out = copy.copy(args)
    assign_shares(out, args.shares, rank)
    return out


def assign_shares(args: argparse.Namespace, shared: Sequence[MicrobatchShare], rank: int) -> None:
    """Give the arguments of a rank of one of the unlike replicas these shares of a step."""
    args.shares = tuple(shared)
    args.share = args.shares[rank // replica_ranks(vars(args))]
    args.micro_batch_size, args.num_microbatches = args.share.size, args.share.count


def _set_batch(args: argparse.Namespace, world_size: int) -> None:
    args.meshes, args.stage, args.shares = meshes_of(vars(args)), None, None
    args.data_parallel_size = data_parallel_size(vars(args), world_size)
    args.global_batch_size = global_batch_size(vars(args), world_size)
    if args.sft:
        args.calculate_per_token_loss = True  # sequences have unlike many tokens to learn
    if uses_microbatch_split(vars(args)):
        args.shares = shares_of(vars(args), args.data_parallel_size)
        args.calculate_per_token_loss = True  # a replica counts as much as it has tokens
        return  # each has a number of micro-batches of its own
    slice_ = args.micro_batch_size * args.data_parallel_size
    args.num_microbatches = args.global_batch_size // slice_


def _set_length(args: argparse.Namespace) -> None:
    args.growth = rampup_of(vars(args))
    if args.growth is not None:
        args.train_iters = args.growth.steps(0, args.train_samples)
    elif args.train_iters is None:
        args.train_iters = args.train_samples // args.global_batch_size
    else:
        args.train_samples = args.train_iters * args.global_batch_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length


def _set_virtual_stages(args: argparse.Namespace) -> None:
    if args.meshes is not None and args.stage is None:
        return  # a rank's own, see of_rank()
    args.virtual_pipeline_model_parallel_size = virtual_chunks(vars(args))
    if args.virtual_pipeline_model_parallel_size is not None:
        # With batched point-to-point calls two interleaved stages get each other's tensors and
        # train on wrong gradients without a word.
        args.overlap_p2p_comm, args.batch_p2p_comm = True, False
