"""Progress bar below the output of a foreground run, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flagscale.launcher.snapshot import Snapshot

_REFRESH_PER_SECOND = 2


@contextmanager
def progress_display(query: Callable[[], Snapshot]) -> Iterator[Callable[[str], None]]:
    """Provide the function that prints a line of output.

    On a terminal, a bar with step, loss and speed stays below the lines; elsewhere only the lines
    are printed.
    """
    if not sys.stdout.isatty():
        yield lambda line: print(line, flush=True)
        return
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    task = bar.add_task("starting", total=None, note="")

    def render() -> Progress:
        now = query()
        bar.update(
            task,
            description=now.phase.value,
            completed=now.step or 0,
            total=now.train_steps,
            note=_format_note(now),
        )
        return bar

    with Live(
        get_renderable=render, refresh_per_second=_REFRESH_PER_SECOND, transient=True
    ) as live:
        yield lambda line: live.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _format_note(now: Snapshot) -> str:
    from flagscale.launcher.show.view import format_duration

    parts = [
        "" if now.loss is None else f"loss {now.loss:.4f}",
        "" if now.tokens_per_second is None else f"{now.tokens_per_second:,.0f} tokens/s",
        "" if now.eta_seconds is None else f"{format_duration(now.eta_seconds)} left",
    ]
    return " · ".join(part for part in parts if part)
