"""What of the activations is computed again in the backward pass, where that differs between
pipeline stages and micro-batches.

Names and meanings are FlagScale's. A row is for one or more pipeline stages, one after another:
how many, then pairs of a number of micro-batches and a value. Stages that hold several model chunks
have a row for each: first the first chunks of all stages, then the second. Pure; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg

AUTO = "auto"
GRANULARITY = "recompute_granularity_per_stage_micro_batch"
METHOD = "recompute_method_per_stage_micro_batch"
LAYERS = "recompute_num_layers_per_stage_micro_batch"
NAMES = (GRANULARITY, METHOD, LAYERS)

_METHODS = ("uniform", "block")
_NEEDED = {
    "recompute_method": "uniform or block",
    "recompute_num_layers": "a number of layers, 1 or more",
}
MODULES = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")
"""What selective recomputation can be of, as megatron.core names it."""
_NEEDED_BY_MODULES = {
    "moe": "num_moe_experts",
    "shared_experts": "moe_shared_expert_intermediate_size",
}
_ROW = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})+")


@dataclass(frozen=True)
class Recomputation:
    """What is recomputed; by pipeline stage and micro-batch each argument is a list of rows."""

    recompute_granularity: str | None = arg(
        None,
        "full: layers keep their input alone, as recompute_method and recompute_num_layers say, "
        "and compute the rest again in the backward pass. selective: what recompute_modules names. "
        "auto: full, of as few layers of each stage as fit its devices' memory by calculation",
        choices=("full", "selective", AUTO),
    )
    recompute_memory_gib: float | None = arg(
        None,
        "GiB of a rank that recompute_granularity: auto plans with; without it 93 % of what is "
        "free when training starts",
        minimum=0.001,
    )
    recompute_granularity_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None,
        "Rows of [stages, micro-batches, value, micro-batches, value, ...]: 1 recomputes these "
        "stages' layers in that many micro-batches, as recompute_granularity: full does, 0 keeps "
        "their activations. The stages of all rows are the pipeline's (times virtual stages), the "
        "micro-batches of a row those of a step",
    )
    recompute_method_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Such rows for recompute_method: 0 is uniform, 1 is block"
    )
    recompute_num_layers_per_stage_micro_batch: tuple[str, ...] | None = arg(
        None, "Such rows for recompute_num_layers; 0 recomputes nothing"
    )


@dataclass(frozen=True)
class Choice:
    """How the layers of a model chunk are recomputed: as ``recompute_method`` and
    ``recompute_num_layers`` say it."""

    method: str
    layers: int


Plan = tuple[tuple[Choice | None, ...], ...]
"""A choice for each model chunk and micro-batch, chunks in the order of rows; None: nothing."""


def plan(values: Values, micro_batches: int) -> Plan | None:
    """What arguments that passed the rules say; None where all is treated alike.
    ``micro_batches``: of a step, on one rank."""
    given = {name: _spread(_rows(values[name])) for name in NAMES if values[name] is not None}
    if not given:
        return None
    on, methods, layers = (given.get(name) for name in NAMES)

    def choice(chunk: int, step: int) -> Choice | None:
        number = layers[chunk][step] if layers else values["recompute_num_layers"]
        if number == 0 or (on and on[chunk][step] == 0):
            return None
        method = _METHODS[methods[chunk][step]] if methods else values["recompute_method"]
        return Choice(method, number)

    count = len(next(iter(given.values())))
    return tuple(tuple(choice(chunk, i) for i in range(micro_batches)) for chunk in range(count))


def as_words(rows: Sequence[Any]) -> list[Any]:
    """The words of a YAML's list of lists; what is no list stays, to be judged where it is read."""
    return [",".join(map(str, row)) if isinstance(row, (list, tuple)) else row for row in rows]


