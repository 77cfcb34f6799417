"""A table that does not fit becomes a block of lines per row, with every figure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from flagscale.tables import FittingTable

HEADINGS = ("stage", "layers", "weights")
CELLS = st.text(alphabet="abc123.", min_size=1, max_size=9)


def render(rows: list[tuple[str, ...]], width: int) -> str:
    table = Table(title="in GiB")
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(FittingTable(table))
    return capture.get()


def test_wide_terminal_shows_the_table() -> None:
    assert "│ stage │ layers │ weights │".replace("│", "┃") in render([("0", "8", "1.5")], 80)


def test_narrow_terminal_shows_blocks() -> None:
    text = render([("0", "8", "1.5"), ("1", "9", "")], 20)
    assert text == "in GiB\nstage 0  layers 8\n  weights 1.5\nstage 1  layers 9\n"


def test_columns_that_wrap_keep_a_readable_width() -> None:
    def render_path(width: int) -> str:
        table = Table()
        table.add_column("run", no_wrap=True)
        table.add_column("directory", overflow="fold")
        table.add_row("2026", "/a/long/directory/of/a/run")
        console = Console(width=width, highlight=False)
        with console.capture() as capture:
            console.print(FittingTable(table, min_text_width=16))
        return capture.get()

    assert "/a/long/director" in render_path(40)
    assert render_path(25) == "run 2026\n  directory \n/a/long/directory/of/a/ru\nn\n"


@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4), width=st.integers(20, 90))
def test_every_cell_is_whole(rows: list[tuple[str, ...]], width: int) -> None:
    text = render(rows, width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    for cell in (cell for row in rows for cell in row):
        assert cell in text
