"""Comparison of estimates with every GPU run in docs/results."""

from __future__ import annotations

import pytest
import tables


@pytest.fixture(scope="module")
def compared_runs() -> list[tables.estimates.ComparedRun]:
    return list(tables.estimates.compare_runs())


@pytest.mark.parametrize(("which", "tolerance"), [(0, 0.05), (1, 0.10)], ids=["memory", "time"])
def test_every_run_is_within_tolerance(
    which: int, tolerance: float, compared_runs: list[tables.estimates.ComparedRun]
) -> None:
    errors = {run.name: run.errors[which] for run in compared_runs}
    assert len(errors) >= 20
    assert {name: error for name, error in errors.items() if abs(error) > tolerance} == {}


def test_benchmark_tables_are_current() -> None:
    """`python tools/bench/tables.py` generates them."""
    pages = [path.read_text(encoding="utf-8") for path in tables.PAGES]
    assert sum(page.count("<!-- table: ") for page in pages) == len(tables.TABLES)
    assert [tables.render(page) for page in pages] == pages
    assert tables.render(pages[0].replace("41,115", "99,999")) == pages[0]
