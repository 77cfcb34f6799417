"""Parallel layout of a whole job, homogeneous or heterogeneous, and its rules.

Each heterogeneous mesh (:mod:`.hetero.meshes`) is checked like a job of homogeneous ranks with the
sizes of the mesh; then rules between meshes are checked. Some restrictions of FlagScale are not
necessary and absent: data-parallel sizes need not divide each other, a mesh may hold several
stages, and tensor-parallel sizes may differ with or without sequence parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from flagscale.config.arguments.hetero.meshes import (
    Mesh,
    Meshes,
    are_automatic,
    are_in_words,
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
from flagscale.config.arguments.rules.activation_offload import check_offloaded_chunks
from flagscale.config.arguments.rules.optimizer import check_rampup_sizes
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
from flagscale.config.arguments.rules.sharding import check_instances
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    LAYER_SPLIT,
    MESHES,
    RECOMPUTE_AUTO,
    STAGE_RECOMPUTE,
)


def check_layout(values: Values) -> list[Violation]:
    """Check the layout as far as it does not depend on the number of ranks."""
    violations = (
        list(check_split_syntax(values))
        if uses_microbatch_split(values)
        else list(check_mesh_syntax(values))
    )
    if violations:
        return violations
    meshes = meshes_of(values)
    if uses_meshes(values) and are_automatic(values):
        return [
            *check_tensor_parallel({**values, "sequence_parallel": False}),
            *check_open_meshes(values),
        ]
    if meshes is None:
        violations = list(check_shape(values)) + list(check_pipeline_parallel(values))
    else:
        violations = list(check_meshes(values, meshes)) or list(_check_mesh_shapes(values, meshes))
    return violations or list(_check_recomputation(values, meshes))


def _check_mesh_shapes(values: Values, meshes: Meshes) -> Iterator[Violation]:
    for index, mesh in enumerate(meshes.meshes):
        for name, message in check_shape(mesh_view(values, meshes, index)):
            yield name, f"mesh {index} ({mesh.format_sizes()}): {message}"


def check_world_size(values: Values, world_size: int) -> list[Violation]:
    """Check parallel sizes and batch size against the number of ranks. These rules also apply to
    Megatron-LM."""
    if uses_meshes(values):
        violations = list(check_mesh_syntax(values))
        meshes = None if violations else meshes_of(values)
        if meshes is None:
            return violations
        violations = list(check_mesh_ranks(values, meshes, world_size))
        return violations or _check_recomputed_steps(values, world_size)
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    cp = values["context_parallel_size"]
    replica_size = tp * pp * cp
    if world_size % replica_size:
        sizes = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        return [(name, f"{world_size} ranks are not divisible by {sizes} = {replica_size}")]
    replicas = world_size // replica_size
    if uses_microbatch_split(values):
        return [*check_split_syntax(values)] or [*check_split(values, replicas)]
    violations = [*check_batches(values, replicas), *check_expert_ranks(values, world_size)]
    violations = violations or [*check_instances(values, world_size)]
    return violations or _check_recomputed_steps(values, world_size)


def describe_ranks(values: Values, ranks: range, world_size: int) -> str | None:
    """Describe the part of the model on a range of heterogeneous ranks, for messages; None if all
    ranks are homogeneous."""
    return next(iter(describe_rank_ranges(values, [ranks], world_size)), None)


def describe_rank_ranges(
    values: Values, rank_ranges: Sequence[range], world_size: int
) -> list[str]:
    """Describe the part of the model on each of several ranges of ranks; empty if all ranks are
    homogeneous."""
    meshes = meshes_of(values)
    if meshes is not None:
        return [meshes.describe_stages(ranks) for ranks in rank_ranges]
    if not uses_microbatch_split(values):
        return []
    device_types = replica_device_types(values, data_parallel_size(values, world_size))
    return [describe_replicas(values, ranks, device_types) for ranks in rank_ranges]


def data_parallel_size(values: Values, world_size: int) -> int:
    """Return the data-parallel size; with meshes, that of the first mesh."""
    meshes = meshes_of(values)
    if meshes is not None:
        return meshes.meshes[0].dp
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    return int(world_size // (tp * pp * values["context_parallel_size"]))


def global_batch_size(values: Values, world_size: int) -> int:
    """Return the number of sequences per step, given or computed."""
    if values["global_batch_size"] is not None:
        return int(values["global_batch_size"])
    replicas = data_parallel_size(values, world_size)
    if uses_microbatch_split(values):
        return split_batch_size(values, replicas)
    return int(values["micro_batch_size"] * replicas)


def sequences_per_sample(values: Values) -> int:
    """Return the number of sequences of a sample: two for pairs of answers (``dpo``).

    Batch sizes count samples.
    """
    return 2 if values.get("dpo") else 1


def tokens_per_sample(values: Values) -> int:
    """Return the number of tokens of a sample that the model processes."""
    return sequences_per_sample(values) * int(values["seq_length"])


def describe_batch(values: Values) -> str:
    """Describe the resolved global batch: ``8 x 2048 tokens``, or ``8 pairs of 2048 tokens``."""
    separator = "pairs of" if sequences_per_sample(values) == 2 else "x"
    return f"{values['global_batch_size']} {separator} {values['seq_length']} tokens"


def _stages_and_chunks(values: Values, meshes: Meshes | None) -> tuple[int, int]:
    """Return the number of pipeline stages, and of model chunks per stage."""
    if meshes is not None:
        return len(meshes.stages), meshes.chunks
    return values["pipeline_model_parallel_size"], virtual_chunks(values) or 1


def _chunk_layers(values: Values, meshes: Meshes | None) -> list[int] | None:
    """Return the number of layers of every model chunk: the first chunks of all stages, then the
    second chunks, and so on; None if unknown."""
    if meshes is not None:
        return [stage.layers // meshes.chunks for stage in meshes.stages] * meshes.chunks
    if values["num_layers"] is None:
        return None
    stages = layers_of_stages(values)
    return [counts[chunk] for chunk in range(len(stages[0])) for counts in stages]


def _check_recomputation(values: Values, meshes: Meshes | None) -> Iterator[Violation]:
    measured = meshes is not None and (meshes.open or is_split_automatic(values[LAYER_SPLIT]))
    return check_recompute(values, prod(_stages_and_chunks(values, meshes)), measured=measured)


def _check_recomputed_steps(values: Values, world_size: int) -> list[Violation]:
    meshes = meshes_of(values)
    stages, _ = _stages_and_chunks(values, meshes)
    violations = list(_check_recomputation(values, meshes))
    if violations:
        return violations
    sequences = meshes.sequences if meshes else values["micro_batch_size"]
    sequences *= 1 if meshes else data_parallel_size(values, world_size)
    count = global_batch_size(values, world_size) // sequences
    layers = _chunk_layers(values, meshes)
    return [
        *check_recompute_steps(values, count, layers, stages),
        *check_offloaded_chunks(values, layers),
    ]


def pad_vocabulary(size: int, values: Values) -> int:
    """Return the number of rows of the embedding: ``size`` rounded up such that every
    tensor-parallel rank of any mesh holds a multiple of ``make_vocab_size_divisible_by`` rows."""
    multiple = values["make_vocab_size_divisible_by"] * vocabulary_parts(values)
    return int(-(-size // multiple) * multiple)


def vocabulary_parts(values: Values) -> int:
    """Return the number of equal parts of the vocabulary: the least common multiple of the
    tensor-parallel sizes of all meshes."""
    meshes: Meshes | None = values["meshes"]
    if meshes is None:
        return int(values["tensor_model_parallel_size"])
    return math.lcm(*(mesh.tp for mesh in meshes.meshes))


_OTHER_LAYER_SPLITS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_UNSUPPORTED_OVER_MESHES: Mapping[str, str] = {
    "defer_embedding_wgrad_compute": "the gradient of the embedding is reduced over meshes",
    "variable_seq_lengths": "transfers between stages are planned once, for one sequence length",
}
"""Arguments that are not supported with meshes, with the reason."""


def check_meshes(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """Check meshes as far as they do not depend on the number of ranks."""
    for name in _OTHER_LAYER_SPLITS:
        if values.get(name):
            yield name, f"is not supported with enable_hetero; use {LAYER_SPLIT}"
    for name, reason in _UNSUPPORTED_OVER_MESHES.items():
        if values.get(name):
            yield name, f"is not supported with enable_hetero: {reason}"
    if meshes.eager and meshes.chunks > 1:
        yield "hetero_eager_1f1b", "is not supported with virtual stages; leave one out"
    if len(meshes.stages) < 2:
        yield MESHES, "expected at least two pipeline stages, found one; leave enable_hetero out"
    yield from _check_stages(values, meshes)
    yield from _check_stage_layers(values, meshes)
    if meshes.open:
        yield from check_open_meshes(values)
        return
    yield from _check_sequences(values, meshes)
    for index, mesh in enumerate(meshes.meshes):
        for message in _check_mesh_experts(values, meshes, mesh):
            yield MESHES, f"mesh {index} ({mesh.format_sizes()}): {message}"


def check_mesh_ranks(values: Values, meshes: Meshes, world_size: int) -> Iterator[Violation]:
    """Check meshes against the number of ranks and the batch size."""
    if meshes.world_size != world_size:
        sizes = " + ".join(str(mesh.ranks) for mesh in meshes.meshes)
        yield (
            MESHES,
            f"the meshes have {sizes} = {meshes.world_size} ranks, but the job has {world_size}",
        )
        return
    if meshes.open:
        return
    batch, sequences = values["global_batch_size"] or meshes.sequences, meshes.sequences
    slice_text = (
        f"micro_batch_size {values['micro_batch_size']} x dp {meshes.meshes[0].dp} of the first "
        "mesh"
    )
    stages = len(meshes.stages) if meshes.chunks > 1 else 1
    yield from check_rampup_sizes(values, sequences, slice_text, stages)
    if batch % sequences:
        yield "global_batch_size", f"{batch} is not divisible by {slice_text}"
    elif meshes.chunks > 1 and batch // sequences % len(meshes.stages):
        yield (
            "global_batch_size",
            f"{batch} has {batch // sequences} micro-batches, which is not divisible by the "
            f"{len(meshes.stages)} pipeline stages, as virtual stages require",
        )


def check_open_meshes(values: Values) -> Iterator[Violation]:
    """Check arguments that cannot be combined with open meshes, whose tensor-, data- and
    pipeline-parallel sizes and layers are chosen before training starts."""
    hint = "give the sizes of the meshes"
    if values["global_batch_size"] is None:
        yield "global_batch_size", "is required if the sizes of meshes are chosen automatically"
    if values["num_moe_experts"]:
        yield MESHES, f"sizes cannot be chosen automatically with num_moe_experts; {hint}"
    if values[LAYER_SPLIT] is not None and not is_split_automatic(values[LAYER_SPLIT]):
        yield LAYER_SPLIT, f"requires a known number of stages; {hint}, or leave it out"
    for name in ("standalone_embedding_stage", *STAGE_RECOMPUTE):
        if values[name]:
            yield name, f"requires a known number of stages; {hint}"
    if values["recompute_granularity"] == RECOMPUTE_AUTO:
        yield "recompute_granularity", f"auto requires a known number of stages; {hint}"


def _check_stages(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """Check ``pipeline_model_parallel_size``, which YAML files of FlagScale give in addition to the
    meshes."""
    pp, stages = values["pipeline_model_parallel_size"], len(meshes.stages)
    if pp not in (1, stages):
        yield (
            "pipeline_model_parallel_size",
            f"expected the number of stages of all meshes, {stages}, found {pp}",
        )


def _check_stage_layers(values: Values, meshes: Meshes) -> Iterator[Violation]:
    name = MESHES if are_in_words(values) and values[LAYER_SPLIT] is None else LAYER_SPLIT
    counts, stages = [stage.layers for stage in meshes.stages], len(meshes.stages)
    split, has_embedding_stage = values[LAYER_SPLIT], bool(values["standalone_embedding_stage"])
    is_chosen = is_split_automatic(split) or meshes.open
    has_layers = ["layers=" in text for text in values[MESHES]] if are_in_words(values) else []
    valid_lengths = (stages, stages - has_embedding_stage)
    if split is not None and not is_chosen and len(split) not in valid_lengths:
        yield name, f"expected one number per stage ({stages}), found {len(split)}"
        return
    for mesh, mesh_has_layers in zip(meshes.meshes, has_layers, strict=False):
        if any(has_layers) and not (mesh_has_layers and len(mesh.layers or ()) == mesh.pp):
            yield (
                name,
                f"{mesh.format_sizes()}: expected layers for each of its {mesh.pp} stages, or for "
                "no stage of any mesh",
            )
            return
    layers = values["num_layers"]
    if is_chosen and layers % meshes.chunks:
        yield name, f"{layers} layers are not divisible by {meshes.chunks} model chunks"
        return
    if sum(counts) != layers:
        message = f"the stages have {sum(counts)} layers, but num_layers is {layers}"
        if split is None and not any(has_layers):
            message = (
                f"{layers} layers are not divisible by {stages} stages; give the layers of each "
                "stage"
            )
        yield name, message
        return
    for stage in meshes.stages:
        if stage.layers == 0 and stage.index > 0:
            yield name, f"stage {stage.index} has no layers, which only stage 0 may have"
        elif stage.layers % meshes.chunks or (meshes.chunks > 1 and not stage.layers):
            yield (
                name,
                f"stage {stage.index}: {stage.layers} layers are not divisible by {meshes.chunks} "
                "model chunks",
            )
    if has_embedding_stage and counts[0]:
        yield (
            "standalone_embedding_stage",
            f"expected 0 layers in the first stage, found {counts[0]}",
        )


def _check_sequences(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """Check that every mesh can divide the sequences of a micro-batch."""
    for index, mesh in enumerate(meshes.meshes):
        label = f"mesh {index} ({mesh.format_sizes()})"
        is_last = index == len(meshes.meshes) - 1
        if mesh.dp > meshes.sequences:
            yield (
                "micro_batch_size",
                f"a micro-batch has {meshes.sequences} sequences, fewer than dp {mesh.dp} of "
                f"{label}; increase micro_batch_size",
            )
        elif meshes.sequences % mesh.dp and is_last and not values["calculate_per_token_loss"]:
            yield (
                "micro_batch_size",
                f"a micro-batch of {meshes.sequences} sequences is not divisible by dp {mesh.dp} "
                f"of {label}, whose ranks average their losses; change micro_batch_size, or set "
                "calculate_per_token_loss: true",
            )
        divisor = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
        if values["seq_length"] % divisor:
            yield (
                "seq_length",
                f"{values['seq_length']} is not divisible by {divisor}, as {label} requires",
            )


def _check_mesh_experts(values: Values, meshes: Meshes, mesh: Mesh) -> Iterator[str]:
    if mesh.stage_ranks % (mesh.ep * mesh.expert_tp):
        yield (
            f"the {mesh.stage_ranks} ranks of a stage are not divisible by ep {mesh.ep} x etp "
            f"{mesh.expert_tp}"
        )
    if mesh.ep > 1 and meshes.sequences % mesh.dp:
        yield (
            f"with ep {mesh.ep}, the {meshes.sequences} sequences of a micro-batch must be "
            f"divisible by dp {mesh.dp}"
        )
    if mesh.etp is not None and not values["num_moe_experts"]:
        yield "etp requires num_moe_experts"
