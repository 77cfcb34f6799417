"""Specification of a run of ``flagscale bench collectives``, as frozen dataclasses.

:mod:`.cli` makes a :class:`BenchSpec` from the command line. It is sent to every rank, where
:mod:`.session` measures it. Nothing here uses a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flagscale.bench.collectives import patterns
from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.operations import DataType, Operation
from flagscale.bench.collectives.records import Baseline
from flagscale.bench.options import COMM
from flagscale.bench.placement import Placement
from flagscale.bench.statistics import Statistic
from flagscale.comm import registry
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError
from flagscale.records import WRITTEN_BY_RANK

BandwidthUnit = Literal["GB", "GiB"]
Average = Literal["rank0", "mean", "min", "max"]
CheckMode = Literal["random", "all_ones"]


@dataclass(frozen=True)
class Iterations:
    """Numbers of iterations (``-n``, ``-w``, ``-I``, ``-W``, ``-m`` and ``--run-cycles``)."""

    measured: int = 20
    warmup: int = 5
    replays: int | None = None
    """Repetitions of the measured iterations: CUDA-graph replays, plain repetitions on a CPU."""
    replay_warmup: int = 0
    aggregated: int = 1
    """Operations in one iteration that are issued together (nccl-tests' ``-m``)."""
    cycles: int = 1
    """Repetitions of the whole sweep."""


@dataclass(frozen=True)
class Buffers:
    """Buffers of the operations."""

    unique: bool = False
    """Separate input and output for every iteration."""
    shared_output: bool = False
    """Unique inputs with one output."""
    registered: int = 0
    """0: not registered; 1: registered with the backend; 2: registered symmetrically."""
    ratio: tuple[float, ...] = (1.0,)
    """Relative sizes of the parts that are issued together."""


@dataclass(frozen=True)
class Check:
    """Verification of results, outside of the timing."""

    mode: CheckMode | None = None
    seed: int = 0
    dump: Path = field(default=Path("bench-failures"), metadata=WRITTEN_BY_RANK)
    """Directory for input, output and golden tensors of a failure."""
    dump_shown: Path = Path("bench-failures")
    """Final directory of the dumps, for messages: files of other hosts are copied to it."""


@dataclass(frozen=True)
class GroupsSpec:
    """Groups of ranks that communicate, and the messages within a group."""

    custom: patterns.Groups | None = None
    """Replica groups from a file; None: one group, or by ``dimension``."""
    dimension: int | None = None
    """Ranks per group (``--data-parallel-dimension``)."""
    pairs: patterns.Pairs | None = None
    """Source and target ranks of ``permute``; None: a ring."""
    exchange: tuple[patterns.Exchange, ...] | None = None
    """Counts and displacements of ``all_to_all_v`` by rank; None: different counts for every
    rank.
    """


@dataclass(frozen=True)
class Output:
    """Output on the terminal, and result files."""

    format: Literal["nccom", "nccl-tests", "flagcx"] = "nccom"
    statistics: tuple[Statistic, ...] = (Statistic("avg"),)
    unit: BandwidthUnit = "GB"
    show_algorithm: bool = False
    show_sizes: bool = False
    header: bool = True
    interactive: bool = True
    debug: bool = False
    print_buffers: bool = False
    json: Path | None = field(default=None, metadata=WRITTEN_BY_RANK)
    plots: tuple[Path, ...] = field(default=(), metadata=WRITTEN_BY_RANK)
    report: Path | None = field(default=None, metadata=WRITTEN_BY_RANK)
    csv: Path | None = field(default=None, metadata=WRITTEN_BY_RANK)
    imported_curves: tuple[Curve, ...] = ()
    """Curves of other results (``--import``), shown in plots and in the report."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files with results."""
        return tuple(filter(None, (self.json, *self.plots, self.report, self.csv)))


@dataclass(frozen=True)
class Comparison:
    """Comparison of several backends by turns, or with an earlier run."""

    backends: tuple[str, ...] = ()
    rounds: int = 10
    baseline: Baseline | None = None
    tolerance: float = 0.05
    """A time above the baseline's by more than this fraction is worse."""
    peak: float | None = None
    """Nominal limit of the bus bandwidth in 1e9 bytes per second."""
    probe: bool = False
    """Measure the bandwidth of plain copies between neighbours."""


@dataclass(frozen=True)
class Case:
    """Operation with its element type, reduction, root, and number of buffers: a row of a table
    without its size.
    """

    operation: Operation
    type: DataType
    reduction: str
    """``none`` for an operation without reduction."""
    root: int
    """Rank in its group; -1 for an operation without root."""
    in_place: bool

    @property
    def label(self) -> str:
        words = [self.operation.name]
        words += [self.type.name] if self.operation.name != "barrier" else []
        words += [self.reduction] if self.operation.reduces else []
        words += [f"root {self.root}"] if self.operation.rooted else []
        words += ["in place"] if self.in_place and self.operation.out_of_place else []
        return " ".join(words)


@dataclass(frozen=True)
class BenchSpec:
    """One run of the benchmark: each operation with each type, reduction, root and size."""

    operations: tuple[Operation, ...]
    types: tuple[DataType, ...]
    sizes: tuple[int, ...]
    """Sizes of the logical buffer in bytes; see :mod:`.operations`."""
    reductions: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] = (0,)
    """-1 stands for every rank in turn."""
    places: tuple[Literal["out", "in"], ...] | None = None
    """Out of place, in place, or both; None: out of place if torch supports it, else in place."""
    iterations: Iterations = Iterations()
    buffers: Buffers = Buffers()
    check: Check = Check()
    groups: GroupsSpec = GroupsSpec()
    output: Output = Output()
    comparison: Comparison = Comparison()
    placement: Placement = field(default_factory=Placement)
    backend_options: Mapping[str, OptionValues] = field(default_factory=dict, hash=False)
    """Options of the backends, by the backend names of the command line."""
    timing: Literal["wall", "events"] = "wall"
    average: Average = "mean"
    blocking: bool = False
    cpu_time: bool = False
    """Report the time to issue an operation instead of the time until it has finished."""
    notes: tuple[str, ...] = ()
    """Notes on flags without effect."""
    prog: str = "flagscale bench collectives"
    command: tuple[str, ...] = ()
    """Arguments of the command."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Measured backends, by their names on the command line."""
        return self.comparison.backends or (self.placement.backend,)

    @property
    def backends_flag(self) -> str:
        """Flag that names the measured backends."""
        return "--compare" if self.comparison.backends else "--backend"

    def options_of(self, name: str) -> OptionValues:
        """Return the options of a backend (``--comm``)."""
        return self.backend_options.get(name, {})

    def cases(self, ranks: int) -> Iterator[Case]:
        """Yield every case for groups of ``ranks`` ranks, in the order they run.

        Raises:
            ConfigError: a root does not exist, or no operation can run in the requested place.
        """
        cases = [
            case
            for op in self.operations
            for data_type in (self.types[:1] if op.name == "barrier" else self.types)
            for case in self._yield_cases(op, data_type, ranks)
        ]
        if not cases:
            names = ", ".join(op.name for op in self.operations)
            place_names = {"in": "in place", "out": "out of place"}
            requested = " and ".join(place_names[place] for place in self.places or ())
            text = f"{names} {requested}: torch.distributed does not support it for these types"
            raise ConfigError(text)
        yield from cases

    def _yield_cases(self, op: Operation, data_type: DataType, ranks: int) -> Iterator[Case]:
        reductions = self.reductions if op.reduces else ("none",)
        for reduction in reductions:
            if op.reduces and not data_type.reduces(reduction):
                # With several types or reductions, unsupported combinations are left out.
                if len(self.types) == len(reductions) == len(self.operations) == 1:
                    raise ConfigError(f"{op.name}: torch has no {reduction} of {data_type.name}")
                continue
            for root in self._list_roots(ranks) if op.rooted else (-1,):
                for in_place in self._list_in_place(op):
                    yield Case(op, data_type, reduction, root, in_place)

    def _list_roots(self, ranks: int) -> tuple[int, ...]:
        for root in self.roots:
            if root >= ranks:
                raise ConfigError(f"--root {root}: a group has only {ranks} ranks")
        return tuple(range(ranks)) if -1 in self.roots else self.roots

    def _list_in_place(self, op: Operation) -> tuple[bool, ...]:
        if self.places is None:
            return (not op.out_of_place,)
        supported = {"out": op.out_of_place, "in": op.in_place}
        return tuple(place == "in" for place in self.places if supported[place])


@dataclass(frozen=True)
class Batch:
    """Runs of the benchmark, one after the other, on the same ranks."""

    specs: tuple[BenchSpec, ...]

    @property
    def placement(self) -> Placement:
        """Placement of all runs."""
        return self.specs[0].placement

    def check(self, ranks: int) -> None:
        """Check all runs against the number of ranks.

        Raises:
            ConfigError: options, groups, roots or pairs do not fit ``ranks`` ranks.
        """
        for spec in self.specs:
            for name in spec.backends:
                if text := registry.get_backend(name).explain_mismatch(
                    spec.options_of(name), ranks
                ):
                    raise ConfigError(f"{COMM} {text}")
            groups = patterns.groups_for(ranks, spec.groups.custom, spec.groups.dimension)
            list(spec.cases(len(groups[0])))
            if any(op.name == "permute" for op in spec.operations):
                patterns.pairs_for(len(groups[0]), spec.groups.pairs)
