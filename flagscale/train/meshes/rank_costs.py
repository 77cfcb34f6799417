"""Costs of model parts for a rank of each mesh, read from a cache or measured.

A mesh is a number of ranks with the same parallel sizes. Costs are those of a layer, of the
embedding and of the output layer: seconds of a micro-batch's forward and backward pass and of a
step, bytes of parameters and of activations (:class:`.costs.PartCost`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments.hetero.meshes import Meshes
from flagscale.estimate import cost_cache
from flagscale.estimate.costs import RankCosts, max_costs
from flagscale.train.device import Device
from flagscale.train.distributed import gather_from_ranks
from flagscale.train.meshes.cost_profiler import measure_costs


def broadcast_from_rank_0(compute: Callable[[], Any]) -> Any:
    """Call ``compute`` on rank 0 and broadcast the result."""
    result = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def load_or_measure_costs(
    args: argparse.Namespace,
    meshes: Meshes,
    max_micro_batch_sizes: Sequence[int],
    padded_vocab_size: int,
    device: Device,
    on_measure: Callable[[], None] = lambda: None,
) -> tuple[RankCosts, ...]:
    """Return the costs for a rank of each mesh.

    Costs in the cache of rank 0's host are used if all were measured under the current conditions.
    Otherwise all ranks measure. The slowest rank of each mesh determines the costs, which are
    cached. Collective: all ranks call it, after torch.distributed and megatron.core's process
    groups are initialized.

    Args:
        args: arguments of this rank.
        meshes: meshes of the whole job. Their assignment of layers to pipeline stages is ignored.
        max_micro_batch_sizes: largest micro-batch of a rank of each mesh, in sequences.
        padded_vocab_size: number of vocabulary entries with padding.
        device: device of this rank.
        on_measure: called before measuring.
    """
    rank_conditions = gather_from_ranks(_measurement_conditions(padded_vocab_size, device))
    conditions = [rank_conditions[meshes.first_rank(index)] for index in range(len(meshes.meshes))]
    paths = [
        cost_cache.cost_path(vars(args), meshes, index, micro_batch_size)
        for index, micro_batch_size in enumerate(max_micro_batch_sizes)
    ]
    cached: tuple[RankCosts, ...] | None = broadcast_from_rank_0(
        lambda: _read_cache(paths, conditions)
    )
    if cached is not None:
        return cached
    on_measure()
    rank_costs = gather_from_ranks(measure_costs(args, padded_vocab_size, device))
    mesh_costs = []
    for index, mesh in enumerate(meshes.meshes):
        first_rank = meshes.first_rank(index)
        mesh_costs.append(max_costs(rank_costs[first_rank : first_rank + mesh.ranks]))
        if dist.get_rank() == 0:
            today = datetime.now(timezone.utc).date().isoformat()
            cost_cache.write_costs(
                paths[index], cost_cache.CachedCosts(mesh_costs[-1], conditions[index], today)
            )
    return tuple(mesh_costs)


def _measurement_conditions(padded_vocab_size: int, device: Device) -> dict[str, str]:
    """Return the conditions of a measurement in addition to the arguments."""
    conditions = {
        "vocabulary": str(padded_vocab_size),
        "device": device.product,
        "torch": torch.__version__,
    }
    for package in ("megatron-core", "flagscale"):
        try:
            conditions[package] = version(package)
        except PackageNotFoundError:
            continue
    return conditions


def _read_cache(
    paths: Sequence[Any], conditions: Sequence[Mapping[str, str]]
) -> tuple[RankCosts, ...] | None:
    """Return the cached costs of all meshes, or None if any was measured under other conditions."""
    costs = []
    for path, current_conditions in zip(paths, conditions, strict=True):
        entry = cost_cache.read_costs(path)
        if entry is None or entry.conditions != current_conditions:
            return None
        costs.append(entry.costs)
    return tuple(costs)
