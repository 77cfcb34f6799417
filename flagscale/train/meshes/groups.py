"""Process groups of a job with heterogeneous meshes.

A mesh is a number of ranks with the same parallel sizes that hold consecutive pipeline stages
(:mod:`flagscale.config.arguments.hetero.meshes`). The meshes of a job differ in their sizes.

megatron.core keeps the groups of a rank in :mod:`megatron.core.parallel_state`, created for one
layout of all ranks. Here they are created for the layout of the rank's mesh and stored there,
so that layers, data parallelism, optimizer, router and checkpoints work unchanged. Only the
pipeline has no group, because it spans all meshes. :class:`PipelineStagePosition`, with this rank's
stage and the number of stages, takes the place of its group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, Stage

_RANK_ORDER = "tp-cp-ep-dp-pp"

# Attribute of parallel_state that holds each group, and the parallel dimensions that the group
# spans.
_DENSE_GROUP_DIMENSIONS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "_MODEL_PARALLEL_GROUP": "tp-pp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
}
_EXPERT_GROUP_DIMENSIONS = {
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "dp",
}
# Attribute of parallel_state with the list of ranks of a group, for the groups that have one.
_RANK_LIST_ATTRIBUTES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_CONTEXT_PARALLEL_GROUP": "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP": "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP_WITH_CP": "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_MODEL_PARALLEL_GROUP": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_EXPERT_MODEL_PARALLEL_GROUP": "_EXPERT_MODEL_PARALLEL_RANKS",
}


@dataclass(frozen=True)
class PipelineStagePosition:
    """Position of this rank in the pipeline, in place of megatron.core's pipeline process group.

    Attributes:
        index: index of this rank's stage, from 0.
        count: number of stages.
    """

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class StageCommunicationGroups:
    """Process groups for communication between stages, each of all ranks of the job.

    Activations and gradients have separate groups, because both may be in flight between two ranks,
    and NCCL delivers the messages of a group in order only.

    Attributes:
        forward: group for activations.
        backward: group for gradients.
        via_host_memory: whether messages are staged through host memory and sent by gloo.
        mixed_devices: whether meshes may have different kinds of devices. These communicate through
            host memory in any case.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    via_host_memory: bool
    mixed_devices: bool = False


@dataclass(frozen=True)
class MeshGroups:
    """Additional groups of heterogeneous training.

    Attributes:
        stage_groups: groups for communication between stages.
        tied_embedding_groups: groups for the gradients of a tied embedding. This rank's rows of the
            embedding are divided into as many equal blocks; each group has the ranks of the first
            and the last stage that hold the same block.
    """

    stage_groups: StageCommunicationGroups
    tied_embedding_groups: tuple[dist.ProcessGroup, ...]

    def with_mixed_devices(self) -> MeshGroups:
        """Return the groups for a job whose ranks have different kinds of devices."""
        return replace(self, stage_groups=replace(self.stage_groups, mixed_devices=True))


class _GroupFactory:
    """Creates process groups, only one for each set of ranks.

    All ranks must request the same groups in the same order.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self._timeout = timedelta(minutes=timeout_minutes)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def get_or_create(self, ranks: tuple[int, ...], description: str | None = None) -> Any:
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), timeout=self._timeout, group_desc=description
            )
        return self._groups[ranks]

    def create_world_group(self, backend: str | None) -> Any:
        return dist.new_group(backend=backend, timeout=self._timeout)


def create_mesh_groups(
    meshes: Meshes, stage: Stage, *, timeout_minutes: float, via_host_memory: bool
) -> MeshGroups:
    """Create the groups of every mesh and store those of this rank in parallel_state.

    Collective: all ranks call it.

    Args:
        meshes: meshes of the whole job.
        stage: stage of this rank.
        timeout_minutes: timeout of collectives.
        via_host_memory: whether stages communicate through host memory.
    """
    rank, factory = dist.get_rank(), _GroupFactory(timeout_minutes)
    for index, mesh in enumerate(meshes.meshes):
        group_ranks = list(_iter_groups(mesh, meshes.first_rank(index)))
        descriptions: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, ranks in group_ranks:
            descriptions[ranks].append(name.strip("_"))
        for name, ranks in group_ranks:
            group = factory.get_or_create(ranks, " ".join(descriptions[ranks]))
            if rank in ranks:
                setattr(parallel_state, name, group)
                if name in _RANK_LIST_ATTRIBUTES:
                    setattr(parallel_state, _RANK_LIST_ATTRIBUTES[name], list(ranks))
    _set_pipeline_state(meshes, stage)
    backend = "gloo" if via_host_memory else None
    stage_groups = StageCommunicationGroups(
        factory.create_world_group(backend), factory.create_world_group(backend), via_host_memory
    )
    return MeshGroups(stage_groups, tuple(_create_tied_embedding_groups(meshes, rank, factory)))


def _iter_groups(mesh: Mesh, first_rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield attribute of parallel_state and global ranks of all groups of a mesh."""
    dense = RankGenerator(
        tp=mesh.tp,
        ep=1,
        dp=mesh.dp,
        pp=mesh.pp,
        cp=mesh.cp,
        order=_RANK_ORDER,
        rank_offset=first_rank,
    )
    expert_ranks = mesh.expert_tp * mesh.ep
    experts = RankGenerator(
        tp=mesh.expert_tp,
        ep=mesh.ep,
        dp=mesh.stage_ranks // expert_ranks,
        pp=mesh.pp,
        cp=1,
        order=_RANK_ORDER,
        rank_offset=first_rank,
    )
    for generator, group_dimensions in (
        (dense, _DENSE_GROUP_DIMENSIONS),
        (experts, _EXPERT_GROUP_DIMENSIONS),
    ):
        for name, dimensions in group_dimensions.items():
            for ranks in generator.get_ranks(dimensions):
                yield name, tuple(ranks)


def _set_pipeline_state(meshes: Meshes, stage: Stage) -> None:
    """Set the pipeline state and the other values of parallel_state that are not groups."""
    position = PipelineStagePosition(stage.index, len(meshes.stages))
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = position
    # One rank per stage. Only the first and the last are used.
    parallel_state._PIPELINE_GLOBAL_RANKS = [stage.first_rank for stage in meshes.stages]
    parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = dist.group.WORLD
    parallel_state.set_pipeline_model_parallel_rank(position.index)
    parallel_state.set_pipeline_model_parallel_world_size(position.count)
    if meshes.chunks > 1:
        parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
        parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = meshes.chunks
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # does not depend on the layout
        parallel_state._set_global_memory_buffer()


def _create_tied_embedding_groups(
    meshes: Meshes, rank: int, factory: _GroupFactory
) -> Iterator[dist.ProcessGroup]:
    """Yield the groups for gradients of a tied embedding.

    The vocabulary is divided into blocks such that every tensor-parallel rank of the first and of
    the last stage holds whole blocks. For each block on this rank, the group contains all ranks
    that hold it.
    """
    first, last = meshes.stages[0], meshes.stages[-1]
    blocks = math.lcm(first.mesh.tp, last.mesh.tp)
    for block in range(blocks):
        ranks = tuple(
            stage_rank
            for stage in (first, last)
            for stage_rank in stage.ranks
            if stage.position_of(stage_rank)[2] == block * stage.mesh.tp // blocks
        )
        group = factory.get_or_create(ranks)
        if rank in ranks:
            yield group
