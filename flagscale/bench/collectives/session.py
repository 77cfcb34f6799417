"""Measuring, on every rank at once. Rank 0 gets the rows, the others take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from flagscale.bench.collectives import bodies, checks, patterns
from flagscale.bench.collectives.bodies import Shape
from flagscale.bench.collectives.buffers import Prepared, prepare, release
from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.collectives.probe import probe_copies
from flagscale.bench.collectives.records import Row
from flagscale.bench.collectives.rows import (
    Report,
    against_limits,
    blank_row,
    make_row,
    turn_times,
)
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.statistics import paired_ratio
from flagscale.bench.collectives.teams import Team, form
from flagscale.bench.collectives.timing import Measured, measure, meetings
from flagscale.bench.collectives.watch import Watch
from flagscale.bench.world import World
from flagscale.comm import registry


class Listener:
    """What hears of the results. This one, for all ranks but 0, does nothing with them."""

    def series(self, cases: Sequence[Case], sizes: int, backends: int) -> None:
        """A table begins."""

    def rows(self, rows: Sequence[Row]) -> None:
        """A size is measured."""

    def end_series(self) -> None:
        """The table is complete."""

    def note(self, text: str) -> None:
        """Something the reader should know."""

    def sample(self, text: str) -> None:
        """Some of rank 0's data, which was asked for."""


