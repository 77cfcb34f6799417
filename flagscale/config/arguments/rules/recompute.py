"""Rules of recomputation, also where it differs between pipeline stages and micro-batches.

Names and meanings are FlagScale's. A row is for one or more pipeline stages, one after another: how
many, then pairs of a number of micro-batches and a value. Stages that hold several model chunks
have a row for each: first the first chunks of all stages, then the second. Pure; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    RECOMPUTE_AUTO,
    STAGE_LAYERS,
    STAGE_METHOD,
    STAGE_RECOMPUTE,
)

_METHODS = ("uniform", "block")
_NEEDED = {
    "recompute_method": "uniform or block",
    "recompute_num_layers": "a number of layers, 1 or more",
}
_NEEDED_BY_MODULES = {
    "moe": "num_moe_experts",
    "shared_experts": "moe_shared_expert_intermediate_size",
}
_ROW = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})+")


@dataclass(frozen=True)
class RecomputeChoice:
    """Recomputation of a model chunk's layers, as ``recompute_method`` and ``recompute_num_layers``
    define it."""

    method: str
    layers: int


RecomputePlan = tuple[tuple[RecomputeChoice | None, ...], ...]
"""A choice for each model chunk and micro-batch, chunks in the order of rows; None: nothing."""


def recompute_plan(values: Values, micro_batches: int) -> RecomputePlan | None:
    """Return the recomputation per model chunk and micro-batch, from arguments that passed the
    rules; None if all are equal. ``micro_batches`` is the number per step on one rank."""
    tables = {
        name: _expand_rows(_parse_rows(values[name]))
        for name in STAGE_RECOMPUTE
        if values[name] is not None
    }
    if not tables:
        return None
    on, methods, layers = (tables.get(name) for name in STAGE_RECOMPUTE)

    def choice(chunk: int, step: int) -> RecomputeChoice | None:
        number = layers[chunk][step] if layers else values["recompute_num_layers"]
        if number == 0 or (on and on[chunk][step] == 0):
            return None
        method = _METHODS[methods[chunk][step]] if methods else values["recompute_method"]
        return RecomputeChoice(method, number)

    count = len(next(iter(tables.values())))
    return tuple(tuple(choice(chunk, i) for i in range(micro_batches)) for chunk in range(count))


def check_recompute(values: Values, chunks: int, *, measured: bool = False) -> Iterator[Violation]:
    """Rules that do not depend on the number of ranks. ``chunks``: model chunks of the pipeline,
    its stages times virtual stages; ``measured``: which layers these have is to be chosen."""
    granularity = values["recompute_granularity"]
    if granularity == RECOMPUTE_AUTO:
        yield from _check_recompute_auto(values, measured=measured)
    if granularity == "full":
        for name, required in _NEEDED.items():
            if values[name] is None:
                yield name, f"is needed by recompute_granularity: full: {required}"
    yield from _check_recompute_modules(values)
    for name in STAGE_RECOMPUTE:
        if values[name] is None:
            continue
        if granularity != "full":
            actual = granularity or "none"
            yield name, f"refines recompute_granularity: full, and that is {actual}"
        wrong = [word for word in values[name] if _why_bad_row(name, word)]
        if wrong:
            yield name, f"the row [{_strip_row(wrong[0])}] {_why_bad_row(name, wrong[0])}"
        elif (total := sum(row[0] for row in _parse_rows(values[name]))) != chunks:
            yield name, f"its rows are for {total} stages, and the pipeline has {chunks}"


def _check_recompute_modules(values: Values) -> Iterator[Violation]:
    """Check the modules of selective recomputation, and options that it excludes."""
    granularity = values["recompute_granularity"]
    if granularity and values["distribute_saved_activations"] and values["sequence_parallel"]:
        message = "true with sequence_parallel, which shares them out already; leave it out"
        yield "distribute_saved_activations", message
    if granularity in ("full", RECOMPUTE_AUTO) and values["moe_layer_recompute"]:
        yield "moe_layer_recompute", f"true with recompute_granularity {granularity}; leave it out"
    if granularity != "selective":
        return
    if values["recompute_num_layers"] is not None:
        message = f"{values['recompute_num_layers']} with recompute_granularity selective, which "
        yield "recompute_num_layers", message + "is of every layer; leave it out"
    named = values["recompute_modules"] or ()
    for name, needed in _NEEDED_BY_MODULES.items():
        if name in named and not values[needed]:
            yield "recompute_modules", f"{name} needs {needed}; leave it out"
    shared = "shared_experts" in named and values["moe_shared_expert_intermediate_size"]
    if shared and values["moe_shared_expert_overlap"]:
        message = "shared_experts with moe_shared_expert_overlap; leave one of them out"
        yield "recompute_modules", message


def _check_recompute_auto(values: Values, *, measured: bool) -> Iterator[Violation]:
    for name in _NEEDED:
        if values[name] is not None:
            yield name, "recompute_granularity: auto chooses that itself; leave it out"
    if measured:
        message = "auto takes the layers of each stage as given, and here they are chosen, too"
        yield "recompute_granularity", message


def check_recompute_steps(
    values: Values, micro_batches: int, layers: Sequence[int] | None, stages: int
) -> Iterator[Violation]:
    """Rules of the number of micro-batches that a rank has in a step.

    Args:
        values: arguments by name.
        micro_batches: that number.
        layers: of each model chunk; None where they are not known here.
        stages: of the pipeline.
    """
    for name in STAGE_RECOMPUTE:
        for row in _parse_rows(values[name] or ()):
            if sum(row[1::2]) != micro_batches:
                message = f"is for {sum(row[1::2])} micro-batches, and a step has {micro_batches}"
                yield name, f"the row [{', '.join(map(str, row))}] {message}"
                return
    if values["recompute_granularity"] == "full" and layers is not None:
        for chunk, why in _uneven_chunks(values, recompute_plan(values, micro_batches), layers):
            name = "recompute_num_layers" if values[STAGE_LAYERS] is None else STAGE_LAYERS
            message = f"{why} of stage {chunk % stages}; recompute_method: block takes any number"
            yield name, message
            return


def _why_bad_row(name: str, word: str) -> str | None:
    bare = _strip_row(word)
    row = [int(number) for number in bare.split(",")] if _ROW.fullmatch(bare) else []
    if len(row) < 3 or len(row) % 2 == 0:
        return "is not [stages, micro-batches, value, micro-batches, value, ...]"
    if min(row[0], *row[1::2]) < 1:
        return "has a number of stages or micro-batches below 1"
    if name != STAGE_LAYERS and max(row[2::2]) > 1:
        meaning = (
            "0 (uniform) or 1 (block)" if name == STAGE_METHOD else "0 (keep) or 1 (recompute)"
        )
        return f"has the value {max(row[2::2])}: expected {meaning}"
    return None


def _uneven_chunks(
    values: Values, chosen: RecomputePlan | None, layers: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Model chunks whose layers do not divide into the units that are recomputed as one, the last
    of which megatron.core would look for beyond the chunk's end."""
    alike = RecomputeChoice(values["recompute_method"], values["recompute_num_layers"])
    for chunk, stage_layers in enumerate(layers):
        for choice in set(chosen[chunk] if chosen else [alike]):
            if choice and choice.method == "uniform" and stage_layers % choice.layers:
                yield chunk, f"units of {choice.layers} layers do not divide the {stage_layers}"


def _strip_row(word: str) -> str:
    """A row without brackets and spaces, with which FlagScale's command lines have it."""
    return "".join(word.split()).removeprefix("[").removesuffix("]")


def _parse_rows(words: Sequence[str]) -> list[list[int]]:
    return [[int(number) for number in _strip_row(word).split(",")] for word in words]


def _expand_rows(rows: Sequence[list[int]]) -> list[list[int]]:
    """The value of each micro-batch, a list for each model chunk."""
    expanded = []
    for stages, *pairs in rows:
        each = [v for n, v in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
        expanded += [each] * stages
    return expanded
