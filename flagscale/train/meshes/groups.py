"""Process groups of a job whose meshes are laid out unlike each other.

megatron.core keeps the groups of this rank in :mod:`megatron.core.parallel_state`, made for one
layout of all ranks. Here each is made for the layout of the rank's own mesh and put in the same
place, so that layers, data parallelism, optimizer, router and checkpoints run unchanged. Only the
pipeline has no group: it runs through all meshes, and what is asked of it is this rank's stage and
how many stages there are (:class:`Stages`).
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

from flagscale.config.arguments.meshes import Mesh, Meshes, Stage

_ORDER = "tp-cp-ep-dp-pp"

# What parallel_state calls a group, and the parallel sizes whose ranks it joins.
_DENSE = {
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
_EXPERTS = {
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "dp",
}
# And where it keeps the ranks of some of them.
_RANKS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_CONTEXT_PARALLEL_GROUP": "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP": "_DATA_PARALLEL_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP_WITH_CP": "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_MODEL_PARALLEL_GROUP": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "_EXPERT_MODEL_PARALLEL_GROUP": "_EXPERT_MODEL_PARALLEL_RANKS",
}


@dataclass(frozen=True)
class Stages:
    """Stands for the pipeline's process group: this rank's stage among all."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class Boundaries:
    """Groups of all ranks for what stages send each other: activations and gradients apart, since
    between two ranks both may be under way at once, and NCCL takes messages in their order alone.
    ``on_host``: through the hosts' memory; ``unlike``: meshes may be on unlike kinds of devices,
    between which there is no other way."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    on_host: bool
    unlike: bool = False


@dataclass(frozen=True)
class MeshGroups:
    """Groups that only heterogeneous training has. ``ends``: of the rows of a tied embedding that
    this rank holds, from the first row on, the ranks of both ends of the pipeline with the same."""

    boundaries: Boundaries
    ends: tuple[dist.ProcessGroup, ...]

    def on_unlike_devices(self) -> MeshGroups:
        """The same groups where ranks are not all on one kind of device."""
        return replace(self, boundaries=replace(self.boundaries, unlike=True))


class _Maker:
    """Makes groups; of the same ranks only one. All ranks ask for the same groups in one order."""

    def __init__(self, minutes: float) -> None:
        self._timeout = timedelta(minutes=minutes)
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, ranks: tuple[int, ...], description: str | None = None) -> Any:
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(
                list(ranks), timeout=self._timeout, group_desc=description
            )
        return self._made[ranks]

    def of_all(self, backend: str | None) -> Any:
        return dist.new_group(backend=backend, timeout=self._timeout)


def make(meshes: Meshes, stage: Stage, *, minutes: float, on_host: bool) -> MeshGroups:
    """Make the groups of every mesh, and make this rank's megatron.core's. All ranks call it.

    Args:
        meshes: of the whole job.
        stage: this rank's.
        minutes: after which a collective that does not finish fails.
        on_host: stages send each other through the hosts' memory.
    """
    rank, maker = dist.get_rank(), _Maker(minutes)
    for index, mesh in enumerate(meshes.meshes):
        named = list(_all_groups(mesh, meshes.first_rank(index)))
        uses: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, ranks in named:
            uses[ranks].append(name.strip("_"))
        for name, ranks in named:
            group = maker.group(ranks, " ".join(uses[ranks]))
            if rank in ranks:
                setattr(parallel_state, name, group)
                if name in _RANKS:
                    setattr(parallel_state, _RANKS[name], list(ranks))
    _fill_in(meshes, stage)
    backend = "gloo" if on_host else None
    boundaries = Boundaries(maker.of_all(backend), maker.of_all(backend), on_host)
    return MeshGroups(boundaries, tuple(_ends(meshes, rank, maker)))


def _all_groups(mesh: Mesh, first: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    dense = RankGenerator(
        tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=_ORDER, rank_offset=first
    )
    of_experts = mesh.expert_tp * mesh.ep
    experts = RankGenerator(
        tp=mesh.expert_tp,
        ep=mesh.ep,
        dp=mesh.stage_ranks // of_experts,
        pp=mesh.pp,
        cp=1,
        order=_ORDER,
        rank_offset=first,
    )
    for generator, names in ((dense, _DENSE), (experts, _EXPERTS)):
        for name, token in names.items():
            for ranks in generator.get_ranks(token):
                yield name, tuple(ranks)


def _fill_in(meshes: Meshes, stage: Stage) -> None:
    """What parallel_state knows beside groups."""
    stages = Stages(stage.index, len(meshes.stages))
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = stages
    # Of the same place in every stage; who asks wants to know first and last.
    parallel_state._PIPELINE_GLOBAL_RANKS = [other.first_rank for other in meshes.stages]
    parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = dist.group.WORLD
    parallel_state.set_pipeline_model_parallel_rank(stages.index)
    parallel_state.set_pipeline_model_parallel_world_size(stages.count)
    if meshes.chunks > 1:
        parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
        parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = meshes.chunks
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # it is the same for every layout
        parallel_state._set_global_memory_buffer()


def _ends(meshes: Meshes, rank: int, maker: _Maker) -> Iterator[dist.ProcessGroup]:
    """The pipeline's first and last stage cut a vocabulary in pieces as many as both can: for each
    piece that this rank has, everyone who has it."""
    first, last = meshes.stages[0], meshes.stages[-1]
    pieces = math.lcm(first.mesh.tp, last.mesh.tp)
    for piece in range(pieces):
        ranks = tuple(
            other
            for stage in (first, last)
            for other in stage.ranks
            if stage.place(other)[2] == piece * stage.mesh.tp // pieces
        )
        group = maker.group(ranks)
        if rank in ranks:
            yield group
