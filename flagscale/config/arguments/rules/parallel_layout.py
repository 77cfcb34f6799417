"""Rules of the parallel sizes of homogeneous ranks: tensor, context, pipeline, expert and data
parallel.

``values`` are arguments by name. Heterogeneous training applies these rules to each mesh
(:mod:`flagscale.config.arguments.layout`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from flagscale.config.arguments.rules.schedule import check_rampup_sizes
from flagscale.config.arguments.spec.argument import Values, Violation

_PIPELINE_LAYOUT = "pipeline_model_parallel_layout"
_END_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_REPEATED = re.compile(r"\(([^()]+)\)\*(\d+)|(\w)\*(\d+)")


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and the model chunks that each holds (the interleaved
    schedule's)."""

    stages: int = 1
    chunks: int = 1

    @property
    def round(self) -> int:
        """Divisor of the number of micro-batches in a step."""
        return self.stages if self.chunks > 1 else 1

    def passes(self, count: int) -> int:
        """Return the duration of a step of ``count`` micro-batches, in forward-backward passes of
        one chunk. It includes the time to fill and drain the pipeline."""
        return self.chunks * count + self.stages - 1

    def most(self, passes: int) -> int:
        """The most micro-batches, a multiple of the round, that are done in so many passes."""
        count = max(passes - self.stages + 1, 0) // self.chunks
        return count - count % self.round


ONE_STAGE = Pipeline()


def pipeline_of(values: Values) -> Pipeline:
    """The pipeline that arguments describe, by name."""
    return Pipeline(values["pipeline_model_parallel_size"], virtual_chunks(values) or 1)


def virtual_chunks(values: Values) -> int | None:
    """Model chunks a pipeline rank holds, whichever of three arguments says so; None: one."""
    pp = values["pipeline_model_parallel_size"]
    layers = values["num_layers_per_virtual_pipeline_stage"]
    chunks = values["num_virtual_stages_per_pipeline_rank"]
    if layers is not None:
        chunks = values["num_layers"] // (pp * layers)
    chunks = chunks or values["virtual_pipeline_model_parallel_size"]
    return None if chunks in (None, 1) else int(chunks)


