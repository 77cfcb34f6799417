"""Figures of ``flagscale bench training --plot``: time per step by setting, and loss over time.

A session is one model trained under one network setting by all arms, the compared ways to reduce
gradients (:mod:`.arms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from flagscale.bench.training.losses import smooth
from flagscale.bench.training.results import SessionResult
from flagscale.bench.training.summary import ArmSummary, group_by_model
from flagscale.report.figure import encode_image, new_figure

_STYLES = ("-", "--", ":", "-.")


def write_figure(
    path: Path, sessions: Sequence[SessionResult], summaries: Sequence[ArmSummary]
) -> None:
    """Write an SVG or PNG file with a row per model: bars of each arm's median step time with an
    error bar up to its p99, and its loss curves.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    models = list(group_by_model(sessions))
    figure = new_figure(11, 3.4 * len(models))
    axes = figure.subplots(len(models), 2, squeeze=False)
    for (bar_axes, loss_axes), (title, model_sessions) in zip(axes, models, strict=True):
        _draw_bars(bar_axes, title, [summary for summary in summaries if summary.model == title])
        _draw_losses(loss_axes, title, model_sessions)
    path.write_bytes(encode_image(figure, path.suffix.lower().lstrip(".")))


def _draw_bars(axes: Any, title: str, summaries: Sequence[ArmSummary]) -> None:
    arms = list(dict.fromkeys(summary.arm for summary in summaries))
    settings = list(dict.fromkeys(summary.setting for summary in summaries))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        arm_summaries = [summary for summary in summaries if summary.arm == arm]
        positions = [settings.index(s.setting) + number * width for s in arm_summaries]
        medians = [s.median for s in arm_summaries]
        distances_to_p99 = [s.p99 - s.median for s in arm_summaries]
        axes.bar(
            positions,
            medians,
            width,
            yerr=[[0] * len(arm_summaries), distances_to_p99],
            capsize=3,
            label=arm,
        )
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(settings))], settings)
    axes.set_ylabel("seconds a step, p50 and p99")
    axes.set_title(title)
    axes.legend(fontsize="small")


def _draw_losses(axes: Any, title: str, sessions: Sequence[SessionResult]) -> None:
    for session, style in zip(sessions, _STYLES * len(sessions), strict=False):
        for number, result in enumerate(session.arms):
            seconds = list(accumulate(result.steps.seconds))
            label = f"{result.arm.name}, {session.setting}"
            colour = f"C{number % 10}"
            axes.plot(seconds, smooth(result.steps.loss), style, color=colour, label=label)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss, smoothed")
    axes.set_title(title)
    axes.legend(fontsize="x-small")
