"""Measurement of a :class:`.BenchSpec` on all ranks, and combination of their reports into result
rows.

Called by :mod:`.worker` on every rank. Rank 0's listener receives the rows; the other ranks take
part. A *case* is an operation with its type, reduction and root; a *series* is all sizes of the
cases that share a table. Several backends are compared by turns: in each round every backend is
timed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch.distributed as dist

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import checks, collective_calls, patterns
from flagscale.bench.collectives.collective_calls import (
    BufferSizes,
    PreparedBuffers,
    prepare_buffers,
    release_buffers,
)
from flagscale.bench.collectives.devices import RankGroup, create_group, probe_copies
from flagscale.bench.collectives.records import ResultRow
from flagscale.bench.collectives.spec import Average, BenchSpec, Case
from flagscale.bench.collectives.timing import TurnTimes, count_barriers, measure
from flagscale.bench.collectives.watch import ProgressWatch
from flagscale.bench.statistics import paired_ratio, percentile
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry

Limits = tuple[float | None, float | None]
"""Nominal and measured limit of the bus bandwidth, in 1e9 bytes per second; None if unknown."""


class ResultListener:
    """Receiver of the results. This base class, for all ranks except 0, ignores them."""

    def on_series(self, cases: Sequence[Case], size_count: int, backend_count: int) -> None:
        """Called before a series, with the numbers of its sizes and backends."""

    def on_rows(self, rows: Sequence[ResultRow]) -> None:
        """Called when a size has been measured, with a row per case and backend."""

    def on_series_end(self) -> None:
        """Called after a series."""

    def on_note(self, text: str) -> None:
        """Called with a note for the reader."""


@dataclass
class Session:
    """All ranks, ready to run a specification."""

    world: BenchWorld
    device: Device
    watch: ProgressWatch

    def run(self, spec: BenchSpec, listener: ResultListener) -> None:
        """Measure everything in ``spec``. ``listener`` is rank 0's.

        Raises:
            ConfigError: groups, pairs, counts or roots do not fit the world.
        """
        ranks = patterns.groups_for(self.world.size, spec.groups.custom, spec.groups.dimension)
        groups = self._create_groups(spec, ranks)
        cases = list(spec.cases(groups[0].size))
        # Errors in the counts are raised before the first measurement.
        notes = [
            note
            for case in cases
            for size in spec.sizes
            for note in collective_calls.compute_buffer_sizes(case, size, groups[0], spec)[1]
        ]
        for note in dict.fromkeys(notes):
            listener.on_note(f"note: {note}")
        limits = self._measure_limits(spec)
        if text := _describe_limits(limits, spec):
            listener.on_note(f"note: {text}")
        # Cases that differ only in whether they are in place share a table.
        tables: dict[Case, list[Case]] = {}
        for case in cases:
            tables.setdefault(replace(case, in_place=False), []).append(case)
        for _ in range(spec.iterations.cycles):
            for series in tables.values():
                self._run_series(series, groups, spec, limits, listener)

    def _create_groups(self, spec: BenchSpec, ranks: patterns.Groups) -> list[RankGroup]:
        """Return this rank's group on each backend. ``ranks``: the ranks of each group."""
        timeout_seconds = spec.placement.timeout * 2 + 60
        groups = []
        for name in spec.backends:
            self.watch.enter_stage(f"the creation of {len(ranks)} group(s) on {name}")
            backend = registry.get_usable_backend(name, self.device.kind)
            options = spec.options_of(name)
            groups.append(
                create_group(backend, ranks, self.world.rank, self.device, timeout_seconds, options)
            )
        return _number_duplicates(groups)

    def _measure_limits(self, spec: BenchSpec) -> Limits:
        nominal = spec.comparison.peak or self.device.nominal_bus_gb_per_second
        if not spec.comparison.probe:
            return nominal, None
        self.watch.enter_stage("the probe of plain copies")
        self.barrier()
        return nominal, min(self.gather(probe_copies(self.device)))

    def _run_series(
        self,
        cases: Sequence[Case],
        groups: Sequence[RankGroup],
        spec: BenchSpec,
        limits: Limits,
        listener: ResultListener,
    ) -> None:
        sizes: dict[int, int] = {}
        for size in (0,) if cases[0].operation.name == "barrier" else spec.sizes:
            part_sizes = collective_calls.compute_buffer_sizes(cases[0], size, groups[0], spec)[0]
            # Several small sizes may be rounded to the same one.
            sizes.setdefault(sum(part.elements for part in part_sizes), size)
        listener.on_series(cases, len(sizes), len(groups))
        for size in sizes.values():
            rows: list[ResultRow] = []
            for case in cases:
                part_sizes = collective_calls.compute_buffer_sizes(case, size, groups[0], spec)[0]
                empty_row = _make_empty_row(case, part_sizes, groups[0])
                measurement = _SizeMeasurement(self, spec, case, empty_row, groups, listener)
                rows += measurement.measure(part_sizes)
            listener.on_rows([_add_limit_fractions(row, limits) for row in rows])
        listener.on_series_end()

    def barrier(self) -> None:
        """Wait for every rank and its device."""
        self.device.synchronize()
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class RankReport:
    """Results of one rank for one size on one backend."""

    member: bool
    """The rank is in a group. Others have no times and no checks."""
    group: tuple[int, ...]
    """Global ranks of its group."""
    turns: tuple[TurnTimes, ...] = ()
    """Times of each round."""
    checks: tuple[checks.CheckResult, ...] = ()
    last_algorithm: str = "n/a"