def broken(values: Values, chunks: int, *, measured: bool = False) -> Iterator[Broken]:
    """Rules that do not depend on the number of ranks. ``chunks``: model chunks of the pipeline,
    its stages times virtual stages; ``measured``: which layers these have is to be chosen."""
    granularity = values["recompute_granularity"]
    if granularity == AUTO:
        yield from _broken_auto(values, measured=measured)
    if granularity == "full":
        for name, wanted in _NEEDED.items():
            if values[name] is None:
                yield name, f"is needed by recompute_granularity: full: {wanted}"
    yield from _broken_modules(values)
    for name in NAMES:
        if values[name] is None:
            continue
        if granularity != "full":
            found = granularity or "none"
            yield name, f"refines recompute_granularity: full, and that is {found}"
        wrong = [word for word in values[name] if _why_no_row(name, word)]
        if wrong:
            yield name, f"the row [{_bare(wrong[0])}] {_why_no_row(name, wrong[0])}"
        elif (said := sum(row[0] for row in _rows(values[name]))) != chunks:
            yield name, f"its rows are for {said} stages, and the pipeline has {chunks}"


def _broken_modules(values: Values) -> Iterator[Broken]:
    """What selective recomputation names, and what it does not go with."""
    granularity = values["recompute_granularity"]
    if granularity and values["distribute_saved_activations"] and values["sequence_parallel"]:
        message = "true with sequence_parallel, which shares them out already; leave it out"
        yield "distribute_saved_activations", message
    if granularity in ("full", AUTO) and values["moe_layer_recompute"]:
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


def _broken_auto(values: Values, *, measured: bool) -> Iterator[Broken]:
    for name in _NEEDED:
        if values[name] is not None:
            yield name, "recompute_granularity: auto chooses that itself; leave it out"
    if measured:
        message = "auto takes the layers of each stage as given, and here they are chosen, too"
        yield "recompute_granularity", message


def world(
    values: Values, micro_batches: int, layers: Sequence[int] | None, stages: int
) -> Iterator[Broken]:
    """Rules of the number of micro-batches that a rank has in a step.

    Args:
        values: arguments by name.
        micro_batches: that number.
        layers: of each model chunk; None where they are not known here.
        stages: of the pipeline.
    """
    for name in NAMES:
        for row in _rows(values[name] or ()):
            if sum(row[1::2]) != micro_batches:
                message = f"is for {sum(row[1::2])} micro-batches, and a step has {micro_batches}"
                yield name, f"the row [{', '.join(map(str, row))}] {message}"
                return
    if values["recompute_granularity"] == "full" and layers is not None:
        for chunk, why in _uneven(values, plan(values, micro_batches), layers):
            name = "recompute_num_layers" if values[LAYERS] is None else LAYERS
            message = f"{why} of stage {chunk % stages}; recompute_method: block takes any number"
            yield name, message
            return


def _why_no_row(name: str, word: str) -> str | None:
    bare = _bare(word)
    row = [int(number) for number in bare.split(",")] if _ROW.fullmatch(bare) else []
    if len(row) < 3 or len(row) % 2 == 0:
        return "is not [stages, micro-batches, value, micro-batches, value, ...]"
    if min(row[0], *row[1::2]) < 1:
        return "has a number of stages or micro-batches below 1"
    if name != LAYERS and max(row[2::2]) > 1:
        meaning = "0 (uniform) or 1 (block)" if name == METHOD else "0 (keep) or 1 (recompute)"
        return f"has the value {max(row[2::2])}: expected {meaning}"
    return None


def _uneven(
    values: Values, chosen: Plan | None, layers: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Model chunks whose layers do not divide into the units that are recomputed as one, the last
    of which megatron.core would look for beyond the chunk's end."""
    alike = Choice(values["recompute_method"], values["recompute_num_layers"])
    for chunk, own in enumerate(layers):
        for choice in set(chosen[chunk] if chosen else [alike]):
            if choice and choice.method == "uniform" and own % choice.layers:
                yield chunk, f"units of {choice.layers} layers do not divide the {own}"


def _bare(word: str) -> str:
    """A row without brackets and spaces, with which FlagScale's command lines have it."""
    return "".join(word.split()).removeprefix("[").removesuffix("]")


def _rows(words: Sequence[str]) -> list[list[int]]:
    return [[int(number) for number in _bare(word).split(",")] for word in words]


def _spread(rows: Sequence[list[int]]) -> list[list[int]]:
    """The value of each micro-batch, a list for each model chunk."""
    made = []
    for stages, *pairs in rows:
        each = [v for n, v in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
        made += [each] * stages
    return made
