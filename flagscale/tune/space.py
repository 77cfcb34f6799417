"""All layouts that the rules allow, and those of them that fit.

A layout is legal if the checks of every launch accept it (:mod:`flagscale.config.arguments.check`
and :mod:`~flagscale.config.arguments.layout`). Of those, a layout is a candidate if its calculated
memory fits and no layout that saves less memory in the same way fits as well.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from flagscale.config.arguments.check import RepeatedCheck, apply_substitutions
from flagscale.config.arguments.derive import change_layout, derive_arguments
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.config.arguments.layout_choices import (
    CHOICES,
    CHOSEN_ARGUMENTS,
    CP,
    DERIVED_KEYS,
    EP,
    EXPERT_TP,
    MICRO_BATCH,
    RECOMPUTED,
    SAVING_ARGUMENTS,
    SEQUENCE_PARALLEL,
    TP,
    ChoiceContext,
    RequestedValues,
    enumerate_savings,
    enumerate_settings,
    neutral_settings,
)
from flagscale.config.arguments.rules.optimizer import drop_unused_schedule
from flagscale.config.arguments.spec.argument import Values
from flagscale.estimate.forecast import hidden_offload_fraction, list_module_levels
from flagscale.estimate.plan import GIB
from flagscale.tune.machine import Machine
from flagscale.tune.prediction import (
    PredictedMemory,
    Prediction,
    predict_layer_seconds,
    predict_memory,
    predict_seconds,
)


@dataclass(frozen=True)
class SearchProblem:
    """Inputs of a search.

    ``values`` are the experiment's arguments with ``global_batch_size`` set: the search does not
    change it. ``requested`` are values to which a user restricts arguments. ``memory_fractions``
    are the least and the largest fraction of a device's memory that the calculation may fill.
    """

    values: Values
    machine: Machine
    vocabulary_size: int
    requested: RequestedValues = field(default_factory=dict)
    memory_fractions: tuple[float, float] | None = None

    @cached_property
    def neutral(self) -> Values:
        """Arguments of a layout in which one rank holds the whole model."""
        values = {**self.values, **neutral_settings()}
        return apply_substitutions(drop_unused_schedule(values))

    @cached_property
    def rules(self) -> RepeatedCheck:
        return RepeatedCheck(self.neutral, CHOSEN_ARGUMENTS, self.machine.ranks)

    @cached_property
    def derived(self) -> Namespace:
        """Resolved arguments of the neutral layout, to which a layout's sizes are applied."""
        # The rules are applied to each layout; here one rank is enough.
        batch = self.values["global_batch_size"]
        neutral = {**self.neutral, "micro_batch_size": 1}
        args = derive_arguments(Namespace(**neutral), 1)
        args.global_batch_size = batch
        return args

    @cached_property
    def choice_context(self) -> ChoiceContext:
        """Inputs of the choices, for the neutral layout."""
        return ChoiceContext(
            self.neutral,
            self.machine.ranks,
            self.values,
            self.requested,
            tuple(list_module_levels(self.derived)),
            hidden_offload_fraction(self.derived) if self.machine.cores is None else 0.0,
        )

    def resolve(self, setting: Mapping[str, Any]) -> Namespace:
        """Return the resolved arguments of a layout."""
        return change_layout(self.derived, setting, self.machine.ranks)

    def predict_memory(self, setting: Mapping[str, Any]) -> PredictedMemory:
        """Return the memory of a layout."""
        args = self.resolve(setting)
        return predict_memory(args, self._padded_vocabulary(args), self.machine)

    def predict_seconds(self, setting: Mapping[str, Any]) -> dict[str, float]:
        """Return the seconds of a step of a layout by cause."""
        args = self.resolve(setting)
        return predict_seconds(args, self._padded_vocabulary(args), self.machine)

    def _padded_vocabulary(self, args: Namespace) -> int:
        return pad_vocabulary(self.vocabulary_size, vars(args)) if self.vocabulary_size else 0

    def lower_bound(self, setting: Mapping[str, Any]) -> float:
        """Return the predicted seconds that a step takes at least: the passes of its layers, and
        the idle time of a pipeline that fills and drains. Zero if ranks share the cores of a CPU.
        """
        if self.machine.cores is not None:
            return 0.0
        stages = setting["pipeline_model_parallel_size"]
        replicas = self.machine.ranks // (
            stages * setting["tensor_model_parallel_size"] * setting["context_parallel_size"]
        )
        micro_batches = self.values["global_batch_size"] / (replicas * setting[MICRO_BATCH])
        layers = setting["num_layers_per_virtual_pipeline_stage"]
        chunks = self.values["num_layers"] / stages / layers if layers else 1
        passes = micro_batches + (stages - 1) / chunks
        return float(self._layer_seconds(setting) / stages * passes)

    def _layer_seconds(self, setting: Mapping[str, Any]) -> float:
        """Return the seconds of a micro-batch in all layers, which few sizes determine."""
        sizes = tuple(setting[name] for name in _SIZES_OF_LAYERS)
        if sizes not in self._seconds_of_layers:
            self._seconds_of_layers[sizes] = predict_layer_seconds(
                self.resolve(setting), self.machine
            )
        return self._seconds_of_layers[sizes]

    @cached_property
    def _seconds_of_layers(self) -> dict[tuple[Any, ...], float]:
        return {}

    def fits(self, memory: PredictedMemory) -> bool:
        """Return whether a layout fits, and takes no more memory than the user allows."""
        if self.memory_fractions is None or self.machine.memory_gib is None:
            return not memory.excess_bytes
        return memory.bytes <= self.memory_fractions[1] * self.machine.memory_gib * GIB

    def is_wanted(self, memory: PredictedMemory) -> bool:
        """Return whether a layout takes as much memory as the user asks for."""
        if self.memory_fractions is None or self.machine.memory_gib is None:
            return True
        least_bytes = self.memory_fractions[0] * self.machine.memory_gib * GIB
        return memory.bytes >= least_bytes


