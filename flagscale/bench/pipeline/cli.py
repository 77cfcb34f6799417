"""Command ``flagscale bench pipeline``: measures fsccl's pipelined schedules.

A pipelined schedule divides the block of each rank into ``k`` chunks. Chunk c travels around ring
c, a cycle through all ranks, from each rank to the next, in sends of ``nelem_per_send`` elements.
Both parameters can be varied.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flagscale.bench.collectives.operations import OPERATIONS, DataType, find_data_type
from flagscale.bench.collectives.sizes import parse_size, sweep_sizes
from flagscale.bench.command import BenchCommand
from flagscale.bench.files import require_writable
from flagscale.bench.options import (
    BenchParser,
    add_device_flag,
    from_options,
    require_at_least,
    suggest_name,
)
from flagscale.bench.placement import Placement
from flagscale.errors import ConfigError
from flagscale.report.figure import require_image
from flagscale.report.scale import format_size

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
"""Default ``k`` and ``nelem_per_send`` of each operation."""
UNITS: Mapping[str, int] = {"GB": 10**9, "GiB": 2**30}

MAX_CHUNKS, MAX_SEND_ELEMENTS = 64, 1 << 26
"""fsccl's limits (``FSCCL_PIPELINE_K``, ``FSCCL_PIPELINE_NELEM``)."""
SENDS_IN_FLIGHT = 2
"""Number of sends that a rank buffers for each chunk: the depth of a channel in fsccl."""

_WIDTH = 99


@dataclass(frozen=True)
class Schedule:
    """An operation with its parameters; ``k`` = 0 is fsccl's own choice of algorithm."""

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
    """Parsed command line."""

    schedules: tuple[Schedule, ...]
    sizes: tuple[int, ...]
    type: DataType
    check_iters: int
    warmup_iters: int
    iters: int
    device: str
    unit: str
    workers: int | None = None
    json: Path | None = None
    plot: Path | None = None

    @property
    def placement(self) -> Placement:
        """All ranks on this machine."""
        return Placement(ranks=self.workers, device=self.device)

    def check(self, ranks: int) -> None:
        require_at_least("-r", ranks, 2)


@dataclass(frozen=True)
class PipelineRow:
    """One size of one schedule. Times are those of each iteration's slowest rank, in
    microseconds; ``size`` is the whole buffer in bytes, as an all-gather collects it.
    """

    operation: str
    k: int
    nelem_per_send: int
    size: int
    avg_us: float
    min_us: float

    def algbw(self, time: float, unit: str) -> float:
        """Return ``size`` over a time in microseconds, in ``unit`` per second."""
        return self.size / (time * 1e-6) / UNITS[unit]

    def busbw(self, ranks: int) -> float:
        """Return the bus bandwidth for the mean time in 1e9 bytes per second, by nccl-tests'
        factors.
        """
        return self.algbw(self.avg_us, "GB") * OPERATIONS[self.operation].bus_factor(ranks)


def format_heading(schedule: Schedule, plan: PipelinePlan, ranks: int) -> list[str]:
    """Return the lines above a schedule's rows."""
    title = f" {TITLES[schedule.operation]} "
    parameters = "fsccl's own choice of algorithm"
    if schedule.k > 0:
        scratch_bytes = schedule.k * SENDS_IN_FLIGHT * schedule.nelem * plan.type.bytes
        parameters = (
            f"k={schedule.k}, nelem_per_send={schedule.nelem}, scratch_size={scratch_bytes}"
        )
    bandwidths = (f"{which}_algbw({plan.unit}/s)" for which in ("avg", "max"))
    columns = ("size(B)", "avg_time(us)", "min_time(us)", *bandwidths)
    return [
        title.center(_WIDTH, "#"),
        f"nranks={ranks}",
        f"{parameters}, dtype={plan.type.name}",
        f"check_iters={plan.check_iters}, warmup_iters={plan.warmup_iters}, iters={plan.iters}",
        "",
        "".join(f"{column:>20}" for column in columns),
    ]


def format_row(row: PipelineRow, unit: str) -> str:
    """Format a row of the table."""
    times = (row.avg_us, row.min_us)
    numbers = (*times, *(row.algbw(time, unit) for time in times))
    return f"{row.size:>20}" + "".join(f"{number:>20.2f}" for number in numbers)


_DESCRIPTION = """\
Measure fsccl's pipelined all-gather, reduce-scatter and all-reduce. The block of each rank
is divided into k chunks. Chunk c travels around ring c, from rank to rank,
in sends of nelem_per_send elements.
"""
_EPILOG = """\
examples
  {prog} -r 4
      the three operations with their usual parameters
  {prog} -r 8 --sizes 1G --bw-unit GiB
      one size in the unit that publications on such schedules use
  {prog} -r 4 --ops all_reduce -k 0,1,2,4 --nelem-per-send 8192,32768,131072
      every combination; k=0: fsccl's own choice
  {prog} -r 4 --sizes 1M,16M,64M --json result.json --plot result.svg
  FSCCL_CLUSTERS=2,2 {prog} -r 4
      two nodes of two ranks each: messages between nodes, shared memory within

size is the whole buffer; times are of each iteration's slowest rank; algbw is size over time, of
the average and of the best iteration. scratch_size is the memory for a rank's sends, in bytes.
Every check compares the whole result with the expected one.
exit codes: 0 ok, 1 a result is wrong or the run failed, 2 usage, 3 ranks did not meet
"""
_DEFAULT_ONE_SHOT_BYTES = 32768
"""fsccl's default for FSCCL_ONE_SHOT_BYTES."""
T = TypeVar("T")


