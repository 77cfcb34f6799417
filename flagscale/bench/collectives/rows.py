"""How the reports of all ranks about one size become a row of the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flagscale.bench.collectives.bodies import Shape
from flagscale.bench.collectives.checks import Checked
from flagscale.bench.collectives.process_groups import RankGroup
from flagscale.bench.collectives.records import Row
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.timing import Measured


@dataclass(frozen=True)
class Report:
    """What one rank sends to rank 0 about one size on one backend."""

    member: bool
    group: tuple[int, ...]
    turns: tuple[Measured, ...] = ()
    checks: tuple[Checked, ...] = ()
    algorithm: str = "n/a"


def blank_row(case: Case, shapes: Sequence[Shape], group: RankGroup, spec: BenchSpec) -> Row:
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


def turn_times(reports: Sequence[Report], spec: BenchSpec) -> list[float]:
    """The time of each turn, over the ranks by ``-a``."""
    members = [report for report in reports if report.member]
    return [
        _combine([turn.average for turn in of_ranks], spec)
        for of_ranks in zip(*(report.turns for report in members), strict=True)
    ]


def _combine(times: Sequence[float], spec: BenchSpec) -> float:
    if spec.average == "rank0":
        return times[0]
    if spec.average == "mean":
        return math.fsum(times) / len(times)
    return min(times) if spec.average == "min" else max(times)


def make_row(blank: Row, reports: Sequence[Report], spec: BenchSpec) -> Row:
    members = [report for report in reports if report.member]
    turns = turn_times(reports, spec)
    average = math.fsum(turns) / len(turns)
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
    for group in {report.group for report in members}:
        prints = {
            tuple(c.fingerprint for c in report.checks)
            for report in members
            if report.group == group
        }
        if len(prints) > 1:
            return 0, f"Check failed: ranks {group} ended with different bytes"
    return 0, None


def against_limits(row: Row, limits: tuple[float | None, float | None]) -> Row:
    nominal, measured = limits
    return replace(
        row,
        peak_share=row.busbw / nominal if nominal else None,
        probe_share=row.busbw / measured if measured else None,
    )