def layers_of_stages(values: Values) -> list[tuple[int, ...]]:
    """Return the number of layers of each model chunk, for each stage of homogeneous ranks."""
    stages, chunks = values["pipeline_model_parallel_size"], virtual_chunks(values) or 1
    if values["pipeline_model_parallel_layout"] is not None:
        parts = layout_of_chunks(values)
        counts = [part.count("t") for part in parts]
        return [tuple(counts[index::stages]) for index in range(stages)]
    first = int(values["account_for_embedding_in_pipeline_split"])
    last = int(values["account_for_loss_in_pipeline_split"])
    ends = {
        0: values["num_layers_in_first_pipeline_stage"],
        stages - 1: values["num_layers_in_last_pipeline_stage"],
    }
    fixed = {index: count for index, count in ends.items() if count is not None}
    remaining = values["num_layers"] + first + last - sum(fixed.values())
    each = remaining // max(stages - len(fixed), 1)
    layers = [[fixed.get(index, each) // chunks] * chunks for index in range(stages)]
    layers[0][0] -= first
    layers[-1][-1] -= last
    return [tuple(counts) for counts in layers]


def layout_of_chunks(values: Values) -> list[str]:
    """Return the letters of each chunk of an explicit pipeline layout, in the order of the
    layers."""
    return _expand_layout(str(values["pipeline_model_parallel_layout"])).split("|")


def _expand_layout(layout: str) -> str:
    """megatron.core's layout without its abbreviations: ``Et*2|(tt|)*2`` is ``Ett|tt|tt|``."""
    text, before = layout.replace(",", ""), ""
    while text != before:
        before = text
        text = _REPEATED.sub(lambda match: (match[1] or match[3]) * int(match[2] or match[4]), text)
    return text


def check_pipeline(values: Values) -> Iterator[Violation]:
    """Ways to share out layers that exclude each other, a layout by hand that is none, and what
    only stages of several chunks can exchange."""
    apart = values["overlap_p2p_comm"] and not values["batch_p2p_comm"]
    if values["overlap_p2p_comm_warmup_flush"] and not (apart or virtual_chunks(values)):
        message = "true needs overlap_p2p_comm, and batch_p2p_comm: false; leave it out"
        yield "overlap_p2p_comm_warmup_flush", message
    ends = [name for name in _END_STAGES if values[name] is not None]
    counted = [name for name in _COUNTED_ENDS if values[name]]
    if values[_PIPELINE_LAYOUT] is not None:
        for name in (*ends, *counted):
            yield (
                name,
                f"{values[name]} with {_PIPELINE_LAYOUT}, which names the layers of every stage",
            )
        yield from _check_pipeline_layout(values)
        return
    if ends and counted:
        message = f"true with {ends[0]} {values[ends[0]]}: leave one of them out"
        yield counted[0], message
    chunks = virtual_chunks(values) or 1
    for name in ends:
        if values[name] % chunks:
            yield name, f"{values[name]} does not divide into {chunks} virtual stages"


def _check_pipeline_layout(values: Values) -> Iterator[Violation]:
    parts, layout = layout_of_chunks(values), values[_PIPELINE_LAYOUT]
    stages, chunks = values["pipeline_model_parallel_size"], virtual_chunks(values) or 1
    letters = "".join(parts)
    if set(letters) - set("EtmL") or not re.fullmatch("E[^EL]*L", letters):
        yield (
            _PIPELINE_LAYOUT,
            f"{layout}: expected E (the embedding) first, t (a layer) or m (of mtp_num_layers), L "
            "(the loss) last, and | between stages, such as Et*3|t*4|t*3L",
        )
    elif len(parts) != stages * chunks:
        expected = f"pipeline_model_parallel_size {stages}" + (
            f" x {chunks} virtual stages" if chunks > 1 else ""
        )
        yield _PIPELINE_LAYOUT, f"{layout} has {len(parts)} stages, expected {expected}"
    elif letters.count("t") != values["num_layers"]:
        message = f"{layout} has {letters.count('t')} t, but num_layers is {values['num_layers']}"
        yield _PIPELINE_LAYOUT, message


def check_shape(values: Values) -> Iterator[Violation]:
    yield from check_tensor_parallel(values)
    yield from _check_context_parallel(values)
    yield from _check_expert_layout(values)


def check_tensor_parallel(values: Values) -> Iterator[Violation]:
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


def can_split_tensors(values: Values, tp: int) -> bool:
    """Return whether this tensor-parallel size divides the model and, with sequence parallelism,
    its sequences."""
    wide = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    changes = {"tensor_model_parallel_size": tp, "ffn_hidden_size": wide, "sequence_parallel": True}
    return not any(check_tensor_parallel({**values, **changes}))


def _indivisible(values: Values, name: str, by: str) -> Violation:
    return name, f"{values[name]} is not divisible by {by} {values[by]}"


def _check_context_parallel(values: Values) -> Iterator[Violation]:
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


def check_pipeline_parallel(values: Values) -> Iterator[Violation]:
    pp = values["pipeline_model_parallel_size"]
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    chunks = virtual_chunks(values)
    yield from check_pipeline(values)
    if per_stage is not None and values["num_layers"] % (pp * per_stage):
        by = f"{per_stage} x pipeline_model_parallel_size {pp}"
        message = f"{values['num_layers']} layers do not divide into {by}"
        yield "num_layers_per_virtual_pipeline_stage", message
    elif values["pipeline_model_parallel_layout"] is None:
        yield from _check_layers(values, pp, chunks or 1)
    if chunks is not None and pp == 1:
        message = f"{chunks} virtual stages need a pipeline of at least 2"
        yield "pipeline_model_parallel_size", message


def _check_layers(values: Values, pp: int, chunks: int) -> Iterator[Violation]:
    """Layers divide evenly over the stages whose share is not given."""
    layers, stages = values["num_layers"], pp
    layers += bool(values["account_for_embedding_in_pipeline_split"])
    layers += bool(values["account_for_loss_in_pipeline_split"])
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    fixed = [values[name] for name in ends if values[name] is not None]
    remaining, free_stages = layers - sum(fixed), stages - len(fixed)
    if free_stages < 0 or remaining < 0 or (free_stages == 0 and remaining > 0):
        shared = f"{sum(fixed)} of {layers} layers are given to {len(fixed)} of {stages} stages"
        yield "num_layers", shared
    elif free_stages and remaining % (free_stages * chunks):
        each = f"{free_stages} pipeline stages" + (f" x {chunks} virtual" if chunks > 1 else "")
        yield "num_layers", f"{remaining} layers do not divide into {each}"


def _check_expert_layout(values: Values) -> Iterator[Violation]:
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


def check_batches(values: Values, dp: int) -> Iterator[Violation]:
    micro, batch = values["micro_batch_size"], values["global_batch_size"]
    batch = micro * dp if batch is None else batch
    if batch % (micro * dp):
        yield (
            "global_batch_size",
            f"{batch} is not divisible by micro_batch_size {micro} x data-parallel size {dp}",
        )
        return
    pp, count = values["pipeline_model_parallel_size"], batch // (micro * dp)
    product = f"micro_batch_size {micro} x data-parallel size {dp}"
    stages = pp if virtual_chunks(values) else 1
    yield from check_rampup_sizes(values, micro * dp, product, stages)
    if virtual_chunks(values) and pp > 1 and count % pp:
        yield (
            "global_batch_size",
            f"{batch} gives {count} micro-batches, which pipeline_model_parallel_size {pp} with "
            "virtual stages must divide",
        )


def check_expert_ranks(values: Values, world_size: int) -> Iterator[Violation]:
    ep, pp = values["expert_model_parallel_size"], values["pipeline_model_parallel_size"]
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if (ep > 1 or values["num_moe_experts"]) and world_size % (ep * expert_tp * pp):
        message = f"{ep} x tensor {expert_tp} x pipeline {pp} does not divide {world_size} ranks"
        name = "expert_model_parallel_size" if ep > 1 else "expert_tensor_parallel_size"
        yield name, message


def check_interleaving(values: Values, names: Collection[str]) -> Iterator[Violation]:
    """Check that a YAML does not ask for the opposite of the options that interleaving needs, which
    the training program sets itself. ``given``: arguments that the YAML has."""
    if not (values["num_layers"] and virtual_chunks(values)):
        return
    reason = "stages that hold several model chunks would get each other's tensors"
    if "overlap_p2p_comm" in names and not values["overlap_p2p_comm"]:
        yield "overlap_p2p_comm", f"must be true: otherwise {reason}"
    if "batch_p2p_comm" in names and values["batch_p2p_comm"]:
        yield "batch_p2p_comm", f"must be false: otherwise {reason}"
