"""Rules of activation recomputation, also if it differs between pipeline stages and micro-batches.

The arguments ``recompute_…_per_stage_micro_batch`` are FlagScale's. Each is a list of rows. A row
applies to one or more consecutive pipeline stages::

    [stages, micro-batches, value, micro-batches, value, ...]

If stages hold several model chunks, there are rows for the first chunks of all stages, then for the
second chunks, and so on. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
_DEFAULT_MODULES = ("core_attn",)
_NEEDED_BY_MODULES = {
    "moe": "num_moe_experts",
    "shared_experts": "moe_shared_expert_intermediate_size",
    "moe_act": "moe_grouped_gemm",
    "mla_up_proj": "multi_latent_attention",
}
_ROW = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})+")


@dataclass(frozen=True)
class RecomputeChoice:
    """Recomputation of the layers of a model chunk: ``recompute_method`` and
    ``recompute_num_layers``."""

    method: str
    layers: int


@dataclass(frozen=True)
class ModuleChoice:
    """Modules that are recomputed in the layers of a model chunk that are not recomputed whole.

    ``modules`` are recomputed in the first ``layers`` layers (None: in all), ``other_modules`` in
    the layers after them.
    """

    modules: tuple[str, ...] = ()
    layers: int | None = None
    other_modules: tuple[str, ...] = ()

    def of_layer(self, index: int) -> tuple[str, ...]:
        """Return the modules to recompute in a layer, by its index in the chunk."""
        is_first = self.layers is None or index < self.layers
        return self.modules if is_first else self.other_modules

    def __bool__(self) -> bool:
        return bool(self.modules or self.other_modules)


NO_MODULES = ModuleChoice()
"""No module is recomputed alone."""


def select_modules(values: Values) -> ModuleChoice:
    """Return the modules that the arguments recompute in every layer."""
    modules: tuple[str, ...] = ()
    if values["recompute_granularity"] == "selective" or values["moe_layer_recompute"]:
        modules = tuple(values["recompute_modules"] or _DEFAULT_MODULES)
    if values["moe_layer_recompute"] and "moe" not in modules:
        modules = (*modules, "moe")
    return ModuleChoice(modules)


def module_choice(args: Any) -> ModuleChoice:
    """Return the modules that are recomputed, from derived arguments."""
    choice: ModuleChoice = args.recomputed_modules
    return choice


RecomputePlan = tuple[tuple[RecomputeChoice | None, ...], ...]
"""A choice for each model chunk (in the order of rows) and micro-batch; None: no recomputation."""


def recompute_plan(values: Values, micro_batches: int) -> RecomputePlan | None:
    """Return the recomputation per model chunk and micro-batch; None if it is the same for all.

    Args:
        values: arguments by name, without violations.
        micro_batches: number of micro-batches per step on one rank.
    """
    tables = {
        name: _expand_rows(_parse_rows(values[name]))
        for name in STAGE_RECOMPUTE
        if values[name] is not None
    }
    if not tables:
        return None
    switches, methods, layers = (tables.get(name) for name in STAGE_RECOMPUTE)

    def choice(chunk: int, step: int) -> RecomputeChoice | None:
        number = layers[chunk][step] if layers else values["recompute_num_layers"]
        if number == 0 or (switches and switches[chunk][step] == 0):
            return None
        method = _METHODS[methods[chunk][step]] if methods else values["recompute_method"]
        return RecomputeChoice(method, number)

    count = len(next(iter(tables.values())))
    return tuple(tuple(choice(chunk, i) for i in range(micro_batches)) for chunk in range(count))


def check_recompute(values: Values, chunks: int, *, measured: bool = False) -> Iterator[Violation]:
    """Check recomputation as far as it does not depend on the number of ranks.

    Args:
        values: arguments by name.
        chunks: number of model chunks of the pipeline: stages times virtual stages.
        measured: the layers of the stages are chosen later, by measurement.
    """
    granularity = values["recompute_granularity"]
    if granularity == RECOMPUTE_AUTO:
        yield from _check_recompute_auto(values, measured=measured)
    if granularity == "full":
        for name, required in _NEEDED.items():
            if values[name] is None:
                yield name, f"is required by recompute_granularity: full; expected {required}"
    yield from _check_recompute_modules(values)
    for name in STAGE_RECOMPUTE:
        if values[name] is None:
            continue
        if granularity != "full":
            yield name, f"requires recompute_granularity: full, found {granularity or 'none'}"
        invalid_rows = [word for word in values[name] if _row_problem(name, word)]
        if invalid_rows:
            problem = _row_problem(name, invalid_rows[0])
            yield name, f"row [{_strip_row(invalid_rows[0])}] {problem}"
        elif (total := sum(row[0] for row in _parse_rows(values[name]))) != chunks:
            yield name, f"expected rows for {chunks} stages, found rows for {total}"


def _check_recompute_modules(values: Values) -> Iterator[Violation]:
    """Check the modules of selective recomputation, and options that it excludes."""
    granularity = values["recompute_granularity"]
    if granularity and values["distribute_saved_activations"] and values["sequence_parallel"]:
        yield (
            "distribute_saved_activations",
            "is not supported with sequence_parallel, which already distributes activations; leave "
            "it out",
        )
    if granularity in ("full", RECOMPUTE_AUTO) and values["moe_layer_recompute"]:
        yield (
            "moe_layer_recompute",
            f"is not supported with recompute_granularity: {granularity}; leave it out",
        )
    if granularity != "selective":
        return
    if values["recompute_num_layers"] is not None:
        yield (
            "recompute_num_layers",
            "is not supported with recompute_granularity: selective, which applies to every layer; "
            "leave it out",
        )
    modules = values["recompute_modules"] or ()
    for name, required in _NEEDED_BY_MODULES.items():
        if name in modules and not values[required]:
            yield "recompute_modules", f"{name} requires {required}; leave it out"
    if "moe" in modules and (inner := sorted({"moe_act", "shared_experts"} & set(modules))):
        yield (
            "recompute_modules",
            f"{inner[0]} is a part of moe, which is recomputed as a whole; leave one out",
        )
    has_shared_experts = values["moe_shared_expert_intermediate_size"]
    recomputes_shared_experts = "shared_experts" in modules and has_shared_experts
    if recomputes_shared_experts and values["moe_shared_expert_overlap"]:
        yield (
            "recompute_modules",
            "shared_experts cannot be combined with moe_shared_expert_overlap; leave one out",
        )


def _check_recompute_auto(values: Values, *, measured: bool) -> Iterator[Violation]:
    for name in _NEEDED:
        if values[name] is not None:
            yield name, "is chosen by recompute_granularity: auto; leave it out"
    if measured:
        yield (
            "recompute_granularity",
            "auto requires the number of layers of each stage, which is chosen by measurement here",
        )


def check_recompute_steps(
    values: Values, micro_batches: int, layers: Sequence[int] | None, stages: int
) -> Iterator[Violation]:
    """Check recomputation against the number of micro-batches per step.

    Args:
        values: arguments by name.
        micro_batches: number of micro-batches per step on one rank.
        layers: number of layers of each model chunk, in the order of rows; None if unknown.
        stages: number of pipeline stages.
    """
    for name in STAGE_RECOMPUTE:
        for row in _parse_rows(values[name] or ()):
            if sum(row[1::2]) != micro_batches:
                yield (
                    name,
                    f"row [{', '.join(map(str, row))}]: expected {micro_batches} micro-batches (a "
                    f"step), found {sum(row[1::2])}",
                )
                return
    if values["recompute_granularity"] == "full" and layers is not None:
        for chunk, why in _uneven_chunks(values, recompute_plan(values, micro_batches), layers):
            name = "recompute_num_layers" if values[STAGE_LAYERS] is None else STAGE_LAYERS
            yield (
                name,
                f"stage {chunk % stages}: {why}; recompute_method: block supports any number",
            )
            return


def _row_problem(name: str, word: str) -> str | None:
    """Return the problem of a row, as the end of a message; None if the row is valid."""
    bare = _strip_row(word)
    row = [int(number) for number in bare.split(",")] if _ROW.fullmatch(bare) else []
    if len(row) < 3 or len(row) % 2 == 0:
        return "is not [stages, micro-batches, value, micro-batches, value, ...]"
    if min(row[0], *row[1::2]) < 1:
        return "has a number of stages or micro-batches below 1"
    if name != STAGE_LAYERS and max(row[2::2]) > 1:
        expected = (
            "0 (uniform) or 1 (block)" if name == STAGE_METHOD else "0 (keep) or 1 (recompute)"
        )
        return f"has the value {max(row[2::2])}, expected {expected}"
    return None


def _uneven_chunks(
    values: Values, plan: RecomputePlan | None, layers: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Yield the model chunks whose layers are not divisible by the unit of ``recompute_method:
    uniform``, with the problem. megatron.core would read layers beyond the end of the chunk."""
    common_choice = RecomputeChoice(values["recompute_method"], values["recompute_num_layers"])
    for chunk, chunk_layers in enumerate(layers):
        for choice in set(plan[chunk] if plan else [common_choice]):
            if choice and choice.method == "uniform" and chunk_layers % choice.layers:
                yield chunk, f"{chunk_layers} layers are not divisible by {choice.layers}"


def _strip_row(word: str) -> str:
    """Remove the brackets and spaces that rows have on FlagScale's command lines."""
    return "".join(word.split()).removeprefix("[").removesuffix("]")


def _parse_rows(words: Sequence[str]) -> list[list[int]]:
    return [[int(number) for number in _strip_row(word).split(",")] for word in words]


def _expand_rows(rows: Sequence[list[int]]) -> list[list[int]]:
    """Return, for each model chunk, the value of each micro-batch."""
    expanded = []
    for stages, *pairs in rows:
        row_values = [
            value
            for count, value in zip(pairs[::2], pairs[1::2], strict=True)
            for _ in range(count)
        ]
        expanded += [row_values] * stages
    return expanded
