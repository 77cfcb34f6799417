"""Rules of the parallel sizes of homogeneous ranks: tensor, context, pipeline, expert and data.

``values`` are arguments by name. Heterogeneous training applies these rules to each mesh
(:mod:`flagscale.config.arguments.layout`). *Virtual stages* or *model chunks* are the parts of a
model that one stage holds in megatron.core's interleaved pipeline schedule.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from flagscale.config.arguments.rules.context_parallel import check_context_parallel
from flagscale.config.arguments.rules.optimizer import check_rampup_sizes
from flagscale.config.arguments.spec.argument import Values, Violation

_PIPELINE_LAYOUT = "pipeline_model_parallel_layout"
_END_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_REPEATED = re.compile(r"\(([^()]+)\)\*(\d+)|(\w)\*(\d+)")


@dataclass(frozen=True)
class Pipeline:
    """Number of stages of a pipeline, and of model chunks per stage."""

    stages: int = 1
    chunks: int = 1

    @property
    def round_size(self) -> int:
        """Number by which the number of micro-batches in a step must be divisible."""
        return self.stages if self.chunks > 1 else 1

    def step_passes(self, count: int) -> int:
        """Return the duration of a step of ``count`` micro-batches, in forward-backward passes of
        one chunk. It includes the time to fill and drain the pipeline."""
        return self.chunks * count + self.stages - 1

    def max_microbatches(self, passes: int) -> int:
        """Return the largest valid number of micro-batches in a step that takes at most ``passes``
        forward-backward passes of one chunk."""
        count = max(passes - self.stages + 1, 0) // self.chunks
        return count - count % self.round_size


ONE_STAGE = Pipeline()


def pipeline_of(values: Values) -> Pipeline:
    """Return the pipeline that arguments describe."""
    return Pipeline(values["pipeline_model_parallel_size"], virtual_chunks(values) or 1)


def virtual_chunks(values: Values) -> int | None:
    """Return the number of model chunks per pipeline rank, which any of three arguments sets; None
    without the interleaved schedule."""
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
    """Expand the repetitions in a layout of megatron.core: ``Et*2|(tt|)*2`` is ``Ett|tt|tt|``."""
    text, before = layout.replace(",", ""), ""
    while text != before:
        before = text
        text = _REPEATED.sub(lambda match: (match[1] or match[3]) * int(match[2] or match[4]), text)
    return text


def check_pipeline(values: Values) -> Iterator[Violation]:
    """Check the arguments that assign layers to stages, and overlapped communication of stages."""
    overlaps = values["overlap_p2p_comm"] and not values["batch_p2p_comm"]
    if values["overlap_p2p_comm_warmup_flush"] and not (overlaps or virtual_chunks(values)):
        yield (
            "overlap_p2p_comm_warmup_flush",
            "requires overlap_p2p_comm: true and batch_p2p_comm: false; leave it out",
        )
    end_stages = [name for name in _END_STAGES if values[name] is not None]
    counted_ends = [name for name in _COUNTED_ENDS if values[name]]
    if values[_PIPELINE_LAYOUT] is not None:
        for name in (*end_stages, *counted_ends):
            yield name, f"cannot be combined with {_PIPELINE_LAYOUT}; leave one out"
        yield from _check_pipeline_layout(values)
        return
    if end_stages and counted_ends:
        yield counted_ends[0], f"cannot be combined with {end_stages[0]}; leave one out"
    chunks = virtual_chunks(values) or 1
    for name in end_stages:
        if values[name] % chunks:
            yield name, f"{values[name]} is not divisible by {chunks} virtual stages"


def _check_pipeline_layout(values: Values) -> Iterator[Violation]:
    parts, layout = layout_of_chunks(values), values[_PIPELINE_LAYOUT]
    stages, chunks = values["pipeline_model_parallel_size"], virtual_chunks(values) or 1
    letters = "".join(parts)
    if set(letters) - set("EtmL") or not re.fullmatch("E[^EL]*L", letters):
        yield (
            _PIPELINE_LAYOUT,
            "expected E (embedding) first, t (layer) or m (multi-token prediction layer), L (loss) "
            f"last, and | between stages, such as Et*3|t*4|t*3L; found {layout}",
        )
    elif len(parts) != stages * chunks:
        expected = f"pipeline_model_parallel_size {stages}" + (
            f" x {chunks} virtual stages" if chunks > 1 else ""
        )
        yield _PIPELINE_LAYOUT, f"expected {expected}, found {len(parts)} stages in {layout}"
    elif letters.count("t") != values["num_layers"]:
        yield (
            _PIPELINE_LAYOUT,
            f"expected num_layers {values['num_layers']} t, found {letters.count('t')} in {layout}",
        )


def check_shape(values: Values) -> Iterator[Violation]:
    yield from check_tensor_parallel(values)
    yield from check_context_parallel(values)
    yield from _check_expert_layout(values)


def check_tensor_parallel(values: Values) -> Iterator[Violation]:
    tp, heads = values["tensor_model_parallel_size"], values["num_attention_heads"]
    groups, hidden = values["num_query_groups"], values["hidden_size"]
    if heads % tp:
        yield _indivisible(values, "num_attention_heads", "tensor_model_parallel_size")
    if groups is not None:
        if heads % groups:
            yield "num_query_groups", f"{groups} does not divide num_attention_heads {heads}"
        elif groups % tp:
            yield _indivisible(values, "num_query_groups", "tensor_model_parallel_size")
    if values["kv_channels"] is None and hidden % heads:
        yield _indivisible(values, "hidden_size", "num_attention_heads")
    if values["ffn_hidden_size"] is not None and values["ffn_hidden_size"] % tp:
        yield _indivisible(values, "ffn_hidden_size", "tensor_model_parallel_size")
    if values["sequence_parallel"] and values["seq_length"] % tp:
        yield _indivisible(values, "seq_length", "tensor_model_parallel_size")


def can_split_tensors(values: Values, tp: int) -> bool:
    """Return whether tensor-parallel size ``tp`` divides the model and, with sequence parallelism,
    its sequences."""
    ffn_width = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    changes = {
        "tensor_model_parallel_size": tp,
        "ffn_hidden_size": ffn_width,
        "sequence_parallel": True,
    }
    return not any(check_tensor_parallel({**values, **changes}))


def _indivisible(values: Values, name: str, divisor: str) -> Violation:
    return name, f"{values[name]} is not divisible by {divisor} {values[divisor]}"


def check_pipeline_parallel(values: Values) -> Iterator[Violation]:
    pp = values["pipeline_model_parallel_size"]
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    chunks = virtual_chunks(values)
    yield from check_pipeline(values)
    if per_stage is not None and values["num_layers"] % (pp * per_stage):
        yield (
            "num_layers_per_virtual_pipeline_stage",
            f"num_layers {values['num_layers']} is not divisible by {per_stage} x "
            f"pipeline_model_parallel_size {pp}",
        )
    elif values["pipeline_model_parallel_layout"] is None:
        yield from _check_layers(values, pp, chunks or 1)
    if chunks is not None and pp == 1:
        yield (
            "pipeline_model_parallel_size",
            f"must be at least 2 with {chunks} virtual stages, found 1",
        )


def _check_layers(values: Values, stages: int, chunks: int) -> Iterator[Violation]:
    """Check that layers divide evenly over the stages whose number of layers is not given.

    The embedding or the loss counts as a layer if ``account_for_…_in_pipeline_split`` is set.
    """
    layers = values["num_layers"]
    layers += bool(values["account_for_embedding_in_pipeline_split"])
    layers += bool(values["account_for_loss_in_pipeline_split"])
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    fixed = [values[name] for name in ends if values[name] is not None]
    remaining, free_stages = layers - sum(fixed), stages - len(fixed)
    if free_stages < 0 or remaining < 0 or (free_stages == 0 and remaining > 0):
        yield (
            "num_layers",
            f"{sum(fixed)} layers are assigned to {len(fixed)} of {stages} stages, but num_layers "
            f"is {layers}",
        )
    elif free_stages and remaining % (free_stages * chunks):
        chunk_text = f" x {chunks} virtual stages" if chunks > 1 else ""
        yield (
            "num_layers",
            f"{remaining} layers are not divisible by {free_stages} pipeline stages{chunk_text}",
        )


def _check_expert_layout(values: Values) -> Iterator[Violation]:
    ep, experts = values["expert_model_parallel_size"], values["num_moe_experts"]
    if ep > 1 and not experts:
        yield "expert_model_parallel_size", f"{ep} requires num_moe_experts"
    elif experts and experts % ep:
        yield _indivisible(values, "num_moe_experts", "expert_model_parallel_size")
    tp = values["tensor_model_parallel_size"]
    if experts and tp > 1 and not values["sequence_parallel"]:
        yield (
            "sequence_parallel",
            f"must be true with num_moe_experts and tensor_model_parallel_size {tp}",
        )
    if values["moe_grouped_gemm"] and not experts:
        yield "moe_grouped_gemm", "requires num_moe_experts"
    elif values["moe_grouped_gemm"] and values["add_bias_linear"]:
        yield "moe_grouped_gemm", "requires disable_bias_linear: true"
    experts_tp = values["expert_tensor_parallel_size"] or tp
    if experts and values["add_bias_linear"] and experts_tp > 1 and not values["moe_grouped_gemm"]:
        yield (
            "add_bias_linear",
            f"is not supported by experts that are split over {experts_tp} tensor-parallel ranks; "
            "set disable_bias_linear: true, or expert_tensor_parallel_size: 1",
        )
    if experts and values["moe_token_dispatcher_type"] == "flex" and experts_tp * ep == 1:
        yield (
            "moe_token_dispatcher_type",
            "flex requires expert_model_parallel_size or expert_tensor_parallel_size above 1; use "
            "alltoall",
        )
    pattern, layers = values["moe_layer_freq"], values["num_layers"]
    if experts and isinstance(pattern, list) and len(pattern) != layers:
        yield (
            "moe_layer_freq",
            f"expected one item per layer (num_layers {layers}), found {len(pattern)}",
        )
    elif pattern == 0:
        yield (
            "moe_layer_freq",
            "expected n (every n-th layer has experts) or a list, found 0",
        )


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
    slice_text = f"micro_batch_size {micro} x data-parallel size {dp}"
    stages = pp if virtual_chunks(values) else 1
    yield from check_rampup_sizes(values, micro * dp, slice_text, stages)
    if virtual_chunks(values) and pp > 1 and count % pp:
        yield (
            "global_batch_size",
            f"{batch} has {count} micro-batches, which is not divisible by "
            f"pipeline_model_parallel_size {pp}, as virtual stages require",
        )


def check_expert_ranks(values: Values, world_size: int) -> Iterator[Violation]:
    ep, pp = values["expert_model_parallel_size"], values["pipeline_model_parallel_size"]
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if (ep > 1 or values["num_moe_experts"]) and world_size % (ep * expert_tp * pp):
        name = "expert_model_parallel_size" if ep > 1 else "expert_tensor_parallel_size"
        yield (
            name,
            f"{world_size} ranks are not divisible by expert-parallel size {ep} x expert "
            f"tensor-parallel size {expert_tp} x pipeline-parallel size {pp}",
        )


def check_interleaving(values: Values, names: Collection[str]) -> Iterator[Violation]:
    """Check that a YAML does not contradict the options that the interleaved schedule requires and
    the training program sets. ``names``: arguments that the YAML gives."""
    if not (values["num_layers"] and virtual_chunks(values)):
        return
    reason = "virtual stages would receive each other's tensors"
    if "overlap_p2p_comm" in names and not values["overlap_p2p_comm"]:
        yield "overlap_p2p_comm", f"must be true: otherwise {reason}"
    if "batch_p2p_comm" in names and values["batch_p2p_comm"]:
        yield "batch_p2p_comm", f"must be false: otherwise {reason}"
