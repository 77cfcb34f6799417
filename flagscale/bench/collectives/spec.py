"""What one benchmark run does, as frozen dataclasses. Nothing here touches a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flagscale.bench.collectives import patterns
from flagscale.bench.collectives.curves import Curve
from flagscale.bench.collectives.operations import DataType, Operation
from flagscale.bench.collectives.records import Baseline
from flagscale.bench.collectives.statistics import Statistic
from flagscale.bench.command_line import COMM
from flagscale.bench.placement import Placement
from flagscale.comm import registry
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError
from flagscale.records import WRITTEN

BandwidthUnit = Literal["GB", "GiB"]
Average = Literal["rank0", "mean", "min", "max"]
CheckMode = Literal["random", "all_ones"]


@dataclass(frozen=True)
class Iterations:
    """How often an operation runs."""

    measured: int = 20
    warmup: int = 5
    replays: int | None = None
    """Repeat the measured iterations so often: CUDA-graph replays, plain repeats on a CPU."""
    replay_warmup: int = 0
    aggregated: int = 1
    """Operations in one iteration, issued together (nccl-tests' ``-m``)."""
    cycles: int = 1
    """Runs of the whole sweep."""


@dataclass(frozen=True)
class Buffers:
    """Where the data lies."""

    unique: bool = False
    """An input and an output of its own for every iteration."""
    shared_output: bool = False
    """Unique inputs, one output."""
    registered: int = 0
    """0: plain; 1: registered with the backend; 2: registered symmetrically."""
    ratio: tuple[float, ...] = (1.0,)
    """Shares of the parts that are issued together."""


@dataclass(frozen=True)
class Check:
    """How correctness is established; never inside the timing."""

    mode: CheckMode | None = None
    seed: int = 0
    dump: Path = field(default=Path("bench-failures"), metadata=WRITTEN)
    """Input, output and golden tensors of a failure go into a directory in here."""
    dump_shown: Path = Path("bench-failures")
    """Where they are in the end: files of other hosts are brought back."""


@dataclass(frozen=True)
class GroupsSpec:
    """Which ranks take part with which."""

    custom: patterns.Groups | None = None
    dimension: int | None = None
    pairs: patterns.Pairs | None = None
    exchange: tuple[patterns.Exchange, ...] | None = None


@dataclass(frozen=True)
class Output:
    """What is shown and kept."""

    format: Literal["nccom", "nccl-tests", "flagcx"] = "nccom"
    statistics: tuple[Statistic, ...] = (Statistic("avg"),)
    unit: BandwidthUnit = "GB"
    show_algorithm: bool = False
    show_sizes: bool = False
    header: bool = True
    interactive: bool = True
    debug: bool = False
    print_buffers: bool = False
    json: Path | None = field(default=None, metadata=WRITTEN)
    plots: tuple[Path, ...] = field(default=(), metadata=WRITTEN)
    report: Path | None = field(default=None, metadata=WRITTEN)
    csv: Path | None = field(default=None, metadata=WRITTEN)
    imports: tuple[Curve, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """What is written of the results."""
        return tuple(filter(None, (self.json, *self.plots, self.report, self.csv)))


@dataclass(frozen=True)
class Comparison:
    """Several backends measured by turns, or a run held against an earlier one."""

    backends: tuple[str, ...] = ()
    rounds: int = 10
    baseline: Baseline | None = None
    tolerance: float = 0.05
    """Longer than the baseline by more than this share is worse."""
    peak: float | None = None
    """The nominal limit of the bus bandwidth, in 1e9 bytes a second."""
    probe: bool = False
    """Measure what plain copies between neighbours reach."""


@dataclass(frozen=True)
class Case:
    """One line of a table but for its size."""

    operation: Operation
    type: DataType
    reduction: str
    """``none`` where nothing is reduced."""
    root: int
    """A rank of its group; -1 where there is no root."""
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
    """One run of the benchmark."""

    operations: tuple[Operation, ...]
    types: tuple[DataType, ...]
    sizes: tuple[int, ...]
    reductions: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] = (0,)
    """-1 stands for every rank in turn."""
    places: tuple[Literal["out", "in"], ...] | None = None
    """None: out of place where torch offers it, else in place."""
    iterations: Iterations = Iterations()
    buffers: Buffers = Buffers()
    check: Check = Check()
    groups: GroupsSpec = GroupsSpec()
    output: Output = Output()
    comparison: Comparison = Comparison()
    placement: Placement = field(default_factory=Placement)
    options: Mapping[str, OptionValues] = field(default_factory=dict, hash=False)
    """What the command line sets of the backends, by the names they are asked for."""
    timing: Literal["wall", "events"] = "wall"
    average: Average = "mean"
    blocking: bool = False
    cpu_time: bool = False
    """Report the time to issue an operation, not to finish it."""
    notes: tuple[str, ...] = ()
    """What the command line asked for and has no meaning here."""
    prog: str = "bench.py"
    command: tuple[str, ...] = ()
    """What followed it."""

    @property
    def backends(self) -> tuple[str, ...]:
        """What is measured, by the names it is asked for."""
        return self.comparison.backends or (self.placement.backend,)

    @property
    def backends_flag(self) -> str:
        """What those names are values of."""
        return "--compare" if self.comparison.backends else "--backend"

    def options_of(self, name: str) -> OptionValues:
        """What is set of the backend called ``name``."""
        return self.options.get(name, {})

    def cases(self, ranks: int) -> Iterator[Case]:
        """Every case for groups of ``ranks`` ranks, in the order they run.

        Raises:
            ConfigError: a root does not exist, or no operation can run in the place asked for.
        """
        found = [
            case
            for op in self.operations
            for type_ in (self.types[:1] if op.name == "barrier" else self.types)
            for case in self._of(op, type_, ranks)
        ]
        if not found:
            names = ", ".join(op.name for op in self.operations)
            words = {"in": "in place", "out": "out of place"}
            asked = " and ".join(words[place] for place in self.places or ())
            text = f"{names} {asked}: torch.distributed does not offer it for these types"
            raise ConfigError(text)
        yield from found

    def _of(self, op: Operation, type_: DataType, ranks: int) -> Iterator[Case]:
        reductions = self.reductions if op.reduces else ("none",)
        for reduction in reductions:
            if op.reduces and not type_.reduces(reduction):
                # Of many, those that can are meant.
                if len(self.types) == len(reductions) == len(self.operations) == 1:
                    raise ConfigError(f"{op.name}: torch has no {reduction} of {type_.name}")
                continue
            for root in self._roots(ranks) if op.rooted else (-1,):
                for in_place in self._places(op):
                    yield Case(op, type_, reduction, root, in_place)

    def _roots(self, ranks: int) -> tuple[int, ...]:
        for root in self.roots:
            if root >= ranks:
                raise ConfigError(f"--root {root} does not exist among {ranks} ranks of a group")
        return tuple(range(ranks)) if -1 in self.roots else self.roots

    def _places(self, op: Operation) -> tuple[bool, ...]:
        if self.places is None:
            return (not op.out_of_place,)
        offered = {"out": op.out_of_place, "in": op.in_place}
        return tuple(place == "in" for place in self.places if offered[place])


@dataclass(frozen=True)
class Batch:
    """Runs of the benchmark one after the other, in the same ranks."""

    specs: tuple[BenchSpec, ...]

    @property
    def placement(self) -> Placement:
        """That of all runs."""
        return self.specs[0].placement

    def check(self, ranks: int) -> None:
        for spec in self.specs:
            for name in spec.backends:
                if text := registry.backend(name).misfit(spec.options_of(name), ranks):
                    raise ConfigError(f"{COMM} {text}")
            groups = patterns.groups_for(ranks, spec.groups.custom, spec.groups.dimension)
            list(spec.cases(len(groups[0])))
            if any(op.name == "permute" for op in spec.operations):
                patterns.pairs_for(len(groups[0]), spec.groups.pairs)
