"""The grid search of FlagScale's ``auto_tune``, for a comparison: its trials and its winner.

Written from a description of its rules. It tries the Cartesian product of the values of its keys,
without what the numbers of devices, layers and sequences do not allow, in the order of an estimate
of memory. After a layout that runs out of memory, it skips those that need more. Each other layout
is one trial, and the fastest trial wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from flagscale.config.arguments.layout_choices import (
    CHOSEN_ARGUMENTS,
    CP,
    EP,
    MICRO_BATCH,
    PP,
    SEQUENCE_PARALLEL,
    SHARDED,
    TP,
    VIRTUAL_LAYERS,
    neutral_settings,
)
from flagscale.tune.space import describe_setting

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class GridModel:
    """Numbers on which the grid depends; ``experts`` is 0 for a dense model."""

    ranks: int
    layers: int
    batch: int
    experts: int = 0


def list_grid(model: GridModel, space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the settings that the grid tries, least memory first.

    ``space`` restricts arguments to values; others take all.
    """
    settings = [setting for setting in _product(model, space) if _is_divisible(model, setting)]
    return sorted(settings, key=_estimate_memory)


def run_grid(
    grid: Sequence[Setting], seconds: Mapping[str, float], exceeding: Sequence[str] = ()
) -> tuple[int, str | None]:
    """Return the number of trials of a grid, and its winner; None if nothing works.

    Args:
        grid: Its settings, in order.
        seconds: Time of the first trial of each layout, by name. Others fail.
        exceeding: Names of the layouts that run out of memory.
    """
    failed: list[Setting] = []
    tried = []
    for setting in grid:
        if any(_needs_more(setting, other) for other in failed):
            continue
        name = describe_setting(setting)
        tried.append(name)
        if name in exceeding:
            failed.append(setting)
    winner = min((name for name in tried if name in seconds), key=seconds.__getitem__, default=None)
    return len(tried), winner


def _product(model: GridModel, space: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    sizes = [size for size in range(1, model.ranks + 1) if model.ranks % size == 0]
    powers = [2**power for power in range(model.batch.bit_length())]
    values: dict[str, Sequence[Any]] = {
        TP: sizes,
        PP: sizes,
        CP: sizes,
        EP: sizes if model.experts else (1,),
        VIRTUAL_LAYERS: (None, *range(1, model.layers)),
        MICRO_BATCH: powers,
        SEQUENCE_PARALLEL: (True, False),
        SHARDED: (True, False),
    }
    values |= {name: space[name] for name in values if name in space}
    neutral = {**dict.fromkeys(CHOSEN_ARGUMENTS), **neutral_settings()}
    others = {
        name: allowed[0] for name, allowed in space.items() if name in neutral and len(allowed) == 1
    }
    for combination in product(*values.values()):
        yield {**neutral, **others, **dict(zip(values, combination, strict=True))}


def _is_divisible(model: GridModel, setting: Setting) -> bool:
    ranks = setting[TP] * setting[PP] * setting[CP]
    if model.ranks % ranks or model.layers % setting[PP]:
        return False
    replicas = model.ranks // ranks
    virtual = setting[VIRTUAL_LAYERS]
    stage_layers = model.layers // setting[PP]
    return not (
        model.batch % (replicas * setting[MICRO_BATCH])
        or (virtual and (setting[PP] == 1 or stage_layers % virtual or virtual == stage_layers))
        or (setting[TP] == 1 and setting[SEQUENCE_PARALLEL])
        or (model.experts and model.experts % setting[EP])
        or (replicas * setting[CP]) % setting[EP]
    )


def _estimate_memory(setting: Setting) -> float:
    """Return a number that orders layouts by memory: weights, activations of a micro-batch."""
    shared = setting[TP] * setting[PP]
    return float(16 / shared + setting[MICRO_BATCH] / (setting[TP] * setting[CP]))


def _needs_more(setting: Setting, other: Setting) -> bool:
    """Return whether a layout has larger micro-batches than another one, or shares less."""
    return (
        all(setting[name] <= other[name] for name in (TP, PP, CP, EP))
        and setting[MICRO_BATCH] >= other[MICRO_BATCH]
        and setting[SHARDED] <= other[SHARDED]
    )
