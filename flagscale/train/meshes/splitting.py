"""Settles what of heterogeneous training is left to us: which mesh has which sizes, and which stage
how many layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from flagscale.config.arguments.meshes import Meshes, chosen_for_us, with_layers
from flagscale.config.arguments.resolve import of_rank
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.estimate import cost_cache, split
from flagscale.train import distributed
from flagscale.train.device import Device
from flagscale.train.meshes.groups import MeshGroups
from flagscale.train.meshes.sizing import with_sizes
from flagscale.train.meshes.times import costs_of, shared


def settle(
    args: argparse.Namespace,
    groups: MeshGroups | None,
    size: int,
    device: Device,
    tell: Callable[[str], None],
) -> tuple[argparse.Namespace, MeshGroups | None]:
    """This rank's arguments with everything chosen, and its groups: as they are where nothing is
    left to us. All ranks call it, laid out; they find the same.

    Args:
        args: this rank's arguments.
        groups: those that heterogeneous training has beyond megatron.core's.
        size: the vocabulary's, not padded.
        device: this rank's.
        tell: says a line, once for the job.

    Raises:
        ConfigError: no sizes fit the arguments, or what is to be measured does not fit the device.
    """
    meshes: Meshes | None = args.meshes
    if meshes is None or not (meshes.open or chosen_for_us(args.hetero_pipeline_layer_split)):
        return args, groups
    if meshes.open:
        args = of_rank(with_sizes(args, size, device, tell), dist.get_rank())
        return args, distributed.lay_out(args)
    chosen = _with_layers(args, meshes, padded_vocabulary(size, vars(args)), device, tell)
    distributed.seed_generators(args)  # measuring has drawn from them
    return of_rank(argparse.Namespace(**{**vars(args), "meshes": chosen}), dist.get_rank()), groups


def _with_layers(
    args: argparse.Namespace,
    meshes: Meshes,
    vocabulary: int,
    device: Device,
    tell: Callable[[str], None],
) -> Meshes:
    """The meshes with the layers by which a step is shortest."""
    sequences = [cost_cache.sequences(meshes, mesh) for mesh in meshes.meshes]
    costs = costs_of(
        args,
        meshes,
        sequences,
        vocabulary,
        device,
        lambda: tell("measuring what a layer takes on each mesh, to share the layers out"),
    )
    problem = split.Problem(
        meshes,
        costs,
        split.kinds_of(args),
        args.num_microbatches,
        empty_first=args.standalone_embedding_stage,
    )
    layers = shared(lambda: split.best(problem))
    for line in split.reasons(problem, layers):
        tell(line)
    return replace(meshes, meshes=with_layers(meshes.meshes, layers))