class PipelineCommand(BenchCommand[PipelinePlan]):
    """Command that measures pipelined schedules."""

    prog = "flagscale bench pipeline"
    rank_entry_point = "flagscale.bench.pipeline.worker:run_rank"

    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> PipelinePlan:
        options = _parser(prog).parse(words)
        if writes_results and options.plot is not None:
            require_image(options.plot, "--plot")
        if writes_results and options.json is not None:
            require_writable(options.json, "--json")
        return _make_plan(options)


def _parser(prog: str) -> BenchParser:
    parser = BenchParser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add = parser.add_argument
    add("-r", "--nworkers", "-np", dest="workers", type=int, metavar="N", help="number of ranks")
    add(
        "--ops",
        default=",".join(TITLES),
        metavar="LIST",
        help="operations, separated by commas (all)",
    )
    add("-k", metavar="LIST", help="numbers of chunks, separated by commas (4; reduce_scatter: 8)")
    add(
        "--nelem-per-send",
        "--nelem",
        metavar="LIST",
        help="elements per send, separated by commas (262144; all_reduce: 32768)",
    )
    add(
        "--sizes",
        default="64M",
        metavar="LIST",
        help="sizes of the whole buffer, separated by commas (64M)",
    )
    add("-b", "--minbytes", metavar="SIZE", help="first size of a sweep, instead of --sizes")
    add("-e", "--maxbytes", metavar="SIZE", help="last size of a sweep (the first)")
    add(
        "-f",
        "--stepfactor",
        type=float,
        default=2.0,
        metavar="FACTOR",
        help="factor between sizes (2)",
    )
    add("-d", "--datatype", default="fp32", metavar="TYPE", help="element type (fp32)")
    add("--check-iters", type=int, default=10, metavar="N", help="checked iterations (10)")
    add("-w", "--warmup-iters", type=int, default=10, metavar="N", help="warm-up iterations (10)")
    add("-n", "--iters", type=int, default=50, metavar="N", help="measured iterations (50)")
    add_device_flag(add)
    add(
        "--bw-unit",
        dest="unit",
        choices=tuple(UNITS),
        default="GB",
        help="unit of bandwidths: 1e9 or 2^30 bytes (GB)",
    )
    add(
        "--json",
        "--report-to-json-file",
        type=Path,
        metavar="FILE",
        help="write the result as JSON",
    )
    add("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    return parser


def _make_plan(options: argparse.Namespace) -> PipelinePlan:
    if min(options.check_iters, options.warmup_iters) < 0 or options.iters < 1:
        raise ConfigError(
            "--check-iters and --warmup-iters need numbers of at least 0, --iters of at least 1"
        )
    operations = _parse_list("--ops", options.ops, _parse_operation)
    ks = _parse_numbers("-k", options.k, 0, MAX_CHUNKS)
    nelems = _parse_numbers("--nelem-per-send", options.nelem_per_send, 1, MAX_SEND_ELEMENTS)
    schedules = tuple(
        Schedule(op, k, nelem)
        for op in operations
        for k in ks or DEFAULTS[op][:1]
        # With k=0 the number of elements has no effect, so one is enough.
        for nelem in (nelems or DEFAULTS[op][1:])[: None if k else 1]
    )
    sizes = _parse_list("--sizes", options.sizes, parse_size)
    if min_text := options.minbytes:
        bounds = parse_size(min_text), parse_size(options.maxbytes or min_text)
        sizes = sweep_sizes(*bounds, factor=options.stepfactor)
    one_shot_text = os.environ.get("FSCCL_ONE_SHOT_BYTES") or str(_DEFAULT_ONE_SHOT_BYTES)
    one_shot_bytes = _parse_number("FSCCL_ONE_SHOT_BYTES", one_shot_text, 0, 1 << 30)
    if min(sizes) <= one_shot_bytes and any(schedule.k for schedule in schedules):
        raise ConfigError(
            f"--sizes {format_size(min(sizes))}: buffers up to {format_size(one_shot_bytes)} go in "
            "one step and not by a pipeline",
            hint="FSCCL_ONE_SHOT_BYTES=0 in the environment sends all sizes through it",
        )
    data_type = find_data_type(options.datatype)
    return from_options(PipelinePlan, options, schedules=schedules, sizes=sizes, type=data_type)


def _parse_list(flag: str, text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{flag} {text!r}; expected values with commas between them")
    return tuple(dict.fromkeys(parse(word) for word in words))


def _parse_operation(word: str) -> str:
    if word in TITLES:
        return word
    raise ConfigError(f"--ops {word!r}; expected {', '.join(TITLES)}{suggest_name(word, TITLES)}")


def _parse_numbers(flag: str, text: str | None, minimum: int, maximum: int) -> tuple[int, ...]:
    """Parse a list of whole numbers from ``minimum`` to ``maximum``; empty without the flag."""
    return (
        _parse_list(flag, text, lambda word: _parse_number(flag, word, minimum, maximum))
        if text
        else ()
    )


def _parse_number(flag: str, word: str, minimum: int, maximum: int) -> int:
    if word.isdecimal() and minimum <= int(word) <= maximum:
        return int(word)
    raise ConfigError(f"{flag} {word!r}; expected a whole number from {minimum} to {maximum}")


main = PipelineCommand().main
