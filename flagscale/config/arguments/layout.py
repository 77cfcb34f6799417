"""Parallel layout of a whole job, homogeneous or heterogeneous, and its rules.

Heterogeneous meshes are judged one by one, each as a job of homogeneous ranks with its sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import prod

from flagscale.config.arguments.hetero.mesh_rules import (
    check_mesh_ranks,
    check_meshes,
    check_open_meshes,
)
from flagscale.config.arguments.hetero.meshes import (
    Meshes,
    are_automatic,
    check_mesh_syntax,
    is_split_automatic,
    mesh_view,
    meshes_of,
    uses_meshes,
)
from flagscale.config.arguments.hetero.microbatch_split import (
    check_split,
    check_split_syntax,
    describe_replicas,
    replica_device_types,
    split_batch_size,
    uses_microbatch_split,
)
from flagscale.config.arguments.rules.parallel_layout import (
    check_batches,
    check_expert_ranks,
    check_pipeline_parallel,
    check_shape,
    check_tensor_parallel,
    layers_of_stages,
    virtual_chunks,
)
from flagscale.config.arguments.rules.recompute import check_recompute, check_recompute_steps
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import LAYER_SPLIT


def check_layout(values: Values) -> list[Violation]:
    """Rules that do not depend on the number of ranks."""
    wrong = (
        list(check_split_syntax(values))
        if uses_microbatch_split(values)
        else list(check_mesh_syntax(values))
    )
    if wrong:
        return wrong
    meshes = meshes_of(values)
    if uses_meshes(values) and are_automatic(values):
        return [
            *check_tensor_parallel({**values, "sequence_parallel": False}),
            *check_open_meshes(values),
        ]
    if meshes is None:
        problems = list(check_shape(values)) + list(check_pipeline_parallel(values))
    else:
        problems = list(check_meshes(values, meshes)) or list(_check_mesh_shapes(values, meshes))
    return problems or list(_check_recomputation(values, meshes))


def _check_mesh_shapes(values: Values, meshes: Meshes) -> Iterator[Violation]:
    for index, mesh in enumerate(meshes.meshes):
        for name, message in check_shape(mesh_view(values, meshes, index)):
            yield name, f"mesh {index} ({mesh.text()}): {message}"


def check_world_size(values: Values, world_size: int) -> list[Violation]:
    """Rules of the parallel sizes and the batch with ``world_size`` ranks; they hold for any
    Megatron."""
    if uses_meshes(values):
        wrong = list(check_mesh_syntax(values))
        meshes = None if wrong else meshes_of(values)
        if meshes is None:
            return wrong
        wrong = list(check_mesh_ranks(values, meshes, world_size))
        return wrong or _check_recomputed_steps(values, world_size)
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    cp = values["context_parallel_size"]
    model = tp * pp * cp
    if world_size % model:
        sizes = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        return [(name, f"{sizes} = {model} ranks do not divide the {world_size} of the job")]
    if uses_microbatch_split(values):
        return [*check_split_syntax(values)] or [*check_split(values, world_size // model)]
    wrong = [*check_batches(values, world_size // model), *check_expert_ranks(values, world_size)]
    return wrong or _check_recomputed_steps(values, world_size)


def describe_ranks(values: Values, ranks: range, world_size: int) -> str | None:
    """Describe the part of the model on a range of heterogeneous ranks, for messages; None if all
    ranks are homogeneous."""
    return next(iter(describe_rank_ranges(values, [ranks], world_size)), None)


def describe_rank_ranges(values: Values, every: Sequence[range], world_size: int) -> list[str]:
    """Describe the part of the model on each of several ranges of ranks; empty if all ranks are
    homogeneous."""
    meshes = meshes_of(values)
    if meshes is not None:
        return [meshes.place_of(ranks) for ranks in every]
    if not uses_microbatch_split(values):
        return []
    kinds = replica_device_types(values, data_parallel_size(values, world_size))
    return [describe_replicas(values, ranks, kinds) for ranks in every]


def data_parallel_size(values: Values, world_size: int) -> int:
    """Replicas that share the sequences of a micro-batch; the first mesh's, of several."""
    meshes = meshes_of(values)
    if meshes is not None:
        return meshes.meshes[0].dp
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    return int(world_size // (tp * pp * values["context_parallel_size"]))


def global_batch_size(values: Values, world_size: int) -> int:
    """Sequences of a step, whether they are given or follow."""
    if values["global_batch_size"] is not None:
        return int(values["global_batch_size"])
    replicas = data_parallel_size(values, world_size)
    if uses_microbatch_split(values):
        return split_batch_size(values, replicas)
    return int(values["micro_batch_size"] * replicas)


def _stages_and_chunks(values: Values, meshes: Meshes | None) -> tuple[int, int]:
    """Stages of the pipeline, and how many model chunks each holds."""
    if meshes is not None:
        return len(meshes.stages), meshes.chunks
    return values["pipeline_model_parallel_size"], virtual_chunks(values) or 1


def _chunk_layers(values: Values, meshes: Meshes | None) -> list[int] | None:
    """Layers of every model chunk: of the first of all stages, then of the second; None where
    they are not known here."""
    if meshes is not None:
        return [stage.layers // meshes.chunks for stage in meshes.stages] * meshes.chunks
    if values["num_layers"] is None:
        return None
    stages = layers_of_stages(values)
    return [counts[chunk] for chunk in range(len(stages[0])) for counts in stages]


def _check_recomputation(values: Values, meshes: Meshes | None) -> Iterator[Violation]:
    chosen = meshes is not None and (meshes.open or is_split_automatic(values[LAYER_SPLIT]))
    return check_recompute(values, prod(_stages_and_chunks(values, meshes)), measured=chosen)


def _check_recomputed_steps(values: Values, world_size: int) -> list[Violation]:
    meshes = meshes_of(values)
    stages, _ = _stages_and_chunks(values, meshes)
    wrong = list(_check_recomputation(values, meshes))
    if wrong:
        return wrong
    sequences = meshes.sequences if meshes else values["micro_batch_size"]
    sequences *= 1 if meshes else data_parallel_size(values, world_size)
    count = global_batch_size(values, world_size) // sequences
    return list(check_recompute_steps(values, count, _chunk_layers(values, meshes), stages))


def pad_vocabulary(size: int, values: Values) -> int:
    """The embedding's rows: ``size`` rounded up so that each tensor-parallel rank holds a multiple
    of ``make_vocab_size_divisible_by`` of them, whichever mesh it is in."""
    multiple = values["make_vocab_size_divisible_by"] * vocabulary_parts(values)
    return int(-(-size // multiple) * multiple)


def vocabulary_parts(values: Values) -> int:
    """Return the number of equal parts that the vocabulary is divided into, so that every mesh can
    split it."""
    meshes: Meshes | None = values["meshes"]
    if meshes is None:
        return int(values["tensor_model_parallel_size"])
    return math.lcm(*(mesh.tp for mesh in meshes.meshes))