_SIZES_OF_LAYERS = (TP, SEQUENCE_PARALLEL, CP, EP, EXPERT_TP, MICRO_BATCH)
"""Arguments that determine the time of a layer for one micro-batch."""


@dataclass(frozen=True)
class Layout:
    """A legal layout with its prediction. ``setting`` has every chosen argument."""

    setting: Mapping[str, Any]
    prediction: Prediction

    @cached_property
    def key(self) -> str:
        """Short text that identifies the layout, and names the directory of its trial."""
        return describe_setting(self.setting)

    def __str__(self) -> str:
        return self.key


_SHORT_NAMES: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_layers_per_virtual_pipeline_stage": "vl",
    "micro_batch_size": "mbs",
    "use_distributed_optimizer": "shard",
    "data_parallel_sharding_strategy": "sharding=",
    "num_distributed_optimizer_instances": "instances=",
    "use_precision_aware_optimizer": "lean",
    "cpu_offloading_num_layers": "offload-layers=",
    "optimizer_cpu_offload": "offload",
}
_ALWAYS_SHOWN = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")


def describe_setting(setting: Mapping[str, Any]) -> str:
    """Describe a layout by what differs from the neutral one: ``tp2 pp1 mbs4 shard``."""
    neutral, words = neutral_settings(), []
    for name, value in setting.items():
        is_neutral = value in (None, neutral.get(name, False))
        if (
            name == "sequence_parallel"
            or name in RECOMPUTED
            or (is_neutral and name not in _ALWAYS_SHOWN)
        ):
            continue
        short = _SHORT_NAMES.get(name, name)
        words.append(short if value is True else f"{short}{value}")
    if setting["tensor_model_parallel_size"] > 1 and not setting["sequence_parallel"]:
        words.append("nosp")
    granularity, method, layers, modules = (setting[name] for name in RECOMPUTED)
    if granularity == "full":
        amount = layers if method == "block" else "all" if layers == 1 else f"all/{layers}"
        words.append(f"recompute={amount}")
    elif granularity:
        words.append(f"recompute={'+'.join(modules or (granularity,))}")
    return " ".join(words)


class TooLarge(NamedTuple):
    """A layout that exceeds the memory, although it saves as much of it as any with its sizes."""

    setting: Mapping[str, Any]
    memory_bytes: float

    def __str__(self) -> str:
        return describe_setting(self.setting)


@dataclass(frozen=True)
class Space:
    """Result of an enumeration.

    ``candidates`` are the layouts that may be tried, fastest first by prediction. ``too_large`` are
    those that exceed the memory, smallest first. ``sizes`` is the number of combinations of
    parallel sizes and micro-batches that the ranks allow; ``hopeless`` of these would take at
    least 1.3 times the time of the best.
    """

    candidates: tuple[Layout, ...]
    too_large: tuple[TooLarge, ...]
    sizes: int
    hopeless: int

    def describe(self) -> str:
        parts = [f"{self.sizes:,} combinations of sizes: {len(self.candidates):,} layouts fit"]
        if self.too_large:
            parts.append(
                f"{len(self.too_large):,} combinations exceed the memory, and so do larger "
                "micro-batches"
            )
        if self.hopeless:
            parts.append(
                f"{self.hopeless:,} would take at least {_HOPELESS_FACTOR:g} times as long as the "
                "best"
            )
        return ", ".join(parts)


