"""Presentation of a search: the layouts in their order, what was left out, and why others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from flagscale.config.arguments.layout import tokens_per_sample
from flagscale.estimate.plan import GIB
from flagscale.estimate.step_time import format_seconds
from flagscale.tables import FittingTable
from flagscale.tune.prediction import CAUSES
from flagscale.tune.records import FAILED
from flagscale.tune.search import Search
from flagscale.tune.space import Layout, SearchProblem, Space

LISTED_LAYOUTS = 20
_LISTED_EXCEEDING = 3
_LISTED_OTHERS = 5
_MAX_CAUSES = 2
_LEAST_SHARE = 0.05


def render_space(problem: SearchProblem, space: Space) -> RenderableType:
    """Return the list of a dry run: layouts by predicted time, and what was left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("", "layout", "s/step", "tokens/s", "GiB", "where the time goes"):
        justify: Any = "right" if heading in ("", "s/step", "tokens/s", "GiB") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "where the time goes")
    tokens = tokens_per_step(problem)
    for number, layout in enumerate(space.candidates[:LISTED_LAYOUTS], 1):
        seconds = layout.prediction.seconds
        table.add_row(
            str(number),
            layout.key,
            f"{seconds:.3g}",
            f"{tokens / seconds:,.0f}",
            f"{layout.prediction.memory.bytes / GIB:.1f}",
            describe_causes(layout.prediction.seconds_by_cause),
        )
    return Group(FittingTable(table), *describe_space(problem, space))


def render_trials(
    rows: Sequence[Mapping[str, Any]], search: Search, problem: SearchProblem
) -> RenderableType:
    """Return the table of all layouts that were tried, and of the most promising others."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("", "layout", "s/step", "from", "to", "predicted", "tokens/s", "GiB", "why not")
    for heading in headings:
        is_text = heading in ("", "layout", "why not")
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=heading != "why not"
        )
    for row in rows:
        if row["state"] == FAILED:
            table.add_row("x", row["name"], *[""] * 6, f"failed: {row['why']}", style="red")
            continue
        memory = row["memory_gib"]
        table.add_row(
            "*" if row["best"] else "",
            row["name"],
            *(f"{row[name]:.4g}" for name in ("seconds", "low", "high", "predicted_seconds")),
            f"{row['tokens_per_second']:,.0f}",
            "" if memory is None else f"{memory:.1f}",
            row["why"],
        )
    for expectation, layout in search.expected[:_LISTED_OTHERS]:
        low, high = expectation.interval
        table.add_row(
            "-",
            layout.key,
            f"{expectation.seconds:.4g}",
            f"{low:.4g}",
            f"{high:.4g}",
            f"{layout.prediction.seconds:.4g}",
            f"{tokens_per_step(problem) / expectation.seconds:,.0f}",
            "",
            "not tried: expected, not measured",
        )
    lines = []
    if len(search.expected) > _LISTED_OTHERS:
        lines.append(f"{len(search.expected) - _LISTED_OTHERS} other layouts were not tried")
    if proven := search.proven_too_large:
        lines.append(f"{len(proven)} were not tried because a smaller one ran out of memory")
    return Group(FittingTable(table), *lines)


def describe_space(problem: SearchProblem, space: Space) -> Iterator[str]:
    """Describe the size of the space, and layouts that exceed the memory."""
    machine = problem.machine
    yield f"{machine.describe()}: {space.describe()}"
    if not machine.is_known:
        yield (
            "the speed of these devices is not known: the order of the layouts is predicted, "
            "their times only after the first trial"
        )
    if machine.memory_gib is None and machine.cores is None:
        yield "the memory of a device is not known: auto_tuner.memory_model.gpu_memory states it"
    for large in space.too_large[:_LISTED_EXCEEDING]:
        memory_text = f"{large.memory_bytes / GIB:.1f} GiB of {machine.memory_gib:.0f}"
        yield f"left out: {large} takes {memory_text}"
    if not problem.vocabulary_size:
        yield "without embedding and head: vocab_size is not given, and no tokenizer.json is here"


def describe_causes(seconds_by_cause: Mapping[str, float]) -> str:
    """Describe the largest parts of a step's time."""
    total = sum(seconds_by_cause.values())
    shares = sorted(((s / total, cause) for cause, s in seconds_by_cause.items()), reverse=True)
    texts = [f"{CAUSES[cause]} {share:.0%}" for share, cause in shares if share >= _LEAST_SHARE]
    return ", ".join(texts[: _MAX_CAUSES + 1])


def explain_difference(layout: Layout, best: Layout) -> str:
    """Return the causes for which a layout is predicted to take more time than the best one."""
    own, others = layout.prediction.seconds_by_cause, best.prediction.seconds_by_cause
    excess = {cause: own.get(cause, 0.0) - others.get(cause, 0.0) for cause in CAUSES}
    largest = sorted(excess.items(), key=lambda item: -item[1])[:_MAX_CAUSES]
    texts = [
        f"{CAUSES[cause]} +{format_seconds(seconds)}"
        for cause, seconds in largest
        if seconds > 0.01 * best.prediction.seconds
    ]
    return ", ".join(texts)


def tokens_per_step(problem: SearchProblem) -> int:
    return int(problem.values["global_batch_size"] * tokens_per_sample(problem.values))


def space_record(problem: SearchProblem, space: Space) -> dict[str, Any]:
    """Return the same as plain data."""
    return {
        "machine": problem.machine.describe(),
        "is_known": problem.machine.is_known,
        "sizes": space.sizes,
        "hopeless": space.hopeless,
        "layouts": [layout_record(layout) for layout in space.candidates],
        "too_large": [
            {"layout": dict(large.setting), "memory_bytes": large.memory_bytes}
            for large in space.too_large
        ],
    }


def layout_record(layout: Layout) -> dict[str, Any]:
    """Return a layout with its prediction as plain data."""
    return {
        "name": layout.key,
        "layout": dict(layout.setting),
        "seconds": layout.prediction.seconds,
        "seconds_by_cause": dict(layout.prediction.seconds_by_cause),
        "memory_bytes": layout.prediction.memory.bytes,
    }
