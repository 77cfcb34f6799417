"""The figures of trials as SVG or PNG, for papers: time a step by setting, loss over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from flagscale.bench.training.results import SessionResult
from flagscale.bench.training.statistics import smoothed
from flagscale.bench.training.summary import Line, by_model
from flagscale.report.figure import image_of, new_figure

_STYLES = ("-", "--", ":", "-.")


def write(path: Path, sessions: Sequence[SessionResult], found: Sequence[Line]) -> None:
    """Write a row a model: bars of each arm's median, with p99 above, and curves of its loss.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    models = list(by_model(sessions))
    figure = new_figure(11, 3.4 * len(models))
    axes = figure.subplots(len(models), 2, squeeze=False)
    for (bars, curves), (title, some) in zip(axes, models, strict=True):
        _bars(bars, title, [line for line in found if line.model == title])
        _curves(curves, title, some)
    path.write_bytes(image_of(figure, path.suffix.lower().lstrip(".")))


def _bars(axes: Any, title: str, found: Sequence[Line]) -> None:
    arms = list(dict.fromkeys(line.arm for line in found))
    settings = list(dict.fromkeys(line.setting for line in found))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        own = [line for line in found if line.arm == arm]
        places = [settings.index(line.setting) + number * width for line in own]
        medians = [line.median for line in own]
        tails = [line.p99 - line.median for line in own]
        axes.bar(places, medians, width, yerr=[[0] * len(own), tails], capsize=3, label=arm)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(settings))], settings)
    axes.set_ylabel("seconds a step, p50 and p99")
    axes.set_title(title)
    axes.legend(fontsize="small")


def _curves(axes: Any, title: str, sessions: Sequence[SessionResult]) -> None:
    for session, style in zip(sessions, _STYLES * len(sessions), strict=False):
        for number, one in enumerate(session.arms):
            seconds = list(accumulate(one.steps.seconds))
            label = f"{one.arm.name}, {session.setting}"
            colour = f"C{number % 10}"
            axes.plot(seconds, smoothed(one.steps.loss), style, color=colour, label=label)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss, smoothed")
    axes.set_title(title)
    axes.legend(fontsize="x-small")
