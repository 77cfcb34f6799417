"""Measuring, on every rank at once, and how the reports of all ranks about one size become a row.
Rank 0 gets the rows, the others take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch.distributed as dist

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import checks, collective_calls, patterns
from flagscale.bench.collectives.collective_calls import PreparedBuffers, Shape, prepare, release
from flagscale.bench.collectives.devices import RankGroup, form, probe_copies
from flagscale.bench.collectives.records import Row
from flagscale.bench.collectives.spec import Average, BenchSpec, Case
from flagscale.bench.collectives.timing import Measured, gatherings, measure
from flagscale.bench.collectives.watch import Watch
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.sample_statistics import paired_ratio, percentile

Limits = tuple[float | None, float | None]
"""The nominal and the measured limit of the bus bandwidth, in 1e9 bytes a second."""


class Listener:
    """What hears of the results. This one, for all ranks but 0, does nothing with them."""

    def series(self, cases: Sequence[Case], sizes: int, backends: int) -> None:
        """A table begins."""

    def rows(self, rows: Sequence[Row]) -> None:
        """A size is measured."""

    def end_series(self) -> None:
        """The table is complete."""

    def say(self, text: str) -> None:
        """Something the reader should know, or asked for."""


@dataclass
class Session:
    """All ranks, ready to run a specification."""

    world: BenchWorld
    device: Device
    watch: Watch

    def run(self, spec: BenchSpec, listener: Listener) -> None:
        """Measure everything that ``spec`` says. ``listener`` is rank 0's.

        Raises:
            ConfigError: groups, pairs, counts or roots do not fit the world.
        """
        ranks = patterns.groups_for(self.world.size, spec.groups.custom, spec.groups.dimension)
        groups = self._form(spec, ranks)
        cases = list(spec.cases(groups[0].size))
        # Everything that can be wrong with the counts shows before the first measurement.
        said = [
            n
            for c in cases
            for s in spec.sizes
            for n in collective_calls.shapes(c, s, groups[0], spec)[1]
        ]
        for note in dict.fromkeys(said):
            listener.say(f"note: {note}")
        limits = self._limits(spec)
        if text := _limits_in_words(limits, spec):
            listener.say(f"note: {text}")
        # Cases that differ in their place alone make one table.
        tables: dict[Case, list[Case]] = {}
        for case in cases:
            tables.setdefault(replace(case, in_place=False), []).append(case)
        for _ in range(spec.iterations.cycles):
            for series in tables.values():
                self._series(series, groups, spec, limits, listener)

    def _form(self, spec: BenchSpec, ranks: patterns.Groups) -> list[RankGroup]:
        seconds = spec.placement.timeout * 2 + 60
        groups = []
        for name in spec.backends:
            self.watch.enter(f"the creation of {len(ranks)} group(s) on {name}")
            adapter, values = registry.usable(name, self.device.kind), spec.options_of(name)
            groups.append(form(adapter, ranks, self.world.rank, self.device, seconds, values))
        return _named_apart(groups)

    def _limits(self, spec: BenchSpec) -> Limits:
        nominal = spec.comparison.peak or self.device.nominal_gb
        if not spec.comparison.probe:
            return nominal, None
        self.watch.enter("the probe of plain copies")
        self.together()
        return nominal, min(self.gather(probe_copies(self.device)))

    def _series(
        self,
        cases: Sequence[Case],
        groups: Sequence[RankGroup],
        spec: BenchSpec,
        limits: Limits,
        listener: Listener,
    ) -> None:
        sizes: dict[int, int] = {}
        for size in (0,) if cases[0].operation.name == "barrier" else spec.sizes:
            shapes = collective_calls.shapes(cases[0], size, groups[0], spec)[0]
            # Small sizes may be cut to the same one.
            sizes.setdefault(sum(shape.elements for shape in shapes), size)
        listener.series(cases, len(sizes), len(groups))
        for size in sizes.values():
            rows: list[Row] = []
            for case in cases:
                shapes = collective_calls.shapes(case, size, groups[0], spec)[0]
                blank = _blank_row(case, shapes, groups[0])
                rows += _Size(self, spec, case, blank, groups, listener).rows(shapes)
            listener.rows([_against_limits(row, limits) for row in rows])
        listener.end_series()

    def together(self) -> None:
        """Every rank is here, and its device idle."""
        self.device.synchronize()
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value)
        return found


@dataclass(frozen=True)
class Report:
    """What one rank sends to rank 0 about one size on one backend."""

    member: bool
    group: tuple[int, ...]
    turns: tuple[Measured, ...] = ()
    checks: tuple[checks.Checked, ...] = ()
    algorithm: str = "n/a"


@dataclass
class _Size:
    """One size of one case, on all backends."""

    session: Session
    spec: BenchSpec
    case: Case
    blank: Row
    groups: Sequence[RankGroup]
    listener: Listener
    ready: list[PreparedBuffers] = field(default_factory=list)
    """Of each backend, as the following lists are."""
    checked: list[checks.Checked] = field(default_factory=list)

    def rows(self, shapes: tuple[Shape, ...]) -> list[Row]:
        """A row of each backend, on every rank (only rank 0's are shown)."""
        self.session.watch.enter(f"{self.case.label} {self.blank.size} B, preparation")
        failure = self._attempt(lambda: self._prepare(shapes)) or self._attempt(self._first_run)
        if failure:
            rows = [replace(self.blank, backend=g.backend, failure=failure) for g in self.groups]
        else:
            rows = self._judge(self._reports(self._turns()))
        for prepared in self.ready:
            release(prepared, self.session.device)
        return rows

    def _prepare(self, shapes: tuple[Shape, ...]) -> None:
        device = self.session.device
        for group in self.groups:
            self.ready.append(prepare(self.case, shapes, group, device, self.spec))
        device.synchronize()

    def _first_run(self) -> None:
        """The first check, and what the first call of all allocates or connects."""
        case, device, spec = self.case, self.session.device, self.spec
        for prepared in self.ready:
            if spec.output.print_buffers and case.operation.name != "barrier":
                said = checks.sample(case, prepared, device, spec)
                whose = f"{prepared.group.backend}, rank {self.session.world.rank}"
                self.listener.say(f"{self.blank.size} B, {whose}: {said}")
            self.checked.append(checks.check(case, prepared, device, spec))
            for step in prepared.steps(min(1, len(prepared.bodies))):
                step()
        device.synchronize()

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Do ``work`` on every rank; what went wrong on the first rank where it did."""
        problem = None
        try:
            work()
        except (RuntimeError, MemoryError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problem = lines[0][:200]
        found = self.session.gather(problem)
        failed = [rank for rank, text in enumerate(found) if text]
        return f"Failure on rank {failed[0]}: {found[failed[0]]}" if failed else None

    def _turns(self) -> list[list[Measured]]:
        """This rank's times, a turn after the other."""
        session, spec = self.session, self.spec
        turns: list[list[Measured]] = [[] for _ in self.ready]
        warmups = spec.iterations.warmup
        rounds = spec.comparison.rounds if len(self.ready) > 1 else 1
        count = -(-spec.iterations.measured // rounds)
        session.watch.enter(f"{self.case.label} {self.blank.size} B")
        for prepared in self.ready:
            checks.clear(prepared)
        for number in range(rounds):
            # By turns, and each first as often as last: a drift hits all alike.
            order = range(len(self.ready)) if number % 2 == 0 else reversed(range(len(self.ready)))
            for index in order:
                prepared = self.ready[index]
                if not prepared.bodies:
                    # A rank outside of all groups keeps step with the others.
                    for _ in range(gatherings(session.device, spec)):
                        session.together()
                    continue
                steps, warmup = prepared.steps(count, warmups), prepared.steps(warmups)
                marks, start = session.watch.marks, session.together
                turns[index].append(measure(steps, warmup, session.device, spec, marks, start))
        return turns

    def _reports(self, turns: Sequence[Sequence[Measured]]) -> list[list[Report]]:
        """Check once more, after the timing, and tell everyone: all ranks' reports."""
        session = self.session
        session.watch.enter(f"{self.case.label} {self.blank.size} B, check")
        reports = []
        for prepared, first, own in zip(self.ready, self.checked, turns, strict=True):
            second = checks.check(self.case, prepared, session.device, self.spec)
            group, shows = prepared.group, self.spec.output.show_algorithm
            algorithm = collective_calls.algorithm(group, session.device) if shows else "n/a"
            report = Report(group.member, group.ranks, tuple(own), (first, second), algorithm)
            reports.append(session.gather(report))
        return reports

    def _judge(self, reports: Sequence[Sequence[Report]]) -> list[Row]:
        rows: list[Row] = []
        base = _turn_times(reports[0], self.spec)
        for prepared, of_ranks in zip(self.ready, reports, strict=True):
            blank = replace(self.blank, backend=prepared.group.backend)
            row = _make_row(blank, of_ranks, self.spec)
            if rows:
                row = replace(row, ratio=paired_ratio(_turn_times(of_ranks, self.spec), base))
            if row.failure is not None:
                self._dump(prepared, of_ranks)
            rows.append(row)
        return rows

    def _dump(self, prepared: PreparedBuffers, reports: Sequence[Report]) -> None:
        """Ranks of a group where something is wrong save what they hold."""
        mine = [reports[rank].checks for rank in prepared.group.ranks]
        if prepared.group.member and any(c.wrong for found in mine for c in found):
            rank = self.session.world.rank
            part = reports[rank].checks[-1].part
            checks.dump(self.case, prepared, self.spec, self.blank.size, rank, part)


def _named_apart(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """One backend against itself, which shows the noise, needs two names."""
    names = [group.backend for group in groups]
    return [
        replace(group, backend=f"{group.backend}#{names[: i + 1].count(group.backend)}")
        if names.count(group.backend) > 1
        else group
        for i, group in enumerate(groups)
    ]


def _limits_in_words(limits: Limits, spec: BenchSpec) -> str:
    """What the columns peak(%) and probe(%) are shares of."""
    nominal, measured = limits
    words = []
    if nominal is not None and (spec.comparison.peak is not None or spec.comparison.probe):
        words.append(f"peak {nominal:g} GB/s, the nominal limit")
    if measured is not None:
        words.append(f"probe {measured:.2f} GB/s, plain copies to the neighbour")
    return "; ".join(words)


def _blank_row(case: Case, shapes: Sequence[Shape], group: RankGroup) -> Row:
    element = case.type.bytes
    count = sum(shape.elements for shape in shapes)
    return Row(
        operation=case.operation.name,
        type=case.type.name,
        nccl_type=case.type.nccl,
        reduction=case.reduction,
        root=case.root,
        in_place=case.in_place,
        backend=group.backend,
        ranks=group.size,
        size=count * element,
        count=count,
        input_bytes=sum(shape.inputs for shape in shapes) * element,
        output_bytes=sum(shape.outputs for shape in shapes) * element,
        bus_factor=case.operation.bus_factor(group.size),
    )


_OVER_RANKS: dict[Average, Callable[[Sequence[float]], float]] = {
    **{"rank0": lambda times: times[0], "mean": fmean, "min": min, "max": max}
}


def _turn_times(reports: Sequence[Report], spec: BenchSpec) -> list[float]:
    """The time of each turn, over the ranks by ``-a``."""
    over_ranks = _OVER_RANKS[spec.average]
    turns = zip(*(report.turns for report in reports if report.member), strict=True)
    return [over_ranks([turn.average for turn in of_ranks]) for of_ranks in turns]


def _make_row(blank: Row, reports: Sequence[Report], spec: BenchSpec) -> Row:
    members = [report for report in reports if report.member]
    average = fmean(_turn_times(reports, spec))
    # Of each iteration the longest over the ranks: that is what everyone waited for.
    samples = [
        max(of_ranks)
        for turn in zip(*(report.turns for report in members), strict=True)
        for of_ranks in zip(*(measured.samples for measured in turn), strict=True)
    ]
    statistics = {
        s.heading: s.value(average, samples) for s in spec.output.statistics if s.name != "avg"
    }
    wrong, failure = _correctness(members, spec, blank)
    return replace(
        blank,
        time=average,
        statistics=statistics,
        samples=len(samples),
        spread=(percentile(samples, 25), percentile(samples, 75)) if len(samples) > 1 else None,
        algorithm=members[0].algorithm,
        wrong=wrong,
        failure=failure,
    )


def _correctness(
    members: Sequence[Report], spec: BenchSpec, blank: Row
) -> tuple[int | None, str | None]:
    if spec.check.mode is None or blank.operation == "barrier":
        return None, None
    wrong = sum(check.wrong for report in members for check in report.checks)
    if wrong:
        first = next(c.first for report in members for c in report.checks if c.wrong)
        ranks = sum(any(c.wrong for c in report.checks) for report in members)
        what = f"{wrong} wrong in all; {first}"
        where = f"data in {spec.check.dump_shown}"
        return wrong, f"Check failed on {ranks} of {len(members)} ranks: {what} - {where}"
    prints: dict[tuple[int, ...], set[tuple[bytes, ...]]] = {}
    for report in members:
        found = tuple(check.fingerprint for check in report.checks)
        prints.setdefault(report.group, set()).add(found)
    for group, different in prints.items():
        if len(different) > 1:
            return 0, f"Check failed: ranks {group} ended with different bytes"
    return 0, None


def _against_limits(row: Row, limits: Limits) -> Row:
    nominal, measured = limits
    return replace(
        row,
        peak_share=row.busbw / nominal if nominal else None,
        probe_share=row.busbw / measured if measured else None,
    )