_HOPELESS_FACTOR = 1.3
"""A layout is left out if even its lower bound is this many times the best prediction."""


def enumerate_space(problem: SearchProblem) -> Space:
    """Enumerate the legal layouts of a problem.

    Savings of memory beyond what fits are left out, because they only cost time. Sizes whose
    micro-batches are larger than those that have been found not to fit are left out as well.
    """
    candidates: list[Layout] = []
    too_large: list[TooLarge] = []
    exceeding: set[tuple[Any, ...]] = set()
    best, hopeless = math.inf, 0
    context = problem.choice_context
    sizes = [
        (problem.lower_bound(setting), number, setting)
        for number, setting in enumerate(
            enumerate_settings([c for c in CHOICES if not c.saves_memory], context)
        )
        if _are_legal(problem, setting)
    ]
    # Of two layouts that differ in their micro-batches, the smaller ones have the lower bound.
    for bound, _, setting in sorted(sizes, key=lambda item: item[:2]):
        others = tuple(value for name, value in setting.items() if name != MICRO_BATCH)
        if bound > _HOPELESS_FACTOR * best:
            hopeless += 1
            continue
        if others in exceeding:
            continue
        layouts, largest = _list_fitting(
            problem, context._replace(values={**problem.neutral, **setting})
        )
        for layout in layouts:
            candidates.append(layout)
            best = min(best, layout.prediction.seconds)
        if largest is not None:
            exceeding.add(others)
            too_large.append(largest)
    candidates.sort(key=lambda layout: (layout.prediction.seconds, layout.key))
    too_large.sort(key=lambda large: large.memory_bytes)
    return Space(tuple(candidates), tuple(too_large), len(sizes), hopeless)


def _are_legal(problem: SearchProblem, sizes: Mapping[str, Any]) -> bool:
    """Return whether a layout with these sizes may be legal, whatever saves its memory."""
    cause = problem.rules.find_cause(sizes)
    return cause is None or not cause.isdisjoint(SAVING_ARGUMENTS)


def _list_fitting(
    problem: SearchProblem, context: ChoiceContext
) -> tuple[list[Layout], TooLarge | None]:
    """Return the layouts of some sizes that fit and save no more memory than is needed; or the one
    that saves the most, if not even that one fits.
    """
    savings = dict(enumerate_savings(context))
    memory: dict[tuple[int, ...], PredictedMemory] = {}
    wholes: dict[tuple[int, ...], dict[str, Any]] = {}
    fitting: set[tuple[int, ...]] = set()
    unknown = list(savings)
    while unknown:
        # The least saving first, as it usually fits; then halves.
        indices = unknown[len(unknown) // 2 if memory else 0]
        values = {**context.values, **savings[indices]}
        whole = {name: values[name] for name in CHOSEN_ARGUMENTS}
        if not (_is_requested(context._replace(values=values)) and problem.rules.accepts(whole)):
            unknown.remove(indices)
            continue
        wholes[indices], memory[indices] = whole, problem.predict_memory(whole)
        if problem.fits(memory[indices]):
            fitting.add(indices)
            unknown = [other for other in unknown if not _saves_more(other, indices)]
        else:
            unknown = [other for other in unknown if not _saves_more(indices, other)]
    needed = [
        indices
        for indices in savings
        if indices in fitting
        and not any(_saves_more(indices, other) for other in fitting - {indices})
    ]
    if not needed and memory:
        smallest = min(memory, key=lambda indices: memory[indices].bytes)
        return [], TooLarge(wholes[smallest], memory[smallest].bytes)
    return [
        Layout(
            wholes[indices], Prediction(memory[indices], problem.predict_seconds(wholes[indices]))
        )
        for indices in needed
        if problem.is_wanted(memory[indices])
    ], None


def _is_requested(context: ChoiceContext) -> bool:
    """Return whether a layout has a value that is asked for of what follows from its arguments."""
    return all(
        value_of(context) in context.requested[name]
        for name, value_of in DERIVED_KEYS.items()
        if name in context.requested
    )


def _saves_more(indices: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether each setting saves at least as much memory as the other's."""
    return all(own >= less for own, less in zip(indices, other, strict=True))
