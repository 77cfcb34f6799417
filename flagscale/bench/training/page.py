"""One page with all that trials have found. It loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flagscale.bench.training.plan import Training
from flagscale.bench.training.results import ArmResult, SessionResult
from flagscale.bench.training.statistics import smoothed
from flagscale.bench.training.summary import COLUMNS, Line, by_model, cells, findings, sound
from flagscale.files import plain
from flagscale.report.frame import page
from flagscale.report.html import Cell, Html, details, element, facts, join, section, table
from flagscale.report.plot import COLOURS, Plot
from flagscale.report.plot import Line as Curve
from flagscale.report.plot import render as plotted
from flagscale.sample_statistics import percentile

_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_HOW = """\
Every arm has processes of its own; all start from the same weights, learn from the same data and
take turns in an order that a seed draws. A step's time is that of its slowest rank. Exposed is the
part of it in which the rank that waited least had nothing left to compute; compute is the rest;
summing is how long gradients were under way, hidden or not. Slowdowns are ratios of medians of the
same steps with and without traffic; intervals are 95 % by a bootstrap over rounds."""


def render(
    sessions: Sequence[SessionResult],
    found: Sequence[Line],
    training: Training,
    about: Mapping[str, Any],
) -> str:
    """The whole page: a part a model, with its table, its curves, and what was proved."""
    names = [title for title, _ in by_model(sessions)]
    parts = []
    for title, some in by_model(sessions):
        own = [line for line in found if line.model == title]
        plots = element("div", *map(plotted, _plots(some, own)), class_="plots")
        numbers = table(COLUMNS[1:], [cells(line)[1:] for line in own], numbers=True)
        parts.append(section(title, numbers, plots, *map(_session, some)))
    first = facts(
        {
            "command": about.get("command", ""),
            "date": about.get("date", ""),
            "ranks": about.get("ranks", ""),
            "machine": f"{about.get('processor', '')}, {about.get('cores', '')} cores",
        }
    )
    measured = details(
        "how it was measured",
        element("p", _HOW),
        element("pre", json.dumps({**about, "training": plain(training)}, indent=1)),
    )
    return page(f"Training under traffic: {', '.join(names)}", first, *parts, measured)


def _session(session: SessionResult) -> Html:
    told = element("ul", *(element("li", text) for text in findings(session)))
    tables = join(_bytes(one) for one in session.arms if one.sent)
    name = f"bytes, losses and replicas, setting {session.setting}"
    return details(name, told, tables, opened=not sound(session))


def _bytes(one: ArmResult) -> Html:
    """The table of bytes from rank to rank, in MiB."""
    ranks = range(len(one.sent))
    rows = (
        [Cell(f"from {a}", "key"), *(f"{one.sent[a][b] / 2**20:.2f}" for b in ranks)] for a in ranks
    )
    caption = f"{one.arm.name}: MiB from rank to rank, counted by {one.counted_by}"
    return table(["", *(f"to {b}" for b in ranks)], rows, caption=caption, numbers=True)


def _plots(sessions: Sequence[SessionResult], found: Sequence[Line]) -> Iterator[Plot]:
    """Time by setting, then of each setting its distribution and the loss over time and steps."""
    arms = list(dict.fromkeys(line.arm for line in found))
    settings = [session.setting for session in sessions]
    if len(settings) > 1:
        yield Plot(
            *("time a step by setting", "seconds, median"),
            [_by_setting(found, arm, settings, number) for number, arm in enumerate(arms)],
            axis="setting",
            x_ticks=[(float(place), name) for place, name in enumerate(settings)],
            x_range=(-0.2, len(settings) - 0.8),
        )
    for session in sessions:
        yield Plot(
            *(f"time a step, {session.setting}", "seconds"),
            [_distribution(one, number) for number, one in enumerate(session.arms)],
            axis="percentile",
        )
        yield Plot(
            *(f"loss over time, {session.setting}", "smoothed"),
            [_loss(one, number) for number, one in enumerate(session.arms)],
            axis="seconds of training",
        )


def _by_setting(found: Sequence[Line], arm: str, settings: Sequence[str], number: int) -> Curve:
    own = {line.setting: line.median for line in found if line.arm == arm}
    places = [place for place, name in enumerate(settings) if name in own]
    return Curve(arm, places, [own[settings[place]] for place in places], number % COLOURS)


def _distribution(one: ArmResult, number: int) -> Curve:
    values = [percentile(one.steps.seconds, percent) for percent in _PERCENTILES]
    return Curve(one.arm.name, _PERCENTILES, values, number % COLOURS)


def _loss(one: ArmResult, number: int) -> Curve:
    seconds = list(accumulate(one.steps.seconds))
    return Curve(one.arm.name, seconds, smoothed(one.steps.loss), number % COLOURS)
