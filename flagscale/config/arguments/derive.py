"""Derivation of the arguments that training runs with from those that a user gives.

Sizes that follow from others are filled in, and options that only work together are set together.
The rules between arguments are in :mod:`flagscale.config.arguments.check`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.config.arguments.check import apply_substitutions, check_values, note_substitutions
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
from flagscale.config.arguments.rules.optimizer import drop_unused_schedule, rampup_of
from flagscale.config.arguments.rules.parallel_layout import virtual_chunks
from flagscale.config.arguments.rules.recompute import select_modules
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.model_arguments import gated_ffn_width
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.system_arguments import MESHES
from flagscale.errors import ConfigError, Problem


def derive_arguments(args: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """Return a copy of ``args`` with every derived value set, for ``world_size`` ranks.

    Sets ``global_batch_size``, ``train_iters``, ``train_samples``, ``data_parallel_size``,
    ``num_microbatches``, ``virtual_pipeline_model_parallel_size``, the point-to-point options of
    the interleaved schedule, ``ffn_hidden_size`` and ``max_position_embeddings``; with
    ``skip_train``, a learning rate of 0 in place of every schedule. Adds attributes:

    - ``rampup``: the :class:`.BatchSizeRampup`; None without one.
    - ``recomputed_modules``: the :class:`.ModuleChoice` of selective recomputation.
    - ``remarks``: a note for each value that is substituted or has no effect.
    - ``meshes``: the :class:`.Meshes`; None unless training uses heterogeneous meshes. With meshes,
      ``data_parallel_size`` is that of the first mesh.
    - ``shares``: the share of each replica in a step (:class:`.MicrobatchShare`); None unless
      training is data parallel over heterogeneous replicas.

    Raises:
        ConfigError: with every problem found.
    """
    violations = check_values(vars(args))
    out = argparse.Namespace(**drop_unused_schedule(apply_substitutions(vars(args))))
    out.remarks = _collect_remarks(vars(args))
    out.recomputed_modules = select_modules(vars(out))
    violations = violations or check_world_size(vars(out), world_size)
    if not violations:
        _set_batch(out, world_size)
        # Again: lengths in samples can be compared with lengths in steps only now.
        violations = check_values(vars(out))
    if are_automatic(vars(out)):
        message = (
            "auto is supported only by the launcher, which replaces it by the ranks of each device "
            "type; give a list such as device_type=A800,ranks=16"
        )
        violations = [*violations, (MESHES, message)]
    if violations:
        raise ConfigError([Problem(name, message) for name, message in violations])
    _set_length(out)
    _set_virtual_stages(out)
    if out.ffn_hidden_size is None and out.swiglu:
        out.ffn_hidden_size = gated_ffn_width(vars(out))
    return out


def change_layout(
    args: argparse.Namespace, changes: Mapping[str, Any], world_size: int
) -> argparse.Namespace:
    """Return a copy of derived arguments with other sizes, and what follows from these.

    The rules of :mod:`.check` and :mod:`.layout` are not applied again, for a search over many
    layouts that applies them itself. ``args`` must have no virtual stages, whose number would
    count.
    """
    out = copy.copy(args)
    vars(out).update(changes)
    out.recomputed_modules = select_modules(vars(out))
    _set_batch(out, world_size)
    _set_virtual_stages(out)
    return out


_SET_BY_LAUNCHER = ("wandb_save_dir",)
"""Arguments that the launcher always sets: a note that they have no effect would confuse users."""


def _collect_remarks(values: Values) -> list[str]:
    names = [name for name in arguments() if name not in _SET_BY_LAUNCHER]
    changed = [name for name in names if values[name] != arguments()[name].default]
    substituted = [f"{name}: {message}" for name, message in note_substitutions(values)]
    unused = [unused_note(names, reason) for names, reason in note_unused(values, changed)]
    return [*substituted, *note_adapters(values), *unused]


def rank_arguments(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Return the derived arguments for one rank.

    With heterogeneous meshes, they have the parallel sizes of the rank's mesh, the attribute
    ``stage`` (:class:`.Stage`), and the rank's part of a micro-batch as ``micro_batch_size``. With
    heterogeneous replicas, they have the micro-batches of the rank's replica, and the attribute
    ``share``.
    """
    if args.shares is not None:
        return _replica_arguments(args, rank)
    meshes: Meshes | None = args.meshes
    if meshes is None:
        return args
    stage = meshes.stage_of(rank)
    out = argparse.Namespace(**mesh_view(vars(args), meshes, stage.mesh_index))
    out.stage = stage
    out.data_parallel_size = stage.mesh.dp
    out.micro_batch_size = len(meshes.sequences_of(stage.mesh, stage.position_of(rank)[0]))
    _set_virtual_stages(out)
    return out


def _replica_arguments(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    out = copy.copy(args)
    assign_shares(out, args.shares, rank)
    return out


def assign_shares(args: argparse.Namespace, shares: Sequence[MicrobatchShare], rank: int) -> None:
    """Set the shares of all heterogeneous replicas in a step, and that of the rank's replica, in
    the arguments of a rank."""
    args.shares = tuple(shares)
    args.share = args.shares[rank // replica_ranks(vars(args))]
    args.micro_batch_size, args.num_microbatches = args.share.size, args.share.count


def _set_batch(args: argparse.Namespace, world_size: int) -> None:
    args.meshes, args.stage, args.shares = meshes_of(vars(args)), None, None
    args.data_parallel_size = data_parallel_size(vars(args), world_size)
    args.global_batch_size = global_batch_size(vars(args), world_size)
    if args.sft:
        args.calculate_per_token_loss = True  # sequences have different numbers of target tokens
    if args.dpo:
        args.calculate_per_token_loss = args.sft_packing  # sequences have several pairs, or one
    if uses_microbatch_split(vars(args)):
        args.shares = shares_of(vars(args), args.data_parallel_size)
        args.calculate_per_token_loss = True  # weights each replica by its number of tokens
        return  # the number of micro-batches differs per replica: see assign_shares()
    slice_size = args.micro_batch_size * args.data_parallel_size
    args.num_microbatches = args.global_batch_size // slice_size


def _set_length(args: argparse.Namespace) -> None:
    args.rampup = rampup_of(vars(args))
    if args.rampup is not None:
        args.train_iters = args.rampup.steps(0, args.train_samples)
    elif args.train_iters is None:
        args.train_iters = args.train_samples // args.global_batch_size
    else:
        args.train_samples = args.train_iters * args.global_batch_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length


def _set_virtual_stages(args: argparse.Namespace) -> None:
    if args.meshes is not None and args.stage is None:
        return  # they differ per rank: see rank_arguments()
    args.virtual_pipeline_model_parallel_size = virtual_chunks(vars(args))
    if args.virtual_pipeline_model_parallel_size is not None:
        # With batched point-to-point calls, two interleaved stages receive each other's tensors and
        # train on wrong gradients without an error.
        args.overlap_p2p_comm, args.batch_p2p_comm = True, False
