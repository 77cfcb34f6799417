"""Progress display: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

ProgressCallback = Callable[[int, int], None]
"""Callback with the bytes done and the total number of bytes."""


@contextmanager
def show_progress(label: str, stream: TextIO | None = None) -> Iterator[ProgressCallback]:
    """Show the progress of work, measured in bytes.

    Args:
        label: name of the work.
        stream: where the progress is shown; stderr by default.

    Yields:
        A callback to report progress.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _LinePrinter(label, stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=None)

        def update_bar(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update_bar


class _LinePrinter:
    """Progress callback that prints a line at each quarter of the work."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._next_percent = 25

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent < self._next_percent:
            return
        self._next_percent = percent // 25 * 25 + 25
        text = f"{self._label}: {percent} % of {total / 1e6:.1f} MB\n"
        self._stream.write(text)
        self._stream.flush()
