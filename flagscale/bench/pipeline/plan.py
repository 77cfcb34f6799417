"""What is measured, and how its result is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flagscale.bench.collectives.operations import DataType
from flagscale.bench.command_line import at_least
from flagscale.bench.placement import Placement

TITLES: Mapping[str, str] = {
    "all_gather": "Allgather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "Allreduce",
}
DEFAULTS: Mapping[str, tuple[int, int]] = {
    "all_gather": (4, 262144),
    "reduce_scatter": (8, 262144),
    "all_reduce": (4, 32768),
}
"""``k`` and ``nelem_per_send`` of each operation where none are given."""
UNITS: Mapping[str, int] = {"GB": 10**9, "GiB": 2**30}

MOST_CHUNKS, MOST_ELEMENTS = 64, 1 << 26
"""The limits of fsccl (``FSCCL_PIPELINE_K``, ``FSCCL_PIPELINE_NELEM``)."""
SLOTS = 2
"""Sends that a ring of a rank has room for: what fsccl calls the depth of a channel."""

_WIDTH = 99


@dataclass(frozen=True)
class Schedule:
    """One operation with its parameters; ``k`` = 0 is fsccl's own choice of algorithm."""

    operation: str
    k: int
    nelem: int

    @property
    def label(self) -> str:
        if self.k == 0:
            return f"{self.operation} without a pipeline"
        return f"{self.operation} k={self.k} nelem={self.nelem}"


@dataclass(frozen=True)
class PipelinePlan:
    """Everything that ranks measure."""

    schedules: tuple[Schedule, ...]
    sizes: tuple[int, ...]
    type: DataType
    check_iters: int
    warmup_iters: int
    iters: int
    device: Literal["auto", "cpu", "cuda"]
    unit: str
    workers: int | None = None
    json: Path | None = None
    plot: Path | None = None

    @property
    def placement(self) -> Placement:
        """All ranks on this machine."""
        return Placement(workers=self.workers, device=self.device)

    def check(self, ranks: int) -> None:
        """Refuse a rank on its own.

        Raises:
            ConfigError: it is.
        """
        at_least("-r", ranks, 2)


@dataclass(frozen=True)
class Row:
    """One size of one schedule. Times are those of each iteration's slowest rank, in microseconds;
    ``size`` is the whole buffer in bytes, as an all-gather collects it."""

    operation: str
    k: int
    nelem_per_send: int
    size: int
    avg_us: float
    min_us: float

    def algbw(self, time: float, unit: str) -> float:
        """``size`` over a time in microseconds, in ``unit`` a second."""
        return self.size / (time * 1e-6) / UNITS[unit]

    def busbw(self, ranks: int) -> float:
        """Of the average time, in 1e9 bytes a second, by nccl-tests' factors."""
        factor = (ranks - 1) / ranks * (2 if self.operation == "all_reduce" else 1)
        return self.algbw(self.avg_us, "GB") * factor


def heading(schedule: Schedule, plan: PipelinePlan, ranks: int) -> list[str]:
    """The lines above a schedule's rows."""
    title = f" {TITLES[schedule.operation]} "
    how = "fsccl's own choice of algorithm"
    if schedule.k > 0:
        scratch = schedule.k * SLOTS * schedule.nelem * plan.type.bytes
        how = f"k={schedule.k}, nelem_per_send={schedule.nelem}, scratch_size={scratch}"
    columns = (
        "size(B)",
        "avg_time(us)",
        "min_time(us)",
        f"avg_algbw({plan.unit}/s)",
        f"max_algbw({plan.unit}/s)",
    )
    return [
        title.center(_WIDTH, "#"),
        f"nranks={ranks}",
        f"{how}, dtype={plan.type.name}",
        f"check_iters={plan.check_iters}, warmup_iters={plan.warmup_iters}, iters={plan.iters}",
        "",
        "".join(f"{column:>20}" for column in columns),
    ]


def line(row: Row, unit: str) -> str:
    """A row of the table."""
    numbers: Sequence[float] = (
        row.avg_us,
        row.min_us,
        row.algbw(row.avg_us, unit),
        row.algbw(row.min_us, unit),
    )
    return f"{row.size:>20}" + "".join(f"{number:>20.2f}" for number in numbers)
