"""HTML page of a search for the fastest layout (``action=auto_tune``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.errors import RunStateError
from flagscale.files import read_json, require_trusted_file
from flagscale.launcher.layout import TUNER_ANSWER_FILE, TUNER_DIRECTORY
from flagscale.report.frame import render_page
from flagscale.report.html import Html, definition_list, element, section, table
from flagscale.report.pages import write_text
from flagscale.report.plot import COLOURS, Line, Plot, render_plot

_GIB = 2**30


def find_answer(text: str) -> Path | None:
    """Return the answer of a search that a text names: its directory, or the answer itself."""
    path = Path(text).absolute()
    directory = path.parent if path.name == TUNER_ANSWER_FILE else path
    is_search = directory.name == TUNER_DIRECTORY and (directory / TUNER_ANSWER_FILE).is_file()
    return directory / TUNER_ANSWER_FILE if is_search else None


def write_tuning_page(answer: Path, output: Path) -> Path:
    """Write the page of a search to a private file, and return its path.

    Raises:
        RunStateError: the answer is damaged, or another user could have written it.
        OSError: the page cannot be written.
    """
    try:
        require_trusted_file(answer, answer.parent)
    except PermissionError as error:
        raise RunStateError(f"{answer} {error.strerror}: it is not shown") from None
    record = read_json(answer)
    try:
        if record is None:
            raise ValueError
        return write_text(render_tuning(record), output)
    except (KeyError, StopIteration, TypeError, ValueError):
        raise RunStateError(
            f"{answer} is damaged", hint="start auto_tune again to have it written"
        ) from None


def render_tuning(record: Mapping[str, Any]) -> str:
    """Return the page of a search.

    Raises:
        KeyError, TypeError, ValueError: the record is not that of a search.
    """
    measured = [row for row in record["trials"] if row["state"] != "failed"]
    failed = [row for row in record["trials"] if row["state"] == "failed"]
    best = next(row for row in measured if row["best"])
    card = definition_list(
        {
            "best": best["name"],
            "step": f"{best['seconds']:.4g} s ({best['low']:.4g} to {best['high']:.4g})",
            "tokens/s": f"{best['tokens_per_second']:,.0f}",
            "overrides": " ".join(record["overrides"]),
            "YAML": record["yaml"],
            "tried": f"{len(measured)} measured, {len(failed)} failed",
            "not tried": f"{record['untried']:,} other layouts",
            "end": record["reason"],
        }
    )
    return render_page(
        f"layouts of {record['name']}",
        element(
            "div",
            element("article", element("h2", best["name"]), card, class_="card"),
            class_="cards",
        ),
        section("Layouts that were measured", _measured_table(measured)),
        section("Failed trials", _failed_table(failed)) if failed else "",
        section("Predicted and measured", element("div", *_plots(measured), class_="plots")),
        section("Corrections by measurement", _corrections(record["corrections"])),
        section("Expected, not measured", _expected_table(record["expected"])),
        note=record["machine"],
    )


def _measured_table(rows: Sequence[Mapping[str, Any]]) -> Html:
    headings = ("", "layout", "s/step", "from", "to", "predicted", "trials", "tokens/s", "GiB")
    return table(
        [*headings, "why slower"],
        [
            [
                element("b", "★ best") if row["best"] else "",
                row["name"],
                *(f"{row[name]:.4g}" for name in ("seconds", "low", "high", "predicted_seconds")),
                str(row["trials"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{_memory_of(row):.2f}",
                row["why"],
            ]
            for row in rows
        ],
    )


def _failed_table(rows: Sequence[Mapping[str, Any]]) -> Html:
    return table(
        ["layout", "first failure", "log"], [[row["name"], row["why"], row["log"]] for row in rows]
    )


def _expected_table(rows: Sequence[Mapping[str, Any]]) -> Html:
    return table(
        ["layout", "s/step", "from", "to", "GiB by calculation"],
        [
            [
                row["name"],
                *(f"{row[name]:.4g}" for name in ("seconds", "low", "high")),
                f"{row['memory_bytes'] / _GIB:.2f}",
            ]
            for row in rows
        ],
    )


def _corrections(corrections: Mapping[str, float]) -> Html:
    return definition_list(
        {cause: f"{factor:.2f} times as long" for cause, factor in corrections.items()}
    )


def _plots(rows: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return predicted against measured time, and speed against memory."""
    times = [row[name] for row in rows for name in ("predicted_seconds", "seconds")]
    ends = [min(times), max(times)]
    equal = Line("equal", ends, ends, colour=COLOURS - 1, dashed=True)
    return [
        render_plot(
            Plot(
                "measured time",
                "s/step",
                [*_points(rows, "predicted_seconds", "seconds"), equal],
                axis="predicted s/step",
            )
        ),
        render_plot(
            Plot(
                "speed",
                "tokens/s",
                [*_points(rows, "memory", "tokens_per_second"), _pareto_line(rows)],
                axis="GiB per rank",
            )
        ),
    ]


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[Line]:
    return [
        Line(row["name"], [_memory_of(row) if x == "memory" else row[x]], [row[y]], index % COLOURS)
        for index, row in enumerate(rows)
    ]


def _pareto_line(rows: Sequence[Mapping[str, Any]]) -> Line:
    """Return the layouts that no other one surpasses in memory and speed."""
    front: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: (_memory_of(row), -row["tokens_per_second"])):
        if not front or row["tokens_per_second"] > front[-1][1]:
            front.append((_memory_of(row), row["tokens_per_second"]))
    return Line("Pareto front", [x for x, _ in front], [y for _, y in front], COLOURS - 1, True)


def _memory_of(row: Mapping[str, Any]) -> float:
    """Return the measured memory of a rank in GiB, or the calculated one."""
    return float(row["memory_gib"] or row["predicted_memory_gib"])
