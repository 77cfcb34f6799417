"""What is calculated, beside every run on GPUs that docs/results has."""

from __future__ import annotations

import pytest
import tables


@pytest.fixture(scope="module")
def compared() -> list[tables.estimates.Compared]:
    return list(tables.estimates.compared())


@pytest.mark.parametrize(("which", "bar"), [(0, 0.05), (1, 0.10)], ids=["memory", "time"])
def test_every_run_is_met(
    which: int, bar: float, compared: list[tables.estimates.Compared]
) -> None:
    errors = {run.name: run.errors[which] for run in compared}
    assert len(errors) >= 20
    assert {name: error for name, error in errors.items() if abs(error) > bar} == {}


def test_the_tables_of_figures_are_up_to_date() -> None:
    """`python tools/bench/tables.py` writes them."""
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == len(tables.TABLES)
    assert tables.render(page) == page
    assert tables.render(page.replace("41,115", "99,999")) == page
