"""A progress bar where someone watches, a few plain lines where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@contextmanager
def progress(label: str, stream: TextIO | None = None) -> Iterator[Report]:
    """Shows how far some work on bytes is, on standard error."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(label, stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


class _Lines:
    """One line each quarter of the way."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._next = 25

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent < self._next:
            return
        self._next = percent // 25 * 25 + 25
        text = f"{self._label}: {percent} % of {total / 1e6:.1f} MB\n"
        self._stream.write(text)
        self._stream.flush()
