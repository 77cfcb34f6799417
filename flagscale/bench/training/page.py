"""HTML page of ``flagscale bench training --report``: tables, plots and findings of all sessions.

The page is a single file without references to others. A session is one model trained under one
network setting by all arms, the compared ways to reduce gradients (:mod:`.arms`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flagscale.bench.statistics import percentile
from flagscale.bench.training.losses import smooth
from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.results import ArmResult, SessionResult
from flagscale.bench.training.summary import (
    COLUMNS,
    ArmSummary,
    format_row,
    group_by_model,
    is_valid,
    list_findings,
)
from flagscale.files import to_plain
from flagscale.report.frame import render_page
from flagscale.report.html import (
    Cell,
    Html,
    definition_list,
    details,
    element,
    join_parts,
    section,
    table,
)
from flagscale.report.plot import COLOURS, Plot, render_plot
from flagscale.report.plot import Line as Curve

_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_METHOD = """\
Every arm has processes of its own; all start from the same weights, train on the same data and
take turns in an order that a seed draws. A step's time is that of its slowest rank. Exposed is the
part of it in which the rank that waited least had nothing left to compute; compute is the rest;
summing is the time in which gradients were being reduced, hidden or not. Slowdowns are ratios of
medians of the
same steps with and without traffic; intervals are 95 % by a bootstrap over rounds."""


def render(
    sessions: Sequence[SessionResult],
    summaries: Sequence[ArmSummary],
    training: TrainingOptions,
    machine: Mapping[str, Any],
) -> str:
    """Return the page: for each model its table, its curves, and the findings."""
    names = [title for title, _ in group_by_model(sessions)]
    parts = []
    for title, model_sessions in group_by_model(sessions):
        model_summaries = [summary for summary in summaries if summary.model == title]
        plots = element(
            "div", *map(render_plot, _plots(model_sessions, model_summaries)), class_="plots"
        )
        numbers = table(
            COLUMNS[1:],
            [format_row(summary)[1:] for summary in model_summaries],
            align_numbers=True,
        )
        parts.append(section(title, numbers, plots, *map(_session_details, model_sessions)))
    conditions = definition_list(
        {
            "command": machine.get("command", ""),
            "date": machine.get("date", ""),
            "ranks": machine.get("ranks", ""),
            "machine": f"{machine.get('processor', '')}, {machine.get('cores', '')} cores",
        }
    )
    method = details(
        "how it was measured",
        element("p", _METHOD),
        element("pre", json.dumps({**machine, "training": to_plain(training)}, indent=1)),
    )
    return render_page(f"Training under traffic: {', '.join(names)}", conditions, *parts, method)


def _session_details(session: SessionResult) -> Html:
    findings = element("ul", *(element("li", text) for text in list_findings(session)))
    tables = join_parts(_byte_table(result) for result in session.arms if result.sent)
    title = f"bytes, losses and replicas, setting {session.setting}"
    return details(title, findings, tables, is_open=not is_valid(session))


def _byte_table(result: ArmResult) -> Html:
    """Return a table of the MiB from rank to rank."""
    ranks = range(len(result.sent))
    rows = (
        [Cell(f"from {a}", "key"), *(f"{result.sent[a][b] / 2**20:.2f}" for b in ranks)]
        for a in ranks
    )
    caption = f"{result.arm.name}: MiB from rank to rank, counted by {result.counted_by}"
    return table(["", *(f"to {b}" for b in ranks)], rows, caption=caption, align_numbers=True)


def _plots(sessions: Sequence[SessionResult], summaries: Sequence[ArmSummary]) -> Iterator[Plot]:
    """Yield the time by setting, then for each setting its distribution and the loss over time."""
    arms = list(dict.fromkeys(summary.arm for summary in summaries))
    settings = [session.setting for session in sessions]
    if len(settings) > 1:
        yield Plot(
            "time a step by setting",
            "seconds, median",
            [_setting_curve(summaries, arm, settings, number) for number, arm in enumerate(arms)],
            axis="setting",
            x_ticks=[(float(position), name) for position, name in enumerate(settings)],
            x_range=(-0.2, len(settings) - 0.8),
        )
    for session in sessions:
        yield Plot(
            f"time a step, {session.setting}",
            "seconds",
            [_distribution_curve(result, number) for number, result in enumerate(session.arms)],
            axis="percentile",
        )
        yield Plot(
            f"loss over time, {session.setting}",
            "smoothed",
            [_loss_curve(result, number) for number, result in enumerate(session.arms)],
            axis="seconds of training",
        )


def _setting_curve(
    summaries: Sequence[ArmSummary], arm: str, settings: Sequence[str], colour_index: int
) -> Curve:
    medians = {s.setting: s.median for s in summaries if s.arm == arm}
    positions = [position for position, name in enumerate(settings) if name in medians]
    return Curve(
        arm,
        positions,
        [medians[settings[position]] for position in positions],
        colour_index % COLOURS,
    )


def _distribution_curve(result: ArmResult, colour_index: int) -> Curve:
    values = [percentile(result.steps.seconds, percent) for percent in _PERCENTILES]
    return Curve(result.arm.name, _PERCENTILES, values, colour_index % COLOURS)


def _loss_curve(result: ArmResult, colour_index: int) -> Curve:
    seconds = list(accumulate(result.steps.seconds))
    return Curve(result.arm.name, seconds, smooth(result.steps.loss), colour_index % COLOURS)
