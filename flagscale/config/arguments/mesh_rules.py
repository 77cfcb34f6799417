"""What must hold between the meshes of heterogeneous training, and with the rest.

The rules of FlagScale's heterogeneous training that are no need of the algorithm are not here:
data-parallel sizes need not divide each other, several stages may lie in a mesh, tensor parallel
sizes may differ with sequence parallelism or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.config.arguments import growth, recompute
from flagscale.config.arguments.meshes import (
    MESHES,
    SPLIT,
    Mesh,
    Meshes,
    chosen_for_us,
    in_words,
)
from flagscale.config.arguments.precision import Broken, Values

_LAYERS_SAID_OTHERWISE = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_NOT_OVER_MESHES: Mapping[str, str] = {
    "defer_embedding_wgrad_compute": "the embedding's gradient is summed over unlike meshes",
    "variable_seq_lengths": "what stages send each other is planned once, for one length",
}


def broken(values: Values, meshes: Meshes) -> Iterator[Broken]:
    """Rules that do not depend on the number of ranks."""
    for name in _LAYERS_SAID_OTHERWISE:
        if values.get(name):
            yield name, f"the layers of stages are said by {SPLIT}; keep that"
    for name, reason in _NOT_OVER_MESHES.items():
        if values.get(name):
            yield name, f"is not possible with enable_hetero: {reason}"
    if meshes.eager and meshes.chunks > 1:
        yield "hetero_eager_1f1b", "is for stages of one chunk; virtual stages have their schedule"
    if len(meshes.stages) < 2:
        yield MESHES, "one mesh of one stage is no pipeline; leave enable_hetero out"
    yield from _stages(values, meshes)
    yield from _layers(values, meshes)
    if meshes.open:
        yield from open_(values)
        return
    yield from _sequences(values, meshes)
    for index, mesh in enumerate(meshes.meshes):
        for message in _experts(values, meshes, mesh):
            yield MESHES, f"mesh {index} ({mesh.text()}): {message}"


def world(values: Values, meshes: Meshes, world_size: int) -> Iterator[Broken]:
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
    yield from growth.undivided(values, sequences, f"{first} mesh", stages)
    if batch % sequences:
        yield "global_batch_size", f"{batch} is not divisible by {first} mesh"
    elif meshes.chunks > 1 and batch // sequences % len(meshes.stages):
        yield (
            "global_batch_size",
            f"{batch} gives {batch // sequences} micro-batches, which the {len(meshes.stages)} "
            "stages with virtual stages must divide",
        )


def open_(values: Values) -> Iterator[Broken]:
    """Meshes whose sizes are to be chosen: tensor, data and pipeline parallel ones, with their
    layers; what depends on these cannot be said before."""
    if values["global_batch_size"] is None:
        yield "global_batch_size", "is needed where the meshes' sizes are to be chosen"
    if values["num_moe_experts"]:
        yield MESHES, "of a mixture of experts, say the sizes of its meshes"
    if values[SPLIT] is not None and not chosen_for_us(values[SPLIT]):
        yield SPLIT, "how many stages there are is to be chosen, and their layers with it"
    for name in ("standalone_embedding_stage", *recompute.NAMES):
        if values[name]:
            yield name, "is for stages that are known; say the meshes' sizes"
    if values["recompute_granularity"] == recompute.AUTO:
        yield "recompute_granularity", "auto is for stages that are known; say the meshes' sizes"


def _stages(values: Values, meshes: Meshes) -> Iterator[Broken]:
    """A number of stages that is given beside the meshes', as FlagScale's YAMLs do."""
    pp, stages = values["pipeline_model_parallel_size"], len(meshes.stages)
    if pp not in (1, stages):
        yield "pipeline_model_parallel_size", f"{pp}, but the meshes have {stages} stages in all"


def _layers(values: Values, meshes: Meshes) -> Iterator[Broken]:
    name = MESHES if in_words(values) and values[SPLIT] is None else SPLIT
    counts, stages = [stage.layers for stage in meshes.stages], len(meshes.stages)
    split, alone = values[SPLIT], values["standalone_embedding_stage"]
    chosen = chosen_for_us(split) or meshes.open
    said = ["layers=" in text for text in values[MESHES]] if in_words(values) else []
    if split is not None and not chosen and len(split) not in (stages, stages - bool(alone)):
        yield name, f"{len(split)} numbers for {stages} stages: give one for each"
        return
    for mesh, stated in zip(meshes.meshes, said, strict=False):
        if any(said) and not (stated and len(mesh.layers or ()) == mesh.pp):
            yield name, f"{mesh.text()}: say the layers of each of its {mesh.pp} stages, or of none"
            return
    layers = values["num_layers"]
    if chosen and layers % meshes.chunks:
        yield name, f"{layers} layers do not divide into {meshes.chunks} model chunks"
        return
    if sum(counts) != layers:
        even = split is None and not any(said)
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


def _sequences(values: Values, meshes: Meshes) -> Iterator[Broken]:
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


def _experts(values: Values, meshes: Meshes, mesh: Mesh) -> Iterator[str]:
    if mesh.stage_ranks % (mesh.ep * mesh.expert_tp):
        yield (
            f"ep {mesh.ep} x expert tensor parallel {mesh.expert_tp} does not divide the "
            f"{mesh.stage_ranks} ranks of a stage"
        )
    if mesh.ep > 1 and meshes.sequences % mesh.dp:
        yield f"experts on several ranks need dp to divide {meshes.sequences} sequences"
    if mesh.etp is not None and not values["num_moe_experts"]:
        yield "a tensor parallel size of experts needs num_moe_experts"
