"""HTML page of a sweep: the table of its runs, and their curves in the same plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagscale.config.sweeps import short_key_names
from flagscale.errors import RunStateError
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import load_states
from flagscale.launcher.sweep_runs import StoredSweep, SweepRun, find_best
from flagscale.report.html import Cell, Html, definition_list, element, join_parts, section, table
from flagscale.report.pages import render_runs, write_text
from flagscale.report.run import RunReport
from flagscale.report.scale import format_number
from flagscale.report.story import collect_story


def write_sweep_page(sweep: StoredSweep, output: Path) -> Path:
    """Write the page of a sweep in its current state to a private file, and return its path.

    Raises:
        RunStateError: no run of the sweep has been started.
        OSError: it cannot be written.
    """
    sweep.query()
    return write_text(render_sweep(sweep), output)


def render_sweep(sweep: StoredSweep) -> str:
    """Return the page of a sweep whose runs have been queried.

    Raises:
        RunStateError: no run of the sweep has been started.
    """
    run_reports = [
        replace(collect_story(states), label=str(run))
        for run in sweep.runs
        if (states := load_states(Layout(run.exp_dir)))
    ]
    if not run_reports:
        raise RunStateError(f"no run of the sweep in {sweep.directory} has been started")
    return render_runs(
        run_reports,
        title=f"sweep {sweep.name}",
        overview=_overview(sweep),
        shown_configuration=_find_report_of_best(sweep, run_reports),
    )


def _find_report_of_best(sweep: StoredSweep, run_reports: Sequence[RunReport]) -> RunReport:
    """Return the report of the best run, or of the first one if there is no best."""
    best = find_best(sweep.runs)
    directories = [best.run.exp_dir] if best is not None else []
    return next((run for run in run_reports if run.state.exp_dir in directories), run_reports[0])


def _overview(sweep: StoredSweep) -> Html:
    best = find_best(sweep.runs)
    counts = Counter(run.phase for run in sweep.runs)
    card = element(
        "article",
        element("h2", sweep.name),
        definition_list(
            {
                "runs": ", ".join(f"{count} {phase}" for phase, count in counts.items()),
                "best": "none: no completed run has a loss" if best is None else str(best.run),
                "by": "" if best is None else f"last {best.metric}, {format_number(best.value)}",
                "YAML": sweep.config_file,
                "directory": str(sweep.directory),
            }
        ),
        class_="card",
    )
    return join_parts(
        (
            element("div", card, class_="cards"),
            section("Runs of the sweep", _run_table(sweep.runs, best.run if best else None)),
        )
    )


def _run_table(sweep_runs: Sequence[SweepRun], best: SweepRun | None) -> Html:
    keys = short_key_names(list(sweep_runs[0].values)).values()
    headings = ["", *keys, "state", "step", "loss", "validation loss", "tokens/s", "run", "trouble"]
    rows: list[list[object]] = []
    for run in sweep_runs:
        numbers = [run.metrics.get(name) for name in ("loss", "validation_loss")]
        speed, step = run.metrics.get("tokens_per_second"), run.metrics.get("step")
        rows.append(
            [
                element("b", "★ best") if run is best else "",
                *run.values.values(),
                run.phase,
                "" if step is None else f"{step:,}",
                *("" if number is None else format_number(number) for number in numbers),
                "" if speed is None else f"{speed:,.0f}",
                Cell(run.state.run_id if run.state is not None else "", "time"),
                run.failure_reason,
            ]
        )
    columns = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    return table([headings[i] for i in columns], [[row[i] for i in columns] for row in rows])
