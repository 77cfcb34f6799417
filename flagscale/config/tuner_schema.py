"""Schema of ``experiment.auto_tuner``: what ``action=auto_tune`` searches, and for how long.

Names are FlagScale's, with some of this project's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.documented import doc

_UNUSED = "Accepted for compatibility, without effect: "


@dataclass(frozen=True)
class TunerControl:
    """Limits of a search: ``experiment.auto_tuner.control``."""

    max_time: float | None = field(
        default=None,
        metadata=doc("Seconds after which no further trial starts. Default: no limit.", minimum=0),
    )
    max_trials: int | None = field(
        default=None,
        metadata=doc("Number of trials after which none starts. Default: no limit.", minimum=1),
    )
    max_time_per_task: float = field(
        default=300.0,
        metadata=doc(
            "Seconds after which a trial is ended; twice as long for the first one, which may have "
            "to build caches. A trial that has reported a step by then counts.",
            minimum=1,
        ),
    )
    train_iters: int = field(
        default=10,
        metadata=doc(
            "Steps of a trial. The first two are not counted. A trial ends earlier if it "
            "cannot become the best.",
            minimum=4,
        ),
    )
    interval: float = field(
        default=0.5,
        metadata=doc("Seconds between two looks at a trial.", minimum=0.05),
    )
    share_processes: bool = field(
        default=True,
        metadata=doc(
            "Run layouts that differ in micro-batches and recomputation only in the processes of "
            "the last trial, if those are alive. Repeats of the best always have new processes."
        ),
    )
    run_best: bool = field(
        default=False,
        metadata=doc("Start a run with the best layout after the search, as `run_best=true`."),
    )


@dataclass(frozen=True)
class TunerAlgorithm:
    """Method and objective of a search: ``experiment.auto_tuner.algo``."""

    name: str = field(
        default="model",
        metadata=doc(
            "`model`: try the layouts in the order of their predicted times, which every "
            "measurement corrects, until no other is likely to be faster. `grid`: try every layout "
            "that fits, within the limits of `control`.",
            choices=("model", "grid"),
        ),
    )
    priority: str = field(
        default="performance",
        metadata=doc(
            "`performance`: the fastest layout. `memory`: of the measured layouts that reach "
            "`min_speed`, the one with the least memory.",
            choices=("performance", "memory"),
        ),
    )
    min_speed: float = field(
        default=0.95,
        metadata=doc(
            "With `priority: memory`, the least speed as a fraction of the fastest layout's.",
            minimum=0.01,
            maximum=1,
        ),
    )
    certainty: float = field(
        default=0.95,
        metadata=doc(
            "The search ends when, with this probability, no other layout is faster by more than "
            "`tolerance`.",
            minimum=0.5,
            maximum=0.999,
        ),
    )
    tolerance: float = field(
        default=0.02,
        metadata=doc(
            "Indifference zone: the search stops when no other layout can win by more than this "
            "fraction, and does not repeat trials to tell layouts apart that are closer.",
            minimum=0,
            maximum=0.5,
        ),
    )


@dataclass(frozen=True)
class TunerMemory:
    """Memory of a device: ``experiment.auto_tuner.memory_model``."""

    gpu_memory: float | None = field(
        default=None,
        metadata=doc(
            "Memory of a device in MB. Default: that of the product that the hosts report.",
            minimum=1,
        ),
    )
    gpu_utilization: tuple[float, ...] = field(
        default=(),
        metadata=doc(
            "Least and largest fraction of the memory that a layout may take by calculation. "
            "Default: everything that leaves a reserve for libraries, as `action=estimate` does.",
            minimum=0,
            maximum=1,
        ),
    )
    model_name: str | None = field(
        default=None, metadata=doc(f"{_UNUSED}memory is that of `action=estimate`.")
    )


@dataclass(frozen=True)
class TunerPerformance:
    """Reading of a trial's speed: ``experiment.auto_tuner.performance``."""

    name: str | None = field(
        default=None,
        metadata=doc(f"{_UNUSED}the ranks report the time of each step, no log is searched."),
    )
    order: str | None = field(default=None, metadata=doc(f"{_UNUSED}the fastest layout is sought."))


TUNER_SECTIONS: Mapping[str, type] = {
    "control": TunerControl,
    "algo": TunerAlgorithm,
    "memory_model": TunerMemory,
    "performance": TunerPerformance,
}
"""Sections of ``experiment.auto_tuner`` whose keys are fields of a class."""


@dataclass(frozen=True)
class Tuner:
    """Search for a layout with ``action=auto_tune``: ``experiment.auto_tuner``."""

    keep: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "Arguments that the search leaves as the YAML has them, such as "
            "`[context_parallel_size, micro_batch_size]`."
        ),
    )
    space: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """``auto_tuner.space``: values to which arguments are restricted, by name."""
    control: TunerControl = field(default_factory=TunerControl)
    algo: TunerAlgorithm = field(default_factory=TunerAlgorithm)
    memory_model: TunerMemory = field(default_factory=TunerMemory)
    performance: TunerPerformance = field(default_factory=TunerPerformance)