@dataclass
class _SizeMeasurement:
    """One size of one case on all backends."""

    session: Session
    spec: BenchSpec
    case: Case
    empty_row: ResultRow
    """Row without results, which the rows of all backends are made from."""
    groups: Sequence[RankGroup]
    listener: ResultListener
    prepared_buffers: list[PreparedBuffers] = field(default_factory=list)
    """Buffers of each backend, in the order of ``groups``."""
    first_checks: list[checks.CheckResult] = field(default_factory=list)
    """Result of the check before the timing, in the order of ``groups``."""

    def measure(self, part_sizes: tuple[BufferSizes, ...]) -> list[ResultRow]:
        """Return a row per backend. All ranks return rows, of which only rank 0's are displayed."""
        self.session.watch.enter_stage(f"{self.case.label} {self.empty_row.size} B, preparation")
        failure = self._attempt(lambda: self._prepare(part_sizes)) or self._attempt(
            self._run_first_check
        )
        if failure:
            rows = [
                replace(self.empty_row, backend=group.backend, failure=failure)
                for group in self.groups
            ]
        else:
            rows = self._make_rows(self._gather_reports(self._time_turns()))
        for prepared in self.prepared_buffers:
            release_buffers(prepared, self.session.device)
        return rows

    def _prepare(self, part_sizes: tuple[BufferSizes, ...]) -> None:
        device = self.session.device
        for group in self.groups:
            self.prepared_buffers.append(
                prepare_buffers(self.case, part_sizes, group, device, self.spec)
            )
        device.synchronize()

    def _run_first_check(self) -> None:
        """Run the check before the timing, and the first call, which allocates and connects."""
        case, device, spec = self.case, self.session.device, self.spec
        for prepared in self.prepared_buffers:
            if spec.output.print_buffers and case.operation.name != "barrier":
                values = checks.format_sample(case, prepared, device, spec)
                rank_name = f"{prepared.group.backend}, rank {self.session.world.rank}"
                self.listener.on_note(f"{self.empty_row.size} B, {rank_name}: {values}")
            self.first_checks.append(checks.check_output(case, prepared, device, spec))
            for step in prepared.steps(min(1, len(prepared.bodies))):
                step()
        device.synchronize()

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Call ``work`` on every rank, and return the error of the first rank that has one."""
        error_text = None
        try:
            work()
        except (RuntimeError, MemoryError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            error_text = lines[0][:200]
        error_texts = self.session.gather(error_text)
        failed_ranks = [rank for rank, text in enumerate(error_texts) if text]
        return (
            f"Failure on rank {failed_ranks[0]}: {error_texts[failed_ranks[0]]}"
            if failed_ranks
            else None
        )

    def _time_turns(self) -> list[list[TurnTimes]]:
        """Return this rank's times of each backend, one entry per turn."""
        session, spec = self.session, self.spec
        turns: list[list[TurnTimes]] = [[] for _ in self.prepared_buffers]
        warmup_count = spec.iterations.warmup
        rounds = spec.comparison.rounds if len(self.prepared_buffers) > 1 else 1
        steps_per_round = -(-spec.iterations.measured // rounds)
        session.watch.enter_stage(f"{self.case.label} {self.empty_row.size} B")
        for prepared in self.prepared_buffers:
            checks.clear_buffers(prepared)
        for round_number in range(rounds):
            # Alternating order: a drift of the machine affects all backends alike.
            order = (
                range(len(self.prepared_buffers))
                if round_number % 2 == 0
                else reversed(range(len(self.prepared_buffers)))
            )
            for index in order:
                prepared = self.prepared_buffers[index]
                if not prepared.bodies:
                    # A rank outside of all groups takes part in the same barriers.
                    for _ in range(count_barriers(session.device, spec)):
                        session.barrier()
                    continue
                steps, warmup_steps = (
                    prepared.steps(steps_per_round, warmup_count),
                    prepared.steps(warmup_count),
                )
                marks, barrier = session.watch.marks, session.barrier
                turns[index].append(
                    measure(steps, warmup_steps, session.device, spec, marks, barrier)
                )
        return turns

    def _gather_reports(self, turns: Sequence[Sequence[TurnTimes]]) -> list[list[RankReport]]:
        """Check again after the timing, and return all ranks' reports."""
        session = self.session
        session.watch.enter_stage(f"{self.case.label} {self.empty_row.size} B, check")
        reports = []
        for prepared, first_check, times in zip(
            self.prepared_buffers, self.first_checks, turns, strict=True
        ):
            second_check = checks.check_output(self.case, prepared, session.device, self.spec)
            group, show_algorithm = prepared.group, self.spec.output.show_algorithm
            last_algorithm = (
                collective_calls.last_algorithm(group, session.device) if show_algorithm else "n/a"
            )
            report = RankReport(
                group.is_member,
                group.ranks,
                tuple(times),
                (first_check, second_check),
                last_algorithm,
            )
            reports.append(session.gather(report))
        return reports

    def _make_rows(self, reports: Sequence[Sequence[RankReport]]) -> list[ResultRow]:
        rows: list[ResultRow] = []
        base_times = _turn_times(reports[0], self.spec)
        for prepared, backend_reports in zip(self.prepared_buffers, reports, strict=True):
            empty_row = replace(self.empty_row, backend=prepared.group.backend)
            row = _make_row(empty_row, backend_reports, self.spec)
            if rows:
                row = replace(
                    row, ratio=paired_ratio(_turn_times(backend_reports, self.spec), base_times)
                )
            if row.failure is not None:
                self._dump_wrong(prepared, backend_reports)
            rows.append(row)
        return rows

    def _dump_wrong(self, prepared: PreparedBuffers, reports: Sequence[RankReport]) -> None:
        """Save the buffers on ranks of a group with wrong results."""
        checks_by_rank = [reports[rank].checks for rank in prepared.group.ranks]
        if prepared.group.is_member and any(
            c.wrong_count for checks_of_rank in checks_by_rank for c in checks_of_rank
        ):
            rank = self.session.world.rank
            part = reports[rank].checks[-1].first_wrong_part
            checks.dump_buffers(self.case, prepared, self.spec, self.empty_row.size, rank, part)


def _number_duplicates(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Return the groups with numbered backend names where a backend is compared with itself. Such a
    comparison measures the noise.
    """
    names = [group.backend for group in groups]
    return [
        replace(group, backend=f"{group.backend}#{names[: i + 1].count(group.backend)}")
        if names.count(group.backend) > 1
        else group
        for i, group in enumerate(groups)
    ]


def _describe_limits(limits: Limits, spec: BenchSpec) -> str:
    """Describe the limits that the columns peak(%) and probe(%) refer to."""
    nominal, measured = limits
    words = []
    if nominal is not None and (spec.comparison.peak is not None or spec.comparison.probe):
        words.append(f"peak {nominal:g} GB/s, the nominal limit")
    if measured is not None:
        words.append(f"probe {measured:.2f} GB/s, plain copies to the neighbour")
    return "; ".join(words)


def _make_empty_row(case: Case, part_sizes: Sequence[BufferSizes], group: RankGroup) -> ResultRow:
    element_bytes = case.type.bytes
    count = sum(part.elements for part in part_sizes)
    return ResultRow(
        operation=case.operation.name,
        type=case.type.name,
        nccl_type=case.type.nccl,
        reduction=case.reduction,
        root=case.root,
        in_place=case.in_place,
        backend=group.backend,
        ranks=group.size,
        size=count * element_bytes,
        count=count,
        input_bytes=sum(part.input_elements for part in part_sizes) * element_bytes,
        output_bytes=sum(part.output_elements for part in part_sizes) * element_bytes,
        bus_factor=case.operation.bus_factor(group.size),
    )


_AVERAGE_FUNCTIONS: dict[Average, Callable[[Sequence[float]], float]] = {
    "rank0": lambda times: times[0],
    "mean": fmean,
    "min": min,
    "max": max,
}


def _turn_times(reports: Sequence[RankReport], spec: BenchSpec) -> list[float]:
    """Return the time of each turn in microseconds, combined over the ranks as ``-a`` selects."""
    combine = _AVERAGE_FUNCTIONS[spec.average]
    turns = zip(*(report.turns for report in reports if report.member), strict=True)
    return [combine([turn.average for turn in rank_turns]) for rank_turns in turns]


def _make_row(empty_row: ResultRow, reports: Sequence[RankReport], spec: BenchSpec) -> ResultRow:
    member_reports = [report for report in reports if report.member]
    average = fmean(_turn_times(reports, spec))
    # The time of an iteration is that of its slowest rank, because all ranks wait for it.
    samples = [
        max(rank_times)
        for rank_turns in zip(*(report.turns for report in member_reports), strict=True)
        for rank_times in zip(*(turn_times.samples for turn_times in rank_turns), strict=True)
    ]
    statistics = {
        s.heading: s.value(average, samples) for s in spec.output.statistics if s.name != "avg"
    }
    wrong, failure = _combine_checks(member_reports, spec, empty_row)
    return replace(
        empty_row,
        time=average,
        statistics=statistics,
        samples=len(samples),
        spread=(percentile(samples, 25), percentile(samples, 75)) if len(samples) > 1 else None,
        algorithm=member_reports[0].last_algorithm,
        wrong=wrong,
        failure=failure,
    )


def _combine_checks(
    member_reports: Sequence[RankReport], spec: BenchSpec, empty_row: ResultRow
) -> tuple[int | None, str | None]:
    if spec.check.mode is None or empty_row.operation == "barrier":
        return None, None
    wrong = sum(check.wrong_count for report in member_reports for check in report.checks)
    if wrong:
        first_failure = next(
            c.description for report in member_reports for c in report.checks if c.wrong_count
        )
        failed_ranks = sum(any(c.wrong_count for c in report.checks) for report in member_reports)
        summary = f"{wrong} wrong elements in total; {first_failure}"
        location = f"data in {spec.check.dump_shown}"
        rank_text = f"{failed_ranks} of {len(member_reports)} ranks"
        return wrong, f"Check failed on {rank_text}: {summary} - {location}"
    fingerprints: dict[tuple[int, ...], set[tuple[bytes, ...]]] = {}
    for report in member_reports:
        fingerprint = tuple(check.fingerprint for check in report.checks)
        fingerprints.setdefault(report.group, set()).add(fingerprint)
    for group, distinct_fingerprints in fingerprints.items():
        if len(distinct_fingerprints) > 1:
            return 0, f"Check failed: ranks {group} ended with different bytes"
    return 0, None


def _add_limit_fractions(row: ResultRow, limits: Limits) -> ResultRow:
    nominal, measured = limits
    return replace(
        row,
        peak_share=row.busbw / nominal if nominal else None,
        probe_share=row.busbw / measured if measured else None,
    )
