"""Process groups of a job with heterogeneous meshes.

megatron.core keeps the groups of a rank in :mod:`megatron.core.parallel_state`, created for one
layout of all ranks. Here they are created for the layout of the rank's own mesh and stored there,
so that layers, data parallelism, optimizer, router and checkpoints work unchanged. Only the
pipeline has no group: it spans all meshes, and only this rank's stage and the number of stages are
needed (:class:`PipelineStagePosition`).
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

# Attribute of parallel_state for each group, and the parallel dimensions that the group spans.
_DENSE_GROUPS = {
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
_EXPERT_GROUPS = {
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "dp",
}
# Attribute with the ranks of a group, for the groups that have one.
_RANK_LISTS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_CONTEXT_PARALLEL_GROUP": "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP": "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP_WITH_CP": "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_MODEL_PARALLEL_GROUP": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_EXPERT_MODEL_PARALLEL_GROUP": "_EXPERT_MODEL_PARALLEL_RANKS",
}


@dataclass(frozen=True)
class PipelineStagePosition:
    """Substitute for the pipeline's process group: index of this rank's stage, number of stages."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class StageCommunicationGroups:
    """Groups of all ranks for communication between stages.

    Activations and gradients have separate groups, because both may be in flight between two ranks,
    and NCCL delivers the messages of a group in order only.

    Attributes:
        forward: group for activations.
        backward: group for gradients.
        through_host: whether messages are sent from host memory.
        mixed_devices: whether meshes may have different kinds of devices, which can only
            communicate through host memory.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    through_host: bool
    mixed_devices: bool = False


@dataclass(frozen=True)
class MeshGroups:
    """Additional groups of heterogeneous training.

    ``tied_embedding_groups``: for each piece of a tied embedding's rows on this rank, in order, the
    ranks of the first and the last stage that hold the same rows.
    """

    stage_groups: StageCommunicationGroups
    tied_embedding_groups: tuple[dist.ProcessGroup, ...]

    def with_mixed_devices(self) -> MeshGroups:
        """Return the groups for a job whose ranks have different kinds of devices."""
        return replace(self, stage_groups=replace(self.stage_groups, mixed_devices=True))


class _GroupFactory:
    """Creates process groups, only one for each set of ranks.

    All ranks request the same groups in order.
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
    meshes: Meshes, stage: Stage, *, timeout_minutes: float, through_host: bool
) -> MeshGroups:
    """Create the groups of every mesh and store this rank's in parallel_state. All ranks call it.

    Args:
        meshes: meshes of the whole job.
        stage: stage of this rank.
        timeout_minutes: timeout of collectives.
        through_host: whether stages communicate through host memory.
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
                if name in _RANK_LISTS:
                    setattr(parallel_state, _RANK_LISTS[name], list(ranks))
    _set_pipeline_state(meshes, stage)
    backend = "gloo" if through_host else None
    stage_groups = StageCommunicationGroups(
        factory.create_world_group(backend), factory.create_world_group(backend), through_host
    )
    return MeshGroups(stage_groups, tuple(_create_tied_embedding_groups(meshes, rank, factory)))


def _iter_groups(mesh: Mesh, first_rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    for generator, names in ((dense, _DENSE_GROUPS), (experts, _EXPERT_GROUPS)):
        for name, token in names.items():
            for ranks in generator.get_ranks(token):
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

    The vocabulary is divided into as many pieces as the tensor parallel sizes of the first and the
    last stage require. For each piece on this rank, the group contains all ranks that hold it.
    """
    first, last = meshes.stages[0], meshes.stages[-1]
    pieces = math.lcm(first.mesh.tp, last.mesh.tp)
    for piece in range(pieces):
        ranks = tuple(
            stage_rank
            for stage in (first, last)
            for stage_rank in stage.ranks
            if stage.place(stage_rank)[2] == piece * stage.mesh.tp // pieces
        )
        group = factory.get_or_create(ranks)
        if rank in ranks:
            yield group
