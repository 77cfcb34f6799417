"""Output of ``flagscale bench training``: tables on the terminal, and files with the results.

A session is one model trained under one network setting by all arms, the compared ways to reduce
gradients (:mod:`.arms`). A summary (:mod:`.summary`) has the statistics of one arm in one session.
The figures and the HTML page are in :mod:`.figures` and :mod:`.page`.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.results import SessionResult, Steps
from flagscale.bench.training.summary import (
    COLUMNS,
    MIN_P99_STEPS,
    ArmSummary,
    format_row,
    group_by_model,
    list_findings,
    summarize_arms,
)
from flagscale.files import to_plain, write_atomic

_FILE_MODE = 0o644
_PIPE_WIDTH = 180


@dataclass(frozen=True)
class OutputFiles:
    """Files to write."""

    json: Path | None = None
    csv: Path | None = None
    report: Path | None = None
    plots: tuple[Path, ...] = ()


def present_results(
    sessions: Sequence[SessionResult],
    training: TrainingOptions,
    machine: Mapping[str, Any],
    files: OutputFiles,
) -> None:
    """Print the results of sessions, and write them to files.

    Raises:
        OSError: a file cannot be written.
    """
    summaries = summarize_arms(sessions)
    # Lines are not folded in a pipe or file.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(highlight=False, soft_wrap=True, width=width)
    console.print(median_table(summaries))
    console.print(detail_table(summaries))
    for text in list_notes(sessions, summaries):
        console.print(Text(text))
    if files.json is not None:
        record = to_json_record(sessions, training, machine, summaries)
        write_atomic(files.json, json.dumps(record, indent=1) + "\n", _FILE_MODE)
    if files.csv is not None:
        write_atomic(files.csv, format_csv(sessions), _FILE_MODE)
    if files.report is not None:
        from flagscale.bench.training.page import render

        write_atomic(files.report, render(sessions, summaries, training, machine), _FILE_MODE)
    for path in files.plots:
        from flagscale.bench.training.figures import write_figure

        write_figure(path, sessions, summaries)


def median_table(summaries: Sequence[ArmSummary]) -> Table:
    """Return the median seconds per step by model, setting and arm, with the fastest arm of each
    row in bold."""
    table = Table(title="seconds a step (median), lower is better", box=box.SIMPLE_HEAD)
    arms = list(dict.fromkeys(summary.arm for summary in summaries))
    for heading in ("model", "setting"):
        table.add_column(heading)
    for arm in arms:
        table.add_column(arm, justify="right")
    rows: dict[tuple[str, str], dict[str, ArmSummary]] = {}
    for summary in summaries:
        rows.setdefault((summary.model, summary.setting), {})[summary.arm] = summary
    previous = ""
    for (model, setting), summaries_by_arm in rows.items():
        fastest = min(summaries_by_arm.values(), key=lambda summary: summary.median)
        cells = [
            Text(
                f"{summaries_by_arm[arm].median:.4g}",
                style="bold" if summaries_by_arm[arm] is fastest else "",
            )
            for arm in arms
        ]
        table.add_row(model if model != previous else "", setting, *cells)
        previous = model
    return table


def detail_table(summaries: Sequence[ArmSummary]) -> Table:
    """Return the table of all statistics of each arm."""
    table = Table(title="a step's parts", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if number < 3 else "right")
    for summary in summaries:
        table.add_row(*format_row(summary))
    return table


def list_notes(sessions: Sequence[SessionResult], summaries: Sequence[ArmSummary]) -> list[str]:
    """Return the findings of each session, and limits of the numbers."""
    notes = []
    for title, model_sessions in group_by_model(sessions):
        for session in model_sessions:
            notes += [f"{title}, {session.setting}: {text}" for text in list_findings(session)]
    min_steps = min(summary.steps for summary in summaries)
    if min_steps < MIN_P99_STEPS:
        notes.append(
            f"{min_steps} steps an arm: a 99th percentile of fewer than {MIN_P99_STEPS} is little "
            "more than the slowest step"
        )
    return notes


def to_json_record(
    sessions: Sequence[SessionResult],
    training: TrainingOptions,
    machine: Mapping[str, Any],
    summaries: Sequence[ArmSummary],
) -> dict[str, Any]:
    """Return the record for the JSON file: conditions, summary, findings, and every step."""
    findings = [
        {"model": s.model.name, "setting": s.setting, "findings": list_findings(s)}
        for s in sessions
    ]
    return {
        **machine,
        "training": to_plain(training),
        "summary": to_plain(tuple(summaries)),
        "findings": findings,
        "sessions": to_plain(tuple(sessions)),
    }


def format_csv(sessions: Sequence[SessionResult]) -> str:
    """Return a CSV file with one line per counted step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            "model",
            "setting",
            "arm",
            "round",
            "step",
            "seconds",
            "compute",
            "exposed",
            "summing",
            "loss",
        )
    )
    for session in sessions:
        for result in session.arms:
            steps = result.steps
            columns = (
                steps.round,
                steps.step,
                steps.seconds,
                _optional_column(steps.compute, steps),
                _optional_column(steps.exposed, steps),
                _optional_column(steps.communication, steps),
                steps.loss,
            )
            for row in zip(*columns, strict=True):
                writer.writerow((session.model.name, session.setting, result.arm.name, *row))
    return text.getvalue()


def _optional_column(values: Sequence[float], steps: Steps) -> Sequence[float | str]:
    """Return the values, or empty cells if they were not measured."""
    return values or [""] * len(steps.step)
