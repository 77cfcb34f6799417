"""What parts of the model cost a rank of each mesh: known from an earlier time, or measured now."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments.meshes import Meshes
from flagscale.estimate import cost_cache
from flagscale.estimate.costs import Costs, slowest
from flagscale.train.device import Device
from flagscale.train.meshes.measuring import measure


def shared(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return made[0]


def of_all(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def costs_of(
    args: argparse.Namespace,
    meshes: Meshes,
    sequences: Sequence[int],
    vocabulary: int,
    device: Device,
    begin: Callable[[], None] = lambda: None,
) -> tuple[Costs, ...]:
    """Costs of a rank of each mesh: those that rank 0's host has kept, if all were measured as they
    would be now; otherwise its slowest rank's, measured and kept. All ranks call it, laid out.

    Args:
        args: this rank's arguments.
        meshes: of the whole job; their layers do not matter.
        sequences: how many a rank of each mesh has of a micro-batch at most.
        vocabulary: the padded vocabulary's size.
        device: this rank's.
        begin: is called before anything is measured.
    """
    origins = of_all(_origin(vocabulary, device))
    origins = [origins[meshes.first_rank(index)] for index in range(len(meshes.meshes))]
    paths = [
        cost_cache.path_with(vars(args), meshes, index, most)
        for index, most in enumerate(sequences)
    ]
    known: tuple[Costs, ...] | None = shared(lambda: _read(paths, origins))
    if known is not None:
        return known
    begin()
    every = of_all(measure(args, vocabulary, device))
    found = []
    for index, mesh in enumerate(meshes.meshes):
        first = meshes.first_rank(index)
        found.append(slowest(every[first : first + mesh.ranks]))
        if dist.get_rank() == 0:
            today = datetime.now(timezone.utc).date().isoformat()
            cost_cache.write(paths[index], cost_cache.Kept(found[-1], origins[index], today))
    return tuple(found)


def _origin(vocabulary: int, device: Device) -> dict[str, str]:
    """What costs depend on that no argument says."""
    found = {"vocabulary": str(vocabulary), "device": device.product, "torch": torch.__version__}
    for package in ("megatron-core", "flagscale"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _read(paths: Sequence[Any], origins: Sequence[Mapping[str, str]]) -> tuple[Costs, ...] | None:
    found = []
    for path, origin in zip(paths, origins, strict=True):
        one = cost_cache.read(path)
        if one is None or one.origin != origin:
            return None
        found.append(one.costs)
    return tuple(found)
