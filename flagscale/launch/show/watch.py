"""Showing a run's state once, or again and again until it ends."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from flagscale.launch.show import view
from flagscale.launch.snapshot import Snapshot


def watch(query: Callable[[], Snapshot], *, follow: bool, as_json: bool, every: float) -> Snapshot:
    """Show what ``query`` tells: a table, or one JSON object a line. ``follow`` keeps on every
    ``every`` seconds until the run has ended. Returns the last state seen."""
    if as_json:
        return _as_json(query, follow, every)
    if not follow:
        last = query()
        view.show(last)
        return last
    return _live(query, every) if sys.stdout.isatty() else _as_lines(query, every)


def _as_json(query: Callable[[], Snapshot], follow: bool, every: float) -> Snapshot:
    while True:
        last = query()
        indent = None if follow else 2
        print(json.dumps(last.to_json(), indent=indent, ensure_ascii=False), flush=True)
        if not follow or last.phase.ended:
            return last
        time.sleep(every)


def _live(query: Callable[[], Snapshot], every: float) -> Snapshot:
    from rich.live import Live

    last = query()
    with Live(
        view.run_table(last, with_lines=True), console=view.console(), auto_refresh=False
    ) as live:
        while not last.phase.ended:
            time.sleep(every)
            last = query()
            live.update(view.run_table(last, with_lines=True), refresh=True)
    return last


def _as_lines(query: Callable[[], Snapshot], every: float) -> Snapshot:
    """For output that is no terminal: a line whenever something changed, the table at the end."""
    shown = ""
    while True:
        last = query()
        line = view.one_line(last)
        if line != shown:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            shown = line
        if last.phase.ended:
            view.show(last)
            return last
        time.sleep(every)
