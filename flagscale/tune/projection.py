"""Prediction for more hosts, from measurements of some layouts on a few.

Computation of a layout on many hosts is corrected by the measurements. Communication between hosts
that none of them had is calculated from the bandwidth of the network; its uncertainty is that of
the prior.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from flagscale.errors import ConfigError, Problem
from flagscale.estimate.plan import GIB
from flagscale.tables import FittingTable
from flagscale.tune.belief import Belief, Expectation
from flagscale.tune.prediction import CAUSES
from flagscale.tune.search import Result
from flagscale.tune.show import LISTED_LAYOUTS, layout_record, tokens_per_step
from flagscale.tune.space import Layout, SearchProblem, enumerate_space

_FORM = re.compile(r"(?:nodes=)?(?P<nodes>[1-9][0-9]*)(?:,batch=(?P<batch>[1-9][0-9]*))?")
_GB = 1e9


class Target(NamedTuple):
    """Number of hosts, and of sequences per step; None for the experiment's own."""

    nodes: int
    batch: int | None


def parse_target(text: str) -> Target:
    """Parse the option ``project``.

    Raises:
        ConfigError: It has another form.
    """
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            Problem("project", f"expected nodes=64, or nodes=64,batch=4096; found {text}")
        )
    return Target(int(match["nodes"]), int(match["batch"]) if match["batch"] else None)


@dataclass(frozen=True)
class Projection:
    """Layouts on more hosts with their expected times, fastest first.

    ``unmeasured`` are causes of the best layout's time that no measured layout had.
    """

    problem: SearchProblem
    layouts: Sequence[tuple[Layout, Expectation]]
    measured: Sequence[Result]
    unmeasured: Sequence[str]


def project(
    problem: SearchProblem, belief: Belief, measured: Sequence[Result], target: Target
) -> Projection:
    """Predict the layouts of another number of hosts.

    Raises:
        ConfigError: No layout is legal and fits there.
    """
    values = {**problem.values, "global_batch_size": target.batch or tokens_batch(problem)}
    large = replace(problem, values=values, machine=problem.machine.with_hosts(target.nodes))
    space = enumerate_space(large)
    if not space.candidates:
        raise ConfigError(
            Problem("project", f"no layout is legal and fits {large.machine.describe()}"),
            hint="the batch must be divisible by the data-parallel ranks: "
            f"project=nodes={target.nodes},batch=N",
        )
    expected = [(layout, belief.expect(layout)) for layout in space.candidates]
    expected.sort(key=lambda pair: pair[1].seconds)
    seen = set[str]().union(*(result.layout.prediction.main_causes for result in measured))
    best = expected[0][0].prediction
    missing = best.main_causes - seen
    unmeasured = [cause for cause in best.seconds_by_cause if cause in missing]
    return Projection(large, expected, measured, unmeasured)


def tokens_batch(problem: SearchProblem) -> int:
    return int(problem.values["global_batch_size"])


def render_projection(projection: Projection) -> RenderableType:
    """Return the table of a projection, and the measurements that it rests on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("", "layout", "s/step", "from", "to", "tokens/s", "GiB"):
        is_text = heading in ("", "layout")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    tokens = tokens_per_step(projection.problem)
    for number, (layout, expectation) in enumerate(projection.layouts[:LISTED_LAYOUTS], 1):
        low, high = expectation.interval
        table.add_row(
            str(number),
            layout.key,
            *(f"{seconds:.3g}" for seconds in (expectation.seconds, low, high)),
            f"{tokens / expectation.seconds:,.0f}",
            f"{layout.prediction.memory.bytes / GIB:.1f}",
        )
    return Group(FittingTable(table), *describe_projection(projection))


def describe_projection(projection: Projection) -> Iterator[str]:
    """Yield lines about what a projection rests on."""
    machine = projection.problem.machine
    names = ", ".join(result.layout.key for result in projection.measured[:3])
    yield (
        f"{machine.describe()}, {tokens_batch(projection.problem)} sequences per step; not "
        f"measured there: it rests on {len(projection.measured)} measured layout(s) ({names})"
    )
    bandwidth = machine.network_bytes_per_second / _GB
    yield f"a bandwidth of {bandwidth:.3g} GB/s per rank is assumed between hosts"
    if projection.unmeasured:
        causes = ", ".join(CAUSES[cause] for cause in projection.unmeasured)
        yield f"by calculation alone: {causes}"


def projection_record(projection: Projection) -> dict[str, Any]:
    """Return a projection as plain data."""
    return {
        "machine": projection.problem.machine.describe(),
        "global_batch_size": tokens_batch(projection.problem),
        "rests_on": [result.layout.key for result in projection.measured],
        "by_calculation_alone": list(projection.unmeasured),
        "layouts": [
            {
                **layout_record(layout),
                "expected_seconds": expectation.seconds,
                "interval": list(expectation.interval),
            }
            for layout, expectation in projection.layouts
        ],
    }
