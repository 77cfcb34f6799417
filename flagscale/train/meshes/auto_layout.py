"""Resolution of automatic settings of heterogeneous meshes: parallel sizes and layers per stage.

A mesh is a number of ranks with the same parallel sizes that hold consecutive pipeline stages. An
open mesh is one whose sizes are to be chosen here. Both choices minimize the step time that is
predicted from measured costs of layers (:mod:`.rank_costs`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from flagscale.config.arguments.derive import rank_arguments
from flagscale.config.arguments.hetero.meshes import Meshes, is_split_automatic, with_layers
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.estimate import cost_cache, split
from flagscale.train import distributed
from flagscale.train.device import Device
from flagscale.train.meshes.groups import MeshGroups
from flagscale.train.meshes.layout_search import choose_mesh_sizes
from flagscale.train.meshes.rank_costs import broadcast_from_rank_0, load_or_measure_costs


def resolve_auto_layout(
    args: argparse.Namespace,
    groups: MeshGroups | None,
    unpadded_vocabulary: int,
    device: Device,
    log: Callable[[str], None],
) -> tuple[argparse.Namespace, MeshGroups | None]:
    """Resolve the automatic choices of this rank's mesh layout.

    Collective: all ranks call it after the layout is initialized, and get the same result.

    Args:
        args: arguments of this rank.
        groups: additional groups of heterogeneous training.
        unpadded_vocabulary: unpadded size of the vocabulary.
        device: device of this rank.
        log: logs a line, once per job.

    Returns:
        The arguments and groups of this rank, unchanged if nothing is automatic.

    Raises:
        ConfigError: no sizes fit the arguments, or a model to measure does not fit in memory.
    """
    meshes: Meshes | None = args.meshes
    if meshes is None or not (meshes.open or is_split_automatic(args.hetero_pipeline_layer_split)):
        return args, groups
    if meshes.open:
        args = rank_arguments(
            choose_mesh_sizes(args, unpadded_vocabulary, device, log), dist.get_rank()
        )
        return args, distributed.init_model_parallel(args)
    split_meshes = _choose_layer_split(
        args, meshes, pad_vocabulary(unpadded_vocabulary, vars(args)), device, log
    )
    distributed.seed_generators(args)  # the measured models have drawn random numbers
    return rank_arguments(
        argparse.Namespace(**{**vars(args), "meshes": split_meshes}), dist.get_rank()
    ), groups


def _choose_layer_split(
    args: argparse.Namespace,
    meshes: Meshes,
    vocabulary: int,
    device: Device,
    log: Callable[[str], None],
) -> Meshes:
    """Return the meshes with the layers per stage that minimize the step time."""
    max_micro_batch_sizes = [cost_cache.count_max_sequences(meshes, mesh) for mesh in meshes.meshes]
    costs = load_or_measure_costs(
        args,
        meshes,
        max_micro_batch_sizes,
        vocabulary,
        device,
        lambda: log("measuring the cost of a layer on each mesh, to assign layers to stages"),
    )
    problem = split.SplitProblem(
        meshes,
        costs,
        split.layer_kinds(args),
        args.num_microbatches,
        has_empty_first_stage=args.standalone_embedding_stage,
    )
    layers = broadcast_from_rank_0(lambda: split.find_best_split(problem))
    for line in split.explain_split(problem, layers):
        log(line)
    return replace(meshes, meshes=with_layers(meshes.meshes, layers))
