"""What must hold between the parallel sizes, the model's shape, the batch and the number of ranks.

``values`` are arguments by name, as in :mod:`flagscale.config.arguments.rules`. Where training is
heterogeneous each mesh is judged as a job of like ranks with its sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from flagscale.config.arguments import growth, mesh_rules, pipeline, recompute, shares
from flagscale.config.arguments.meshes import (
    SPLIT,
    Meshes,
    are_on,
    chosen_for_us,
    malformed,
    meshes_of,
    to_be_filled,
    view,
)
from flagscale.config.arguments.pipeline import layers_of_stages, virtual_chunks
from flagscale.config.arguments.precision import Broken, Values


def broken(values: Values) -> list[Broken]:
    """Rules that do not depend on the number of ranks."""
    wrong = list(shares.broken(values)) if shares.is_on(values) else list(malformed(values))
    if wrong:
        return wrong
    meshes = meshes_of(values)
    if are_on(values) and to_be_filled(values):
        return [
            *_tensor_parallel({**values, "sequence_parallel": False}),
            *mesh_rules.open_(values),
        ]
    if meshes is None:
        found = list(_shape(values)) + list(_pipeline_parallel(values))
    else:
        found = list(mesh_rules.broken(values, meshes)) or list(_shapes(values, meshes))
    return found or list(_broken_recomputation(values, meshes))


def _shapes(values: Values, meshes: Meshes) -> Iterator[Broken]:
    for index, mesh in enumerate(meshes.meshes):
        for name, message in _shape(view(values, meshes, index)):
            yield name, f"mesh {index} ({mesh.text()}): {message}"


def _shape(values: Values) -> Iterator[Broken]:
    yield from _tensor_parallel(values)
    yield from _context_parallel(values)
    yield from _experts(values)


def broken_world(values: Values, world_size: int) -> list[Broken]:
    """Rules of the parallel sizes and the batch with ``world_size`` ranks; they hold for any
    Megatron."""
    if are_on(values):
        wrong = list(malformed(values))
        meshes = None if wrong else meshes_of(values)
        if meshes is None:
            return wrong
        wrong = list(mesh_rules.world(values, meshes, world_size))
        return wrong or _recomputed(values, world_size)
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    cp = values["context_parallel_size"]
    model = tp * pp * cp
    if world_size % model:
        sizes = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        return [(name, f"{sizes} = {model} ranks do not divide the {world_size} of the job")]
    if shares.is_on(values):
        return [*shares.broken(values)] or [*shares.world(values, world_size // model)]
    wrong = [*_batches(values, world_size // model), *_expert_ranks(values, world_size)]
    return wrong or _recomputed(values, world_size)


def place_of(values: Values, ranks: range, world_size: int) -> str | None:
    """What these of unlike ranks hold, for messages; None where all are alike."""
    return next(iter(places_of(values, [ranks], world_size)), None)


def places_of(values: Values, every: Sequence[range], world_size: int) -> list[str]:
    """What each of several ranges of unlike ranks holds; empty where all are alike."""
    meshes = meshes_of(values)
    if meshes is not None:
        return [meshes.place_of(ranks) for ranks in every]
    if not shares.is_on(values):
        return []
    kinds = shares.kinds_of(values, data_parallel_size(values, world_size))
    return [shares.place_of(values, ranks, kinds) for ranks in every]


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
    if shares.is_on(values):
        return shares.batch_of(values, replicas)
    return int(values["micro_batch_size"] * replicas)


def gated_width(values: Values) -> int:
    """Width of a gated MLP that is not given: Megatron-LM's two thirds of 4 x hidden in multiples
    of 64, or, with ``multiple_of``, those of FlagScale and Llama."""
    width = 4 * values["hidden_size"] * 2 / 3
    step = values["multiple_of"]
    if step is None:
        return int(width / 64) * 64
    wanted = int(int(width) * (values["hidden_dim_multiplier"] or 1))
    return int(-(-wanted // step) * step)


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


def _broken_recomputation(values: Values, meshes: Meshes | None) -> Iterator[Broken]:
    chosen = meshes is not None and (meshes.open or chosen_for_us(values[SPLIT]))
    return recompute.broken(values, prod(_stages_and_chunks(values, meshes)), measured=chosen)


def _recomputed(values: Values, world_size: int) -> list[Broken]:
    meshes = meshes_of(values)
    stages, _ = _stages_and_chunks(values, meshes)
    wrong = list(_broken_recomputation(values, meshes))
    if wrong:
        return wrong
    taken = meshes.sequences if meshes else values["micro_batch_size"]
    taken *= 1 if meshes else data_parallel_size(values, world_size)
    count = global_batch_size(values, world_size) // taken
    return list(recompute.world(values, count, _chunk_layers(values, meshes), stages))


def _tensor_parallel(values: Values) -> Iterator[Broken]:
    tp, heads = values["tensor_model_parallel_size"], values["num_attention_heads"]
    groups, hidden = values["num_query_groups"], values["hidden_size"]
    if heads % tp:
        yield _indivisible(values, "num_attention_heads", "tensor_model_parallel_size")
    if groups is not None:
        if heads % groups:
            yield "num_query_groups", f"{groups} does not divide {heads} heads"
        elif groups % tp:
            yield _indivisible(values, "num_query_groups", "tensor_model_parallel_size")
    if values["kv_channels"] is None and hidden % heads:
        yield _indivisible(values, "hidden_size", "num_attention_heads")
    if values["ffn_hidden_size"] is not None and values["ffn_hidden_size"] % tp:
        yield _indivisible(values, "ffn_hidden_size", "tensor_model_parallel_size")
    if values["sequence_parallel"] and values["seq_length"] % tp:
        yield _indivisible(values, "seq_length", "tensor_model_parallel_size")


def divides(values: Values, tp: int) -> bool:
    """Whether so many tensor-parallel ranks can share the model, and with sequence parallelism its
    sequences."""
    wide = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    asked = {"tensor_model_parallel_size": tp, "ffn_hidden_size": wide, "sequence_parallel": True}
    return not any(_tensor_parallel({**values, **asked}))


def _indivisible(values: Values, name: str, by: str) -> Broken:
    return name, f"{values[name]} is not divisible by {by} {values[by]}"


def _context_parallel(values: Values) -> Iterator[Broken]:
    cp, tp = values["context_parallel_size"], values["tensor_model_parallel_size"]
    if cp == 1:
        return
    if values["attention_backend"] == "local":
        message = f"{cp}: megatron.core's own attention (attention_backend: local) cannot split a "
        yield "context_parallel_size", message + "sequence over ranks; take auto"
    pieces = 2 * cp * (tp if values["sequence_parallel"] else 1)
    if values["seq_length"] % pieces:
        by = f"2 x context_parallel_size {cp}" + (f" x tensor {tp}" if pieces > 2 * cp else "")
        yield "seq_length", f"{values['seq_length']} is not divisible by {by}"
    kinds = values["cp_comm_type"]
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if kind not in (None, "all_gather"):
            yield "cp_comm_type", f"{kind}: keys and values are gathered here; leave it out"


def _pipeline_parallel(values: Values) -> Iterator[Broken]:
    pp = values["pipeline_model_parallel_size"]
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    chunks = virtual_chunks(values)
    yield from pipeline.broken(values)
    if per_stage is not None and values["num_layers"] % (pp * per_stage):
        by = f"{per_stage} x pipeline_model_parallel_size {pp}"
        message = f"{values['num_layers']} layers do not divide into {by}"
        yield "num_layers_per_virtual_pipeline_stage", message
    elif values["pipeline_model_parallel_layout"] is None:
        yield from _layers(values, pp, chunks or 1)
    if chunks is not None and pp == 1:
        message = f"{chunks} virtual stages need a pipeline of at least 2"
        yield "pipeline_model_parallel_size", message


def _layers(values: Values, pp: int, chunks: int) -> Iterator[Broken]:
    """Layers divide evenly over the stages whose share is not given."""
    layers, stages = values["num_layers"], pp
    layers += bool(values["account_for_embedding_in_pipeline_split"])
    layers += bool(values["account_for_loss_in_pipeline_split"])
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = [values[name] for name in ends if values[name] is not None]
    rest, others = layers - sum(given), stages - len(given)
    if others < 0 or rest < 0 or (others == 0 and rest > 0):
        shared = f"{sum(given)} of {layers} layers are given to {len(given)} of {stages} stages"
        yield "num_layers", shared
    elif others and rest % (others * chunks):
        each = f"{others} pipeline stages" + (f" x {chunks} virtual" if chunks > 1 else "")
        yield "num_layers", f"{rest} layers do not divide into {each}"


def _experts(values: Values) -> Iterator[Broken]:
    ep, experts = values["expert_model_parallel_size"], values["num_moe_experts"]
    if ep > 1 and not experts:
        yield "expert_model_parallel_size", f"{ep} needs num_moe_experts"
    elif experts and experts % ep:
        yield _indivisible(values, "num_moe_experts", "expert_model_parallel_size")
    tp = values["tensor_model_parallel_size"]
    if experts and tp > 1 and not values["sequence_parallel"]:
        message = f"is needed by experts beside tensor_model_parallel_size {tp}: set it to true"
        yield "sequence_parallel", message
    if values["moe_grouped_gemm"] and not experts:
        yield "moe_grouped_gemm", "needs num_moe_experts"
    elif values["moe_grouped_gemm"] and values["add_bias_linear"]:
        yield "moe_grouped_gemm", "the grouped experts have no biases: set disable_bias_linear"
    experts_tp = values["expert_tensor_parallel_size"] or tp
    if experts and values["add_bias_linear"] and experts_tp > 1 and not values["moe_grouped_gemm"]:
        shared = f"experts that {experts_tp} tensor-parallel ranks share have no biases"
        message = f"true: {shared}: set disable_bias_linear, or expert_tensor_parallel_size: 1"
        yield "add_bias_linear", message
    if experts and values["moe_token_dispatcher_type"] == "flex" and experts_tp * ep == 1:
        yield (
            "moe_token_dispatcher_type",
            "flex needs experts on more than one rank (expert_model_parallel_size); take alltoall",
        )
    pattern, layers = values["moe_layer_freq"], values["num_layers"]
    if experts and isinstance(pattern, list) and len(pattern) != layers:
        yield "moe_layer_freq", f"{len(pattern)} items, but num_layers is {layers}"
    elif pattern == 0:
        yield "moe_layer_freq", "0: expected 1 for every layer, 2 for every second, or a list"


def _batches(values: Values, dp: int) -> Iterator[Broken]:
    micro, batch = values["micro_batch_size"], values["global_batch_size"]
    batch = micro * dp if batch is None else batch
    if batch % (micro * dp):
        yield (
            "global_batch_size",
            f"{batch} is not divisible by micro_batch_size {micro} x data-parallel size {dp}",
        )
        return
    pp, count = values["pipeline_model_parallel_size"], batch // (micro * dp)
    taken = f"micro_batch_size {micro} x data-parallel size {dp}"
    stages = pp if virtual_chunks(values) else 1
    yield from growth.undivided(values, micro * dp, taken, stages)
    if virtual_chunks(values) and pp > 1 and count % pp:
        yield (
            "global_batch_size",
            f"{batch} gives {count} micro-batches, which pipeline_model_parallel_size {pp} with "
            "virtual stages must divide",
        )


def _expert_ranks(values: Values, world_size: int) -> Iterator[Broken]:
    ep, pp = values["expert_model_parallel_size"], values["pipeline_model_parallel_size"]
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if (ep > 1 or values["num_moe_experts"]) and world_size % (ep * expert_tp * pp):
        message = f"{ep} x tensor {expert_tp} x pipeline {pp} does not divide {world_size} ranks"
        name = "expert_model_parallel_size" if ep > 1 else "expert_tensor_parallel_size"
        yield name, message
