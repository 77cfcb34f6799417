"""Chooses the parallel sizes of meshes that say only how many ranks they have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from flagscale.config.arguments.meshes import MESHES, Mesh, Meshes
from flagscale.config.arguments.resolve import of_rank
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.errors import ConfigError
from flagscale.estimate import layouts
from flagscale.estimate.arithmetic import Layer
from flagscale.estimate.costs import Costs
from flagscale.estimate.layouts import Chosen, Trial
from flagscale.estimate.memory import Held
from flagscale.estimate.memory import of_rank as memory_of
from flagscale.estimate.split import kinds_of
from flagscale.train import distributed
from flagscale.train.device import Device
from flagscale.train.meshes.measuring import LAYERS
from flagscale.train.meshes.times import costs_of, of_all, shared

_SPARED = 0.9
"""Share of a device's room that a model may take to be measured: what it takes is an estimate."""


def with_sizes(
    args: argparse.Namespace, size: int, device: Device, tell: Callable[[str], None]
) -> argparse.Namespace:
    """Arguments of no rank in particular, with the sizes and layers of open meshes chosen.

    Every tensor parallel size and number of sequences that a mesh may have is measured, all meshes
    at the same time. All ranks call it, laid out, and are laid out otherwise afterwards.

    Args: see :func:`flagscale.train.meshes.splitting.settle`.

    Raises:
        ConfigError: no sizes fit the arguments.
    """
    meshes: Meshes = args.meshes
    base = argparse.Namespace(
        **{**vars(args), "sequence_parallel": meshes.sequence_parallel, "stage": None}
    )
    base.micro_batch_size = meshes.sequences // meshes.meshes[0].dp
    tried = _trials(base, meshes, size, device)
    candidates = list(layouts.every(vars(base), meshes, tried))
    if not candidates:
        raise ConfigError(
            f"{MESHES}: no tensor, data and pipeline parallel sizes of these ranks fit "
            f"global_batch_size {base.global_batch_size}, micro_batch_size {base.micro_batch_size} "
            "(here the most sequences that a rank takes at once) and the devices' memory",
            hint="take another global_batch_size, or say the sizes",
        )
    counts = " + ".join(str(len(own)) for own in tried)
    tell(f"measuring layers of {counts} sizes, to choose between {len(candidates)} layouts")
    measured: dict[tuple[int, Trial], Costs] = {}
    for number in range(max(map(len, tried))):
        now = [own[min(number, len(own) - 1)] for own in tried]
        for index, costs in enumerate(_costs(base, meshes, now, size, device)):
            measured[index, now[index]] = costs
    kinds = kinds_of(base)
    found: list[Chosen] = shared(
        lambda: layouts.choose(vars(base), candidates, measured, kinds)[: layouts.SHOWN]
    )
    for line in layouts.reasons(found, len(candidates)):
        tell(line)
    return _chosen(base, found[0].meshes)


def _chosen(base: argparse.Namespace, meshes: Meshes) -> argparse.Namespace:
    replicas = meshes.meshes[0].dp
    base.meshes = meshes
    base.micro_batch_size = meshes.sequences // replicas
    base.data_parallel_size = replicas
    base.num_microbatches = base.global_batch_size // meshes.sequences
    return base


def _trials(
    base: argparse.Namespace, meshes: Meshes, size: int, device: Device
) -> list[list[Trial]]:
    """What is to be measured of each mesh: what its devices have room for."""
    on_a_host = of_all(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    rooms = of_all(device.accelerator.room(device.torch_device))
    made = []
    for index, mesh in enumerate(meshes.meshes):
        ranks = slice(meshes.first_rank(index), meshes.first_rank(index) + mesh.ranks)
        room = min((one for one in rooms[ranks] if one is not None), default=None)
        every = layouts.trials(vars(base), mesh, min(on_a_host[ranks]))
        made.append(
            [one for one in every if room is None or _fits(base, meshes, index, one, size, room)]
        )
    return made


def _fits(
    base: argparse.Namespace, meshes: Meshes, index: int, trial: Trial, size: int, room: int
) -> bool:
    trying = _trying(meshes, [trial] * len(meshes.meshes))
    args = _tried_by(base, trying, trying.first_rank(index), trial)
    vocabulary = padded_vocabulary(size, vars(args))
    layer = Layer(mixture=False, eight=bool(args.fp8))
    layers = memory_of(args, 0, Held((layer,) * LAYERS, first=True, last=True)).all
    ends = memory_of(args, vocabulary, Held((layer,), first=True, last=True)).all
    return max(layers, ends) <= _SPARED * room


def _trying(meshes: Meshes, now: Sequence[Trial]) -> Meshes:
    """The meshes with one stage each, of the tensor parallel sizes that are tried."""
    sized = tuple(
        Mesh(tp=trial.tp, dp=mesh.ranks // trial.tp, device_type=mesh.device_type)
        for mesh, trial in zip(meshes.meshes, now, strict=True)
    )
    return replace(meshes, meshes=sized)


def _tried_by(
    base: argparse.Namespace, trying: Meshes, rank: int, trial: Trial
) -> argparse.Namespace:
    """The arguments of a rank that tries it."""
    args = of_rank(argparse.Namespace(**{**vars(base), "meshes": trying}), rank)
    args.micro_batch_size = trial.sequences
    return args


def _costs(
    base: argparse.Namespace, meshes: Meshes, now: Sequence[Trial], size: int, device: Device
) -> tuple[Costs, ...]:
    """What a layer takes on each mesh with what is tried now."""
    trying, rank = _trying(meshes, now), dist.get_rank()
    args = _tried_by(base, trying, rank, now[trying.stage_of(rank).mesh_index])
    distributed.lay_out(args)
    vocabulary = padded_vocabulary(size, vars(args))
    return costs_of(args, trying, [trial.sequences for trial in now], vocabulary, device)
