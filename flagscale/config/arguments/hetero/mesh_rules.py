"""Rules of heterogeneous meshes, among themselves and with other arguments.

FlagScale's rules that the algorithm does not need are absent: data-parallel sizes need not divide
each other, several stages may lie in a mesh, tensor-parallel sizes may differ with or without
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, are_in_words, is_split_automatic
from flagscale.config.arguments.rules.schedule import check_rampup_sizes
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    LAYER_SPLIT,
    MESHES,
    RECOMPUTE_AUTO,
    STAGE_RECOMPUTE,
)

_OTHER_LAYER_SPLITS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_UNSUPPORTED_OVER_MESHES: Mapping[str, str] = {
    "defer_embedding_wgrad_compute": "the embedding's gradient is summed over unlike meshes",
    "variable_seq_lengths": "what stages send each other is planned once, for one length",
}


def check_meshes(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """Rules that do not depend on the number of ranks."""
    for name in _OTHER_LAYER_SPLITS:
        if values.get(name):
            yield name, f"the layers of stages are said by {LAYER_SPLIT}; keep that"
    for name, reason in _UNSUPPORTED_OVER_MESHES.items():
        if values.get(name):
            yield name, f"is not possible with enable_hetero: {reason}"
    if meshes.eager and meshes.chunks > 1:
        yield "hetero_eager_1f1b", "is for stages of one chunk; virtual stages have their schedule"
    if len(meshes.stages) < 2:
        yield MESHES, "one mesh of one stage is no pipeline; leave enable_hetero out"
    yield from _check_stages(values, meshes)
    yield from _check_stage_layers(values, meshes)
    if meshes.open:
        yield from check_open_meshes(values)
        return
    yield from _check_sequences(values, meshes)
    for index, mesh in enumerate(meshes.meshes):
        for message in _check_mesh_experts(values, meshes, mesh):
            yield MESHES, f"mesh {index} ({mesh.text()}): {message}"


def check_mesh_ranks(values: Values, meshes: Meshes, world_size: int) -> Iterator[Violation]:
    """Rules of the number of ranks and of the batch."""
    if meshes.world_size != world_size:
        each = " + ".join(str(mesh.ranks) for mesh in meshes.meshes)
        message = f"the meshes take {each} = {meshes.world_size} ranks, and the job has"
        yield MESHES, f"{message} {world_size}"
        return
    if meshes.open:
        return
    batch, sequences = values["global_batch_size"] or meshes.sequences, meshes.sequences
    first = f"micro_batch_size {values['micro_batch_size']} x dp {meshes.meshes[0].dp} of the first"
    stages = len(meshes.stages) if meshes.chunks > 1 else 1
    yield from check_rampup_sizes(values, sequences, f"{first} mesh", stages)
    if batch % sequences:
        yield "global_batch_size", f"{batch} is not divisible by {first} mesh"
    elif meshes.chunks > 1 and batch // sequences % len(meshes.stages):
        yield (
            "global_batch_size",
            f"{batch} gives {batch // sequences} micro-batches, which the {len(meshes.stages)} "
            "stages with virtual stages must divide",
        )


def check_open_meshes(values: Values) -> Iterator[Violation]:
    """Meshes whose sizes are to be chosen: tensor, data and pipeline parallel ones, with their
    layers; what depends on these cannot be said before."""
    if values["global_batch_size"] is None:
        yield "global_batch_size", "is needed where the meshes' sizes are to be chosen"
    if values["num_moe_experts"]:
        yield MESHES, "of a mixture of experts, say the sizes of its meshes"
    if values[LAYER_SPLIT] is not None and not is_split_automatic(values[LAYER_SPLIT]):
        yield LAYER_SPLIT, "how many stages there are is to be chosen, and their layers with it"
    for name in ("standalone_embedding_stage", *STAGE_RECOMPUTE):
        if values[name]:
            yield name, "is for stages that are known; say the meshes' sizes"
    if values["recompute_granularity"] == RECOMPUTE_AUTO:
        yield "recompute_granularity", "auto is for stages that are known; say the meshes' sizes"


def _check_stages(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """A number of stages that is given beside the meshes', as FlagScale's YAMLs do."""
    pp, stages = values["pipeline_model_parallel_size"], len(meshes.stages)
    if pp not in (1, stages):
        yield "pipeline_model_parallel_size", f"{pp}, but the meshes have {stages} stages in all"


def _check_stage_layers(values: Values, meshes: Meshes) -> Iterator[Violation]:
    name = MESHES if are_in_words(values) and values[LAYER_SPLIT] is None else LAYER_SPLIT
    counts, stages = [stage.layers for stage in meshes.stages], len(meshes.stages)
    split, alone = values[LAYER_SPLIT], values["standalone_embedding_stage"]
    chosen = is_split_automatic(split) or meshes.open
    are_fixed = ["layers=" in text for text in values[MESHES]] if are_in_words(values) else []
    if split is not None and not chosen and len(split) not in (stages, stages - bool(alone)):
        yield name, f"{len(split)} numbers for {stages} stages: give one for each"
        return
    for mesh, stated in zip(meshes.meshes, are_fixed, strict=False):
        if any(are_fixed) and not (stated and len(mesh.layers or ()) == mesh.pp):
            yield name, f"{mesh.text()}: say the layers of each of its {mesh.pp} stages, or of none"
            return
    layers = values["num_layers"]
    if chosen and layers % meshes.chunks:
        yield name, f"{layers} layers do not divide into {meshes.chunks} model chunks"
        return
    if sum(counts) != layers:
        even = split is None and not any(are_fixed)
        why = "do not divide evenly; say how many each has" if even else f"are {sum(counts)}"
        listed = f"{layers} layers over {stages} stages" if even else "the stages' layers"
        yield name, f"{listed} {why}" + ("" if even else f", num_layers is {layers}")
        return
    for stage in meshes.stages:
        if stage.layers == 0 and stage.index > 0:
            yield name, f"stage {stage.index} has no layers; only the first may have none"
        elif stage.layers % meshes.chunks or (meshes.chunks > 1 and not stage.layers):
            message = f"{stage.layers} layers do not divide into {meshes.chunks} model chunks"
            yield name, f"stage {stage.index}: {message}"
    if alone and counts[0]:
        yield "standalone_embedding_stage", f"the first stage has {counts[0]} layers; write 0"


def _check_sequences(values: Values, meshes: Meshes) -> Iterator[Violation]:
    """A micro-batch is shared out in every mesh."""
    for index, mesh in enumerate(meshes.meshes):
        who, last = f"mesh {index} ({mesh.text()})", index == len(meshes.meshes) - 1
        if mesh.dp > meshes.sequences:
            message = f"{who} has fewer than dp {mesh.dp}: raise micro_batch_size"
            yield (
                "micro_batch_size",
                f"of the {meshes.sequences} sequences of a micro-batch {message}",
            )
        elif meshes.sequences % mesh.dp and last and not values["calculate_per_token_loss"]:
            message = (
                f"{meshes.sequences} sequences of a micro-batch do not divide into dp {mesh.dp}"
            )
            message += f" of {who}, whose ranks average their losses: take another micro_batch_size"
            yield "micro_batch_size", message + ", or calculate_per_token_loss: true"
        pieces = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
        if values["seq_length"] % pieces:
            yield (
                "seq_length",
                f"{values['seq_length']} is not divisible by {pieces}, as {who} needs",
            )


def _check_mesh_experts(values: Values, meshes: Meshes, mesh: Mesh) -> Iterator[str]:
    if mesh.stage_ranks % (mesh.ep * mesh.expert_tp):
        yield (
            f"ep {mesh.ep} x expert tensor parallel {mesh.expert_tp} does not divide the "
            f"{mesh.stage_ranks} ranks of a stage"
        )
    if mesh.ep > 1 and meshes.sequences % mesh.dp:
        yield f"experts on several ranks need dp to divide {meshes.sequences} sequences"
    if mesh.etp is not None and not values["num_moe_experts"]:
        yield "a tensor parallel size of experts needs num_moe_experts"