@dataclass
class Session:
    """All ranks, ready to run any number of specifications."""

    world: World
    device: BenchDevice
    watch: Watch
    _teams: dict[tuple[str, int, patterns.Groups], Team] = field(default_factory=dict)

    def run(self, spec: BenchSpec, listener: Listener) -> None:
        """Measure everything that ``spec`` says. ``listener`` is rank 0's.

        Raises:
            ConfigError: groups, pairs, counts or roots do not fit the world.
        """
        groups = patterns.groups_for(self.world.size, spec.groups.custom, spec.groups.dimension)
        teams = self._form(spec, groups)
        cases = list(spec.cases(teams[0].size))
        # Everything that can be wrong with the counts shows before the first measurement.
        said = [
            n for c in cases for s in spec.sizes for n in bodies.shapes(c, s, teams[0], spec)[1]
        ]
        for note in dict.fromkeys(said):
            listener.note(note)
        limits = self._limits(spec)
        if text := _limits_in_words(limits, spec):
            listener.note(text)
        for _ in range(spec.iterations.cycles):
            for series in _series(cases):
                self._series(series, teams, spec, limits, listener)

    def _form(self, spec: BenchSpec, groups: patterns.Groups) -> list[Team]:
        teams = []
        for number, name in enumerate(spec.backends):
            key = (name, number, groups)
            if key not in self._teams:
                self.watch.enter(f"the creation of {len(groups)} group(s) on {name}")
                adapter = registry.usable(name, self.device.kind)
                values = spec.options_of(name)
                seconds = spec.placement.timeout * 2 + 60
                team = form(adapter, groups, self.world.rank, self.device, seconds, values)
                self._teams[key] = team
            teams.append(self._teams[key])
        return _named_apart(teams)

    def _limits(self, spec: BenchSpec) -> tuple[float | None, float | None]:
        """The nominal and the measured limit of the bus bandwidth, in 1e9 bytes a second."""
        nominal = spec.comparison.peak or self.device.nominal_gb
        if not spec.comparison.probe:
            return nominal, None
        self.watch.enter("the probe of plain copies")
        self._together()
        found = self._gather(probe_copies(self.device))
        return nominal, min(found)

    def _series(
        self,
        cases: Sequence[Case],
        teams: Sequence[Team],
        spec: BenchSpec,
        limits: tuple[float | None, float | None],
        listener: Listener,
    ) -> None:
        sizes = (0,) if cases[0].operation.name == "barrier" else spec.sizes
        done: set[int] = set()
        plans = []
        for size in sizes:
            shapes = bodies.shapes(cases[0], size, teams[0], spec)[0]
            actual = sum(shape.elements for shape in shapes)
            # Small sizes may be cut to the same one.
            if actual not in done:
                done.add(actual)
                plans.append((size, shapes))
        listener.series(cases, len(plans), len(teams))
        for size, _ in plans:
            rows: list[Row] = []
            for case in cases:
                shapes = bodies.shapes(case, size, teams[0], spec)[0]
                rows += self._size(case, shapes, teams, spec, listener)
            rows = [against_limits(row, limits) for row in rows]
            listener.rows(rows)
        listener.end_series()

    def _size(
        self,
        case: Case,
        shapes: tuple[Shape, ...],
        teams: Sequence[Team],
        spec: BenchSpec,
        listener: Listener,
    ) -> list[Row]:
        """One size on all backends: a row each, on every rank (only rank 0's are shown)."""
        blank = blank_row(case, shapes, teams[0], spec)
        self.watch.enter(f"{case.label} {blank.size} B, preparation")
        ready: list[Prepared] = []

        def ready_all() -> None:
            ready.extend(prepare(case, shapes, team, self.device, spec) for team in teams)
            self.device.synchronize()

        if failure := self._attempt(ready_all):
            return self._failed(failure, blank, teams, ready)
        first: list[checks.Checked] = []
        samples: list[str] = []

        def first_run() -> None:
            for prepared in ready:
                if spec.output.print_buffers and case.operation.name != "barrier":
                    said = checks.sample(case, prepared, self.device, spec)
                    samples.append(f"{prepared.team.backend}, rank {self.world.rank}: {said}")
                first.append(checks.check(case, prepared, self.device, spec))
                for step in prepared.steps(min(1, len(prepared.bodies))):
                    step()
            self.device.synchronize()

        if failure := self._attempt(first_run):
            return self._failed(failure, blank, teams, ready)
        for text in samples:
            listener.sample(f"{blank.size} B, {text}")
        reports = self._timed(case, blank, ready, first, spec)
        rows = self._judge(blank, reports, ready, case, spec)
        for prepared in ready:
            release(prepared, self.device)
        return rows

    def _failed(
        self, failure: str, blank: Row, teams: Sequence[Team], ready: Sequence[Prepared]
    ) -> list[Row]:
        """The rows of a size that could not be measured."""
        for prepared in ready:
            release(prepared, self.device)
        return [replace(blank, backend=team.backend, failure=failure) for team in teams]

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Do ``work`` on every rank; what went wrong on the first rank where it did."""
        problem = None
        try:
            work()
        except (RuntimeError, MemoryError, ValueError) as error:
            problem = _first_line(error)
        found = self._gather(problem)
        failed = [rank for rank, text in enumerate(found) if text]
        if not failed:
            return None
        return f"Failure on rank {failed[0]}: {found[failed[0]]}"

    def _timed(
        self,
        case: Case,
        blank: Row,
        ready: Sequence[Prepared],
        first: Sequence[checks.Checked],
        spec: BenchSpec,
    ) -> list[list[Report]]:
        """The reports of all ranks, for each backend."""
        turns: list[list[Measured]] = [[] for _ in ready]
        iterations = spec.iterations
        rounds = spec.comparison.rounds if len(ready) > 1 else 1
        count = -(-iterations.measured // rounds)
        self.watch.enter(f"{case.label} {blank.size} B")
        for prepared in ready:
            checks.clear(prepared)
        for number in range(rounds):
            # By turns, and each first as often as last: a drift hits all alike.
            order = range(len(ready)) if number % 2 == 0 else reversed(range(len(ready)))
            for index in order:
                prepared = ready[index]
                steps = prepared.steps(count, iterations.warmup) if prepared.bodies else []
                warmup = prepared.steps(iterations.warmup) if prepared.bodies else []
                if steps:
                    together = self._together
                    marks = self.watch.marks
                    turns[index].append(measure(steps, warmup, self.device, spec, marks, together))
                else:
                    self._idle(spec)
        return self._reports(case, blank, ready, first, turns, spec)

    def _reports(
        self,
        case: Case,
        blank: Row,
        ready: Sequence[Prepared],
        first: Sequence[checks.Checked],
        turns: Sequence[Sequence[Measured]],
        spec: BenchSpec,
    ) -> list[list[Report]]:
        """Check once more, after the timing, and tell everyone."""
        self.watch.enter(f"{case.label} {blank.size} B, check")
        reports = []
        for index, prepared in enumerate(ready):
            second = checks.check(case, prepared, self.device, spec)
            team = prepared.team
            report = Report(
                *(team.member, team.ranks, tuple(turns[index]), (first[index], second)),
                algorithm=bodies.algorithm(team, self.device)
                if spec.output.show_algorithm
                else "n/a",
            )
            reports.append(self._gather(report))
        return reports

    def _idle(self, spec: BenchSpec) -> None:
        """A rank outside of all groups keeps step with the others' meetings."""
        for _ in range(meetings(self.device, spec)):
            self._together()

    def _judge(
        self,
        blank: Row,
        reports: Sequence[Sequence[Report]],
        ready: Sequence[Prepared],
        case: Case,
        spec: BenchSpec,
    ) -> list[Row]:
        rows, bases = [], []
        for index, of_ranks in enumerate(reports):
            row = make_row(replace(blank, backend=ready[index].team.backend), of_ranks, spec)
            times = turn_times(of_ranks, spec)
            bases.append(times)
            if index:
                row = replace(row, ratio=paired_ratio(times, bases[0]))
            if row.failure is not None:
                self._dump(case, ready[index], of_ranks, row, spec)
            rows.append(row)
        return rows

    def _dump(
        self,
        case: Case,
        prepared: Prepared,
        reports: Sequence[Report],
        row: Row,
        spec: BenchSpec,
    ) -> None:
        """Ranks of a team where something is wrong save what they hold."""
        mine = [reports[rank].checks for rank in prepared.team.ranks]
        if prepared.team.member and any(c.wrong for found in mine for c in found):
            part = reports[self.world.rank].checks[-1].part
            checks.dump(case, prepared, spec, row.size, self.world.rank, part)

    def _together(self) -> None:
        """Every rank is here, and its device idle."""
        self.device.synchronize()
        dist.barrier()

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value)
        return found


def _series(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases that differ in their place alone make one table."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        key = (case.operation.name, case.type.name, case.reduction, case.root)
        found.setdefault(key, []).append(case)
    yield from found.values()


def _named_apart(teams: Sequence[Team]) -> list[Team]:
    """One backend against itself, which shows the noise, needs two names."""
    names = [team.backend for team in teams]
    return [
        replace(team, backend=f"{team.backend}#{names[: i + 1].count(team.backend)}")
        if names.count(team.backend) > 1
        else team
        for i, team in enumerate(teams)
    ]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _limits_in_words(limits: tuple[float | None, float | None], spec: BenchSpec) -> str:
    """What the columns peak(%) and probe(%) are shares of."""
    nominal, measured = limits
    words = []
    if nominal is not None and (spec.comparison.peak is not None or spec.comparison.probe):
        words.append(f"peak {nominal:g} GB/s, the nominal limit")
    if measured is not None:
        words.append(f"probe {measured:.2f} GB/s, plain copies to the neighbour")
    return "; ".join(words)
