"""Choice of the parallel sizes of open meshes, which specify only their number of ranks.

A trial is a combination of tensor parallel size and number of sequences per micro-batch, for which
the cost of a layer is measured (:class:`~flagscale.estimate.layouts.LayerTrial`). Layouts are then
ranked by the step time that is predicted from these costs (:mod:`flagscale.estimate.layouts`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from flagscale.config.arguments.derive import rank_arguments
from flagscale.config.arguments.hetero.meshes import Mesh, Meshes
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.config.arguments.spec.system_arguments import MESHES
from flagscale.errors import ConfigError
from flagscale.estimate import layouts
from flagscale.estimate.arithmetic import LayerKind
from flagscale.estimate.costs import RankCosts
from flagscale.estimate.layouts import LayerTrial, LayoutCandidate
from flagscale.estimate.memory import ModelPart, estimate_rank_memory
from flagscale.estimate.split import layer_kinds
from flagscale.train import distributed
from flagscale.train.device import Device
from flagscale.train.distributed import gather_from_ranks
from flagscale.train.meshes.cost_profiler import MAX_MEASURED_LAYERS
from flagscale.train.meshes.rank_costs import (
    broadcast_from_rank_0,
    load_or_measure_costs,
)

_MEMORY_FRACTION = 0.9
"""Fraction of a device's memory that a measured model may use; the estimate is not exact."""


def choose_mesh_sizes(
    args: argparse.Namespace, unpadded_vocabulary: int, device: Device, log: Callable[[str], None]
) -> argparse.Namespace:
    """Return arguments with the chosen sizes and layers of open meshes, the same on all ranks.

    Every candidate tensor parallel size and number of sequences of a mesh is measured, on all
    meshes at the same time. Collective: all ranks call it after the layout is initialized. The
    measurements change the layout, so it must be initialized again afterwards.

    Args: see :func:`flagscale.train.meshes.auto_layout.resolve_auto_layout`.

    Raises:
        ConfigError: no sizes fit the arguments.
    """
    meshes: Meshes = args.meshes
    base_args = argparse.Namespace(
        **{**vars(args), "sequence_parallel": meshes.sequence_parallel, "stage": None}
    )
    base_args.micro_batch_size = meshes.sequences // meshes.meshes[0].dp
    trials = _list_trials(base_args, meshes, unpadded_vocabulary, device)
    candidates = list(layouts.enumerate_layouts(vars(base_args), meshes, trials))
    if not candidates:
        raise ConfigError(
            f"{MESHES}: no tensor, data and pipeline parallel sizes of these ranks fit "
            f"global_batch_size {base_args.global_batch_size}, "
            f"micro_batch_size {base_args.micro_batch_size} "
            "(here the maximum number of sequences of a rank) and the devices' memory",
            hint="set another global_batch_size, or set the sizes",
        )
    counts = " + ".join(str(len(mesh_trials)) for mesh_trials in trials)
    log(f"measuring layers of {counts} sizes, to choose between {len(candidates)} layouts")
    measured_costs: dict[tuple[int, LayerTrial], RankCosts] = {}
    for number in range(max(map(len, trials))):
        # A mesh with fewer trials repeats its last one.
        current_trials = [mesh_trials[min(number, len(mesh_trials) - 1)] for mesh_trials in trials]
        costs = _measure_trials(base_args, meshes, current_trials, unpadded_vocabulary, device)
        for index, mesh_costs in enumerate(costs):
            measured_costs[index, current_trials[index]] = mesh_costs
    kinds = layer_kinds(base_args)
    best_layouts: list[LayoutCandidate] = broadcast_from_rank_0(
        lambda: layouts.rank_layouts(vars(base_args), candidates, measured_costs, kinds)[
            : layouts.MAX_REPORTED_LAYOUTS
        ]
    )
    for line in layouts.explain_layout(best_layouts, len(candidates)):
        log(line)
    return _apply_layout(base_args, best_layouts[0].meshes)


