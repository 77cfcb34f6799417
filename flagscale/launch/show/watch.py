"""Showing a run's state once, or again and again until it ends."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from flagscale.launch.show import view
from flagscale.launch.snapshot import Snapshot


def watch(look: Callable[[], Snapshot], *, follow: bool, as_json: bool, every: float) -> Snapshot:
    """Show what ``look`` tells: a table, or one JSON object a line. ``follow`` keeps on every
    ``every`` seconds until the run has ended. Returns the last state seen."""
    if as_json:
        return _as_json(look, follow, every)
    if not follow:
        last = look()
        view.show(last)
        return last
    return _live(look, every) if sys.stdout.isatty() else _as_lines(look, every)


def _as_json(look: Callable[[], Snapshot], follow: bool, every: float) -> Snapshot:
    while True:
        last = look()
        indent = None if follow else 2
        print(json.dumps(last.to_json(), indent=indent, ensure_ascii=False), flush=True)
        if not follow or last.phase.ended:
            return last
        time.sleep(every)


def _live(look: Callable[[], Snapshot], every: float) -> Snapshot:
    from rich.live import Live

    last = look()
    with Live(
        view.run_table(last, with_lines=True), console=view.console(), auto_refresh=False
    ) as live:
        while not last.phase.ended:
            time.sleep(every)
            last = look()
            live.update(view.run_table(last, with_lines=True), refresh=True)
    return last


def _as_lines(look: Callable[[], Snapshot], every: float) -> Snapshot:
    """For output that is no terminal: a line whenever something changed, the table at the end."""
    shown = ""
    while True:
        last = look()
        line = view.one_line(last)
        if line != shown:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            shown = line
        if last.phase.ended:
            view.show(last)
            return last
        time.sleep(every)
