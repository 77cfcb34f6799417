"""From the arguments a user gave to the ones training runs with.

Sizes that follow from others are filled in and options that only work together are set together.
What must hold between arguments is in :mod:`flagscale.config.arguments.rules`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

from flagscale.config.arguments import adapters, fallbacks, growth, idle, layout, rules, shares
from flagscale.config.arguments.meshes import MESHES, Meshes, meshes_of, to_be_filled, view
from flagscale.config.arguments.pipeline import virtual_chunks
from flagscale.config.arguments.precision import Values
from flagscale.config.arguments.registry import arguments
from flagscale.config.arguments.shares import Share
from flagscale.errors import ConfigError, Problem


def resolve(args: argparse.Namespace, world_size: int) -> argparse.Namespace:
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
    broken = rules.broken(vars(args))
    out = argparse.Namespace(**fallbacks.settled(vars(args)))
    out.remarks = _remarks(vars(args))
    broken = broken or layout.broken_world(vars(out), world_size)
    if not broken:
        _set_batch(out, world_size)
        # Again: a schedule in samples can be compared with one in steps only now.
        broken = rules.broken(vars(out))
    if to_be_filled(vars(out)):
        message = (
            "auto is written out by the launcher, with the ranks of each device type: by hand, "
            "give words such as device_type=A800,ranks=16"
        )
        broken = [*broken, (MESHES, message)]
    if broken:
        raise ConfigError([Problem(name, message) for name, message in broken])
    _set_length(out)
    _set_virtual_stages(out)
    if out.ffn_hidden_size is None and out.swiglu:
        out.ffn_hidden_size = layout.gated_width(vars(out))
    return out


_THE_LAUNCHERS = ("wandb_save_dir",)
"""What the launcher gives, whatever else is given: nobody asked for an effect of it."""


def _remarks(values: Values) -> list[str]:
    given = [name for name in arguments() if name not in _THE_LAUNCHERS]
    changed = [name for name in given if values[name] != arguments()[name].default]
    replaced = [f"{name}: {message}" for name, message in fallbacks.notes(values)]
    without = [idle.sentence(*found) for found in idle.notes(values, changed)]
    return [*replaced, *adapters.notes(values), *without]


def of_rank(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Resolved arguments as one rank has them: in heterogeneous training with the sizes of its own
    mesh, and ``stage``, which it holds; ``micro_batch_size`` is its own part of a micro-batch."""
    if args.shares is not None:
        return _of_replica(args, rank)
    meshes: Meshes | None = args.meshes
    if meshes is None:
        return args
    stage = meshes.stage_of(rank)
    out = argparse.Namespace(**view(vars(args), meshes, stage.mesh_index))
    out.stage = stage
    out.data_parallel_size = stage.mesh.dp
    out.micro_batch_size = len(meshes.sequences_of(stage.mesh, stage.place(rank)[0]))
    _set_virtual_stages(out)
    return out


def _of_replica(args: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Arguments of a rank of one of the unlike replicas: its own micro-batches. ``share`` is what
    it takes of a step."""
    out = copy.copy(args)
    take_shares(out, args.shares, rank)
    return out


def take_shares(args: argparse.Namespace, shared: Sequence[Share], rank: int) -> None:
    """Give the arguments of a rank of one of the unlike replicas these shares of a step."""
    args.shares = tuple(shared)
    args.share = args.shares[rank // shares.replica_ranks(vars(args))]
    args.micro_batch_size, args.num_microbatches = args.share.size, args.share.count


def _set_batch(args: argparse.Namespace, world_size: int) -> None:
    args.meshes, args.stage, args.shares = meshes_of(vars(args)), None, None
    args.data_parallel_size = layout.data_parallel_size(vars(args), world_size)
    args.global_batch_size = layout.global_batch_size(vars(args), world_size)
    if args.sft:
        args.calculate_per_token_loss = True  # sequences have unlike many tokens to learn
    if shares.is_on(vars(args)):
        args.shares = shares.shares_of(vars(args), args.data_parallel_size)
        args.calculate_per_token_loss = True  # a replica counts as much as it has tokens
        return  # each has a number of micro-batches of its own
    slice_ = args.micro_batch_size * args.data_parallel_size
    args.num_microbatches = args.global_batch_size // slice_


def _set_length(args: argparse.Namespace) -> None:
    args.growth = growth.growth_of(vars(args))
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


def schedule_lengths(values: Values) -> dict[str, Any]:
    """Lengths of decay, warm-up, WSD's last phase and weight decay's increase, in samples, from
    resolved arguments."""

    def samples(what: str) -> int | None:
        in_samples, in_steps = values[f"{what}_samples"], values[f"{what}_iters"]
        if in_samples is not None:
            return int(in_samples)
        return None if in_steps is None else int(in_steps * values["global_batch_size"])

    total = max(values["train_samples"], 1)
    decay = samples("lr_decay") or total
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    else:
        warmup = (
            values["lr_warmup_samples"] or values["lr_warmup_iters"] * values["global_batch_size"]
        )
    return {
        "lr_decay_steps": decay,
        "lr_warmup_steps": warmup,
        "wsd_decay_steps": samples("lr_wsd_decay"),
        "wd_incr_steps": total,
    }
