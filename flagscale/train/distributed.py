"""Process groups of a training run: who this rank is, joining the others, the parallel layout."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from flagscale.comm import registry
from flagscale.comm.base import TRAINING
from flagscale.errors import ConfigError, JobError
from flagscale.train.device import Device

if TYPE_CHECKING:
    from flagscale.train.meshes.groups import MeshGroups


_BACKEND_KEY = "flagscale/backend"
_KIND_KEY = "flagscale/kind/"


@dataclass(frozen=True)
class Rank:
    """This process among all of the job, as torchrun tells it through the environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Rank:
        """Read RANK, LOCAL_RANK and WORLD_SIZE; a script started without torchrun is alone."""
        try:
            return cls(
                rank=int(os.environ.get("RANK", "0")),
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
            )
        except ValueError as error:
            raise ConfigError(
                f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {error}",
                hint="start training through the launcher or torchrun",
            ) from error


@dataclass(frozen=True)
class Joined:
    """The default process group: the backend that runs, how many seconds joining took, and whether
    all ranks are on one kind of device."""

    backend: str
    seconds: float
    alike: bool


def join(
    rank: Rank,
    device: Device,
    *,
    backend: str,
    timeout_minutes: float,
    options: Sequence[str] = (),
) -> Joined:
    """Start the default process group and hear every rank. ``options`` are ``name=value`` words
    for the backend.

    Raises:
        ConfigError: this machine cannot use ``backend``, or an option is not one of its.
        JobError: not every rank came within the timeout, or they cannot talk to each other.
    """
    values = registry.options_of(backend, options)
    chosen = registry.usable(backend, device.kind, TRAINING)
    chosen.export(values)
    if rank.world_size == 1 and "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    begin, patience = time.monotonic(), timedelta(minutes=timeout_minutes)
    try:
        store = next(rendezvous("env://", rank.rank, rank.world_size, timeout=patience))[0]
        _agree(store, rank, f"{chosen.name} on {device.name}")
        store.add(_KIND_KEY + device.kind, 1)
        with chosen.creating():
            dist.init_process_group(
                chosen.torch_backend(device.kind),
                store=dist.distributed_c10d.PrefixStore("default_pg", store),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=patience,
                **chosen.init_options(device.torch_device, values),
            )
        heard = torch.ones(1, device=device.torch_device)
        dist.all_reduce(heard)
        count = int(heard.item())
        same_kind = store.add(_KIND_KEY + device.kind, 0)  # everybody has been heard
    except (dist.DistError, RuntimeError) as error:
        raise JobError(
            f"rank {rank.rank} could not join {rank.world_size} ranks at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"with {chosen.name}: {error}"
        ) from error
    if count != rank.world_size:
        raise JobError(f"rank {rank.rank} heard {count} of {rank.world_size} ranks")
    return Joined(chosen.name, time.monotonic() - begin, same_kind == count)


def _agree(store: Any, rank: Rank, own: str) -> None:
    """Raise JobError where rank 0 takes another backend: they would wait for each other."""
    if rank.rank == 0:
        store.set(_BACKEND_KEY, own)
    rank_0 = store.get(_BACKEND_KEY).decode()
    if rank_0.partition(" on ")[0] != own.partition(" on ")[0]:
        raise JobError(
            f"rank {rank.rank} would communicate by {own}, rank 0 by {rank_0}",
            hint="set distributed_backend to one that joins both devices, such as fsccl",
        )


def lay_out(args: argparse.Namespace) -> MeshGroups | None:
    """Create megatron.core's process groups for the layout of ``args`` and seed every generator.

    ``args`` has passed :mod:`flagscale.config.arguments.resolve`, so the sizes divide the world.

    Returns the groups beyond megatron.core's that heterogeneous training has.
    """
    from flagscale.train.tail import gradients_alone

    gradients_alone()
    groups = None
    if args.meshes is None:
        _lay_out_alike(args)
    else:
        groups = _lay_out_meshes(args)
    seed_generators(args)
    return groups


def seed_generators(args: argparse.Namespace) -> None:
    """Seed every generator of random numbers."""
    from megatron.core import parallel_state, tensor_parallel

    # Dropout must differ between pipeline stages, and be equal among data-parallel replicas'
    # tensor-parallel partners.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _lay_out_meshes(args: argparse.Namespace) -> MeshGroups:
    from flagscale.train.meshes import groups

    return groups.make(
        args.meshes,
        args.stage,
        minutes=args.distributed_timeout_minutes,
        on_host=args.hetero_use_cpu_communication,
    )


def _lay_out_alike(args: argparse.Namespace) -> None:
    """All ranks alike. Of unlike replicas a replica's ranks follow each other, so that they can be
    on hosts of one type: data parallelism is the outermost size, not the pipeline."""
    from megatron.core import parallel_state

    order, experts_tp = "tp-cp-ep-dp-pp", args.expert_tensor_parallel_size
    if args.shares is not None:
        order = "tp-cp-ep-pp-dp"
        if not args.num_moe_experts:
            # Groups of experts that nobody has. megatron.core wants as many replicas of them.
            experts_tp = args.tensor_model_parallel_size * args.context_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=experts_tp,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order=order,
        # The optimizer's old checkpoint formats alone would use them.
        create_gloo_process_groups=False,
    )


def leave() -> None:
    """Destroy all process groups; harmless when there are none."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