def _apply_layout(base_args: argparse.Namespace, meshes: Meshes) -> argparse.Namespace:
    replicas = meshes.meshes[0].dp
    base_args.meshes = meshes
    base_args.micro_batch_size = meshes.sequences // replicas
    base_args.data_parallel_size = replicas
    base_args.num_microbatches = base_args.global_batch_size // meshes.sequences
    return base_args


def _list_trials(
    base_args: argparse.Namespace, meshes: Meshes, unpadded_vocabulary: int, device: Device
) -> list[list[LayerTrial]]:
    """Return the trials of each mesh that fit in its devices' memory."""
    ranks_per_host = gather_from_ranks(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    rank_memory = gather_from_ranks(device.accelerator.available_memory(device.torch_device))
    fitting_trials = []
    for index, mesh in enumerate(meshes.meshes):
        ranks = slice(meshes.first_rank(index), meshes.first_rank(index) + mesh.ranks)
        known_memory = [memory for memory in rank_memory[ranks] if memory is not None]
        mesh_trials = list(layouts.list_trials(vars(base_args), mesh, min(ranks_per_host[ranks])))
        if known_memory:
            min_memory = min(known_memory)
            mesh_trials = [
                trial
                for trial in mesh_trials
                if _fits_in_memory(base_args, meshes, index, trial, unpadded_vocabulary, min_memory)
            ]
        fitting_trials.append(mesh_trials)
    return fitting_trials


def _fits_in_memory(
    base_args: argparse.Namespace,
    meshes: Meshes,
    index: int,
    trial: LayerTrial,
    unpadded_vocabulary: int,
    memory_bytes: int,
) -> bool:
    """Return whether the models that a trial measures fit in ``memory_bytes``.

    These are a model of several layers without vocabulary, and one of a layer with the whole
    vocabulary.
    """
    trial_meshes = _build_trial_meshes(meshes, [trial] * len(meshes.meshes))
    args = _trial_arguments(base_args, trial_meshes, trial_meshes.first_rank(index), trial)
    vocabulary = pad_vocabulary(unpadded_vocabulary, vars(args))
    layer = LayerKind(is_moe=False, is_fp8=bool(args.fp8))
    layers_only = ModelPart((layer,) * MAX_MEASURED_LAYERS, has_embedding=True, has_head=True)
    layers_bytes = estimate_rank_memory(args, 0, layers_only).total
    one_layer = ModelPart((layer,), has_embedding=True, has_head=True)
    vocabulary_bytes = estimate_rank_memory(args, vocabulary, one_layer).total
    return max(layers_bytes, vocabulary_bytes) <= _MEMORY_FRACTION * memory_bytes


def _build_trial_meshes(meshes: Meshes, trials: Sequence[LayerTrial]) -> Meshes:
    """Return the meshes with one stage each and the tensor parallel sizes of the trials."""
    sized_meshes = tuple(
        Mesh(tp=trial.tp, dp=mesh.ranks // trial.tp, device_type=mesh.device_type)
        for mesh, trial in zip(meshes.meshes, trials, strict=True)
    )
    return replace(meshes, meshes=sized_meshes)


def _trial_arguments(
    base_args: argparse.Namespace, trial_meshes: Meshes, rank: int, trial: LayerTrial
) -> argparse.Namespace:
    """Return the arguments of a rank for a trial."""
    args = rank_arguments(argparse.Namespace(**{**vars(base_args), "meshes": trial_meshes}), rank)
    args.micro_batch_size = trial.sequences
    return args


def _measure_trials(
    base_args: argparse.Namespace,
    meshes: Meshes,
    trials: Sequence[LayerTrial],
    unpadded_vocabulary: int,
    device: Device,
) -> tuple[RankCosts, ...]:
    """Measure the costs on each mesh with the current trials."""
    trial_meshes, rank = _build_trial_meshes(meshes, trials), dist.get_rank()
    args = _trial_arguments(
        base_args, trial_meshes, rank, trials[trial_meshes.stage_of(rank).mesh_index]
    )
    distributed.init_model_parallel(args)
    vocabulary = pad_vocabulary(unpadded_vocabulary, vars(args))
    return load_or_measure_costs(
        args, trial_meshes, [trial.sequences for trial in trials], vocabulary, device
    )
