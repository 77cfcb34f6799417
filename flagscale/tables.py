"""Tables that stay readable in narrow terminals."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_INDENT = "  "


class FittingTable:
    """A table, or a block of lines per row if the terminal is too narrow for the table.

    rich shortens what does not fit, so that 815 could become 8. A block has all figures, each after
    its heading.
    """

    def __init__(
        self, table: Table, *, measured: Table | None = None, min_text_width: int = 0
    ) -> None:
        """Create the renderable.

        Args:
            table: Table whose columns of figures do not wrap.
            measured: Table whose width decides, if ``table`` has columns that may take any width.
            min_text_width: Number of characters that a line of a column that wraps has at least, if
                its cells have so many.
        """
        for column in table.columns if min_text_width else ():
            if not column.no_wrap:
                longest = max((len(str(cell)) for cell in column.cells), default=0)
                column.min_width = min(longest, min_text_width)
        self._table = table
        self._measured = measured or table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table or the blocks; called by rich."""
        unlimited = options.update(max_width=10_000)
        if Measurement.get(console, unlimited, self._measured).minimum <= options.max_width:
            yield self._table
            return
        if self._table.title:
            yield Text(str(self._table.title), style="italic")
        for row in range(self._table.row_count):
            yield from self._row_lines(row, options.max_width)

    def _row_lines(self, row: int, width: int) -> Iterator[Text]:
        """Yield the lines of a row's block: as many figures in a line as fit."""
        style = self._table.rows[row].style or ""
        line = Text(style=style)
        for column in self._table.columns:
            cell = list(column.cells)[row]
            content = cell if isinstance(cell, Text) else Text(str(cell))
            if not content.plain:
                continue
            item = Text.assemble(f"{column.header} ", content)
            if line.plain and line.cell_len + 2 + item.cell_len > width:
                yield line
                line = Text(_INDENT, style=style)
            elif line.plain:
                line.append(_INDENT)
            line.append_text(item)
        yield line
