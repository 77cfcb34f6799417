"""Part of a page about what runs were: code, software, hardware and data, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.launcher.layout import Layout
from flagscale.report.html import (
    Cell,
    Html,
    definition_list,
    details,
    element,
    section,
    table,
)
from flagscale.report.record import cut_value, find_differences
from flagscale.report.run import RunReport

_TITLE = "Code, software and data"
_MAX_DIFF_CHARACTERS = 100_000
_MAX_ROWS = 500
_TABLES = {
    "data": ("files and blends of data", ("file or blend", "size and checksum")),
    "packages": ("packages", ("package", "version")),
    "environment": ("variables of libraries", ("variable", "value")),
}
"""Sections of a record that may be long: the title and the headings of their tables."""


def render_records(run_reports: Sequence[RunReport], names: Sequence[str]) -> Html:
    """Return the section with the records of these runs; empty if none has a record."""
    parts: list[object] = []
    if len(run_reports) > 1:
        parts.append(_render_differences(run_reports, names))
    for run, name in zip(run_reports, names, strict=True):
        record_parts = list(_record_parts(run))
        if record_parts and len(run_reports) > 1:
            parts.append(element("h3", name))
        parts += record_parts
    return section(_TITLE, *parts) if any(parts) else Html()


def _render_differences(run_reports: Sequence[RunReport], names: Sequence[str]) -> Html:
    records = [run.record.values for run in run_reports]
    if not all(records):
        return Html()
    differences = find_differences(records)
    if not differences:
        return element("p", "The runs have the same code, software, hardware and data.")
    rows = [[Cell(row.key, "key"), *map(cut_value, row.values)] for row in differences[:_MAX_ROWS]]
    return table(("entry", *names), rows, caption="these differ")


def _record_parts(run: RunReport) -> Iterator[Html]:
    sections = run.record.sections
    short_values = {
        title: value
        for name, values in sections.items()
        if name not in _TABLES
        for title, value in values.items()
    }
    if short_values:
        yield definition_list(short_values)
    for name, (title, headings) in _TABLES.items():
        if values := sections.get(name):
            rows = [[Cell(key, "key"), value] for key, value in values.items()][:_MAX_ROWS]
            yield details(f"{len(values)} {title}", table(headings, rows))
    if run.record.files:
        items = (element("li", name) for name in run.record.files)
        title = "changed and untracked files of the code"
        yield details(title, element("ul", *items), element("pre", _read_diff(run)))


def _read_diff(run: RunReport) -> str:
    file = Layout(run.state.exp_dir).run_files(run.state.run_id).changes
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
    return text[:_MAX_DIFF_CHARACTERS]
