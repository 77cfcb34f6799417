"""Process groups of a training run: rank identity, rendezvous and the parallel layout."""

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
from flagscale.comm.base import TRAINING_OPERATIONS
from flagscale.errors import ConfigError, JobError
from flagscale.train.device import Device

if TYPE_CHECKING:
    from flagscale.train.meshes.groups import MeshGroups


_STORE_KEY_BACKEND = "flagscale/backend"
_STORE_KEY_PREFIX_DEVICE_KIND = "flagscale/kind/"


@dataclass(frozen=True)
class RankIdentity:
    """Identity of this process in the job, from the environment variables that torchrun sets."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> RankIdentity:
        """Read torchrun's variables; without torchrun the process is rank 0 of 1.

        Raises:
            ConfigError: a variable is not an integer.
        """
        try:
            return cls(
                rank=int(os.environ.get("RANK", "0")),
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            )
        except ValueError as error:
            raise ConfigError(
                f"RANK, LOCAL_RANK and WORLD_SIZE must be integers: {error}",
                hint="start training through the launcher or torchrun",
            ) from error


@dataclass(frozen=True)
class DefaultGroup:
    """Properties of the default process group after initialization.

    Attributes:
        backend: name of the communication backend.
        init_seconds: duration of the initialization.
        same_device_kind: whether all ranks have the same kind of device.
    """

    backend: str
    init_seconds: float
    same_device_kind: bool


def init_default_group(
    identity: RankIdentity,
    device: Device,
    *,
    backend: str,
    timeout_minutes: float,
    options: Sequence[str] = (),
) -> DefaultGroup:
    """Initialize the default process group and verify it with an all_reduce over all ranks.

    Args:
        identity: rank of this process and number of ranks.
        device: device of this rank.
        backend: name of a communication backend (``distributed_backend``).
        timeout_minutes: timeout of the rendezvous and of collectives.
        options: ``name=value`` options of the backend.

    Raises:
        ConfigError: the backend is not usable on this host, or an option is not supported.
        JobError: a rank did not join within the timeout, or communication between ranks failed.
    """
    backend_options = registry.parse_backend_options(backend, options)
    comm_backend = registry.get_usable_backend(backend, device.kind, TRAINING_OPERATIONS)
    comm_backend.export_options(backend_options)
    if identity.world_size == 1 and "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    start_time, timeout = time.monotonic(), timedelta(minutes=timeout_minutes)
    try:
        store = next(rendezvous("env://", identity.rank, identity.world_size, timeout=timeout))[0]
        _check_same_backend(store, identity, f"{comm_backend.name} on {device.name}")
        store.add(_STORE_KEY_PREFIX_DEVICE_KIND + device.kind, 1)
        with comm_backend.creation_context():
            dist.init_process_group(
                comm_backend.torch_backend(device.kind),
                store=dist.distributed_c10d.PrefixStore("default_pg", store),
                rank=identity.rank,
                world_size=identity.world_size,
                timeout=timeout,
                **comm_backend.init_options(device.torch_device, backend_options),
            )
        ones = torch.ones(1, device=device.torch_device)
        dist.all_reduce(ones)
        ranks_counted = int(ones.item())
        # The all_reduce has completed, so every rank has counted itself under its device kind.
        ranks_of_kind = store.add(_STORE_KEY_PREFIX_DEVICE_KIND + device.kind, 0)
    except (dist.DistError, RuntimeError) as error:
        raise JobError(
            f"rank {identity.rank} could not join {identity.world_size} ranks at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"with {comm_backend.name}: {error}"
        ) from error
    if ranks_counted != identity.world_size:
        raise JobError(
            f"rank {identity.rank} reached {ranks_counted} of {identity.world_size} ranks"
        )
    return DefaultGroup(
        comm_backend.name, time.monotonic() - start_time, ranks_of_kind == ranks_counted
    )


def _check_same_backend(store: Any, identity: RankIdentity, backend_and_device: str) -> None:
    """Raise JobError if rank 0 uses another backend, with which this rank would wait forever."""
    if identity.rank == 0:
        store.set(_STORE_KEY_BACKEND, backend_and_device)
    backend_of_rank_0 = store.get(_STORE_KEY_BACKEND).decode()
    if backend_of_rank_0.partition(" on ")[0] != backend_and_device.partition(" on ")[0]:
        raise JobError(
            f"rank {identity.rank} uses {backend_and_device}, rank 0 uses {backend_of_rank_0}",
            hint="set distributed_backend to one that supports both devices, such as fsccl",
        )


def init_model_parallel(args: argparse.Namespace) -> MeshGroups | None:
    """Create megatron.core's process groups for the layout of ``args`` and seed the RNGs.

    ``args`` must be resolved (:mod:`flagscale.config.arguments.derive`), so that the parallel
    sizes divide the world size.

    Returns:
        Additional groups of heterogeneous training, in which groups of ranks (meshes) have
        different parallel sizes, or None for a homogeneous layout.
    """
    from megatron.core import parallel_state

    from flagscale.train.bounded_all_reduce import bound_gradient_groups_only

    bound_gradient_groups_only(is_hybrid=args.num_distributed_optimizer_instances > 1)
    mesh_groups = None
    if args.meshes is None:
        if not parallel_state.is_initialized():  # by the trial before, in a series of trials
            _init_homogeneous(args)
    else:
        mesh_groups = _init_meshes(args)
    seed_generators(args)
    return mesh_groups


def seed_generators(args: argparse.Namespace) -> None:
    """Seed the random number generators of torch and of megatron.core's RNG tracker."""
    from megatron.core import parallel_state, tensor_parallel

    # Dropout must differ between pipeline stages, and must be equal for tensor-parallel peers of
    # all data-parallel replicas.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _init_meshes(args: argparse.Namespace) -> MeshGroups:
    from flagscale.train.meshes import groups

    return groups.create_mesh_groups(
        args.meshes,
        args.stage,
        timeout_minutes=args.distributed_timeout_minutes,
        via_host_memory=args.hetero_use_cpu_communication,
    )


def _init_homogeneous(args: argparse.Namespace) -> None:
    """Create the groups of a layout in which all ranks have the same parallel sizes.

    Data-parallel replicas may still be heterogeneous: on devices of different speed, with different
    numbers of micro-batches. Data parallelism is then the outermost dimension instead of the
    pipeline, so that the ranks of a replica are consecutive and can be placed on hosts of one type.
    """
    from megatron.core import parallel_state

    rank_order, expert_tp = "tp-cp-ep-dp-pp", args.expert_tensor_parallel_size
    if args.shares is not None:  # micro-batches per replica, in heterogeneous data parallelism
        rank_order = "tp-cp-ep-pp-dp"
        if not args.num_moe_experts:
            # No rank has experts, but megatron.core creates expert groups, which must have as many
            # data-parallel replicas as the other groups.
            expert_tp = args.tensor_model_parallel_size * args.context_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tp,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order=rank_order,
        # Only the optimizer's legacy checkpoint formats use them.
        create_gloo_process_groups=False,
    )


def find_pipeline_stage() -> int | None:
    """Return the pipeline stage of this rank; None before the layout is initialized."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return None
    return int(parallel_state.get_pipeline_model_parallel_rank())


def destroy_groups() -> None:
    """Destroy all process groups, including the default group, if any exist."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
