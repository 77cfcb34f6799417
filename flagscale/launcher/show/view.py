"""How runs and checks look in a terminal, once or again and again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flagscale.files import strict_json
from flagscale.hosts.names import compress
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.snapshot import HostRow, Phase, Snapshot

STYLES = {
    Phase.PENDING: "yellow",
    Phase.STARTING: "yellow",
    Phase.RUNNING: "green",
    Phase.COMPLETED: "bold green",
    Phase.FAILED: "bold red",
    Phase.STOPPED: "magenta",
    Phase.LOST: "bold red",
    Phase.UNREACHABLE: "bold red",
}
# Characters of a host's last line that are shown: the end, where the news is.
_LAST_LINE = 120
# The names of hosts get this much room, in characters, before figures do.
_HOST_WIDTH = 24
_FIGURES = ("step", "loss", "tokens/s", "memory", "left")
# Where output is no terminal and nothing tells how wide it is.
_UNKNOWN_WIDTH = 120


def duration(seconds: float) -> str:
    """``1d 02:03:04``, ``2:03:04`` or ``3:04``."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def run_table(snapshot: Snapshot, *, with_lines: bool = False) -> RenderableType:
    """A run in one table, equal hosts in one row; below it the first failure and warnings."""
    return Group(_title(snapshot), _table(snapshot, with_lines), *_below(snapshot))


def show(snapshot: Snapshot) -> None:
    """Print a run's table. What is below stays on lines of its own, so that the path of a log can
    be copied whole."""
    shown = console()
    shown.print(_title(snapshot), _table(snapshot, with_lines=False), sep="\n")
    for text in _below(snapshot):
        shown.print(text, soft_wrap=True)


def _title(snapshot: Snapshot) -> Text:
    lasted = duration(time.time() - snapshot.since)
    phase = snapshot.phase
    since = f"ended {lasted} ago" if phase.ended else f"{phase.value} for {lasted}"
    title = Text(f"{snapshot.name} · run {snapshot.run_id} · {since}")
    if snapshot.attempts > 1:
        title.append(f" · attempt {snapshot.attempt} of {snapshot.attempts}")
    return title


def _table(snapshot: Snapshot, with_lines: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    groups = _equal_rows(snapshot.hosts)
    figures = [_figures(snapshot, rows[0]) for rows in groups]
    # A column that tells nothing, such as the memory of a CPU, takes no room from the others.
    told = [i for i in range(len(_FIGURES)) if any(cells[i] for cells in figures)]
    longest = max((len(compress(row.host for row in rows)) for rows in groups), default=0)
    table.add_column("host", min_width=min(longest, _HOST_WIDTH))
    for heading in ("state", "since", "ranks", *(_FIGURES[i] for i in told)):
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    if with_lines:
        table.add_column("last line")
    for rows, cells in zip(groups, figures, strict=True):
        # Of hosts in the same state, the one that spoke; the others say the same or nothing.
        line = next((row.last_line for row in rows if row.last_line), "")
        last = [Text(line[-_LAST_LINE:])] if with_lines else []
        table.add_row(*_host_cells(snapshot, rows), *(cells[i] for i in told), *last)
    return table


def _below(snapshot: Snapshot) -> list[Text]:
    below = [Text(f"warning: {message}", "yellow") for message in snapshot.warnings]
    waits = dict.fromkeys(row.waits for row in snapshot.hosts if row.waits)
    below += [Text(reason, "yellow") for reason in waits]
    below += [
        Text(f"{compress(row.host for row in rows)}: {rows[0].trouble}", "bold red")
        for rows in _equal_rows(snapshot.hosts)
        if rows[0].trouble
    ]
    below += [
        Text(f"attempt {number} failed: {failure.headline()}", "yellow")
        for number, failure in snapshot.earlier
    ]
    if snapshot.failure is not None:
        below.append(Text(f"first failure: {snapshot.failure.describe()}", "red"))
    return below


def _equal_rows(hosts: Sequence[HostRow]) -> list[list[HostRow]]:
    """Hosts of the same state together, in the order of the first."""
    groups: dict[tuple[object, ...], list[HostRow]] = {}
    for row in hosts:
        key = (row.phase, row.trouble, row.step, row.joined < row.ranks)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _host_cells(snapshot: Snapshot, rows: Sequence[HostRow]) -> tuple[Text, Text, str, str]:
    phase = rows[0].phase
    shown = _ranks(phase, sum(row.joined for row in rows), sum(row.ranks for row in rows))
    names = Text(compress(row.host for row in rows))
    return names, Text(phase.value, STYLES[phase]), _clock(snapshot.since), shown


def _clock(moment: float) -> str:
    today = time.strftime("%Y-%m-%d")
    day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)).split()
    return clock if day == today else f"{day} {clock}"


def _ranks(phase: Phase, joined: int, ranks: int) -> str:
    return f"{joined}/{ranks}" if phase is Phase.STARTING else f"{ranks}"


def _figures(snapshot: Snapshot, row: HostRow | None = None) -> tuple[str, str, str, str, str]:
    """Step, loss, speed, memory and time left. The job has one of each; a host has a step of its
    own where its ranks tell it."""
    at = snapshot.step if row is None or row.step is None else row.step
    step = "" if at is None else f"{at}"
    if snapshot.train_steps is not None and step:
        step += f"/{snapshot.train_steps}"
    speed = snapshot.tokens_per_second
    return (
        step,
        "" if snapshot.loss is None else f"{snapshot.loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        "" if snapshot.memory_gib is None else f"{snapshot.memory_gib:.1f} GiB",
        "" if snapshot.eta_seconds is None else duration(snapshot.eta_seconds),
    )


def one_line(snapshot: Snapshot) -> str:
    """A run in one line, for output that is no terminal."""
    step, loss, speed, _, left = _figures(snapshot)
    ranks = _ranks(snapshot.phase, snapshot.joined, snapshot.world_size)
    parts = [snapshot.phase.value, f"ranks {ranks}"]
    named = (("step", step), ("loss", loss), ("tokens/s", speed), ("left", left))
    return "  ".join(parts + [f"{name} {value}" for name, value in named if value])


def watch(query: Callable[[], Snapshot], *, follow: bool, as_json: bool, every: float) -> Snapshot:
    """Show what ``query`` tells: a table, or one JSON object a line. ``follow`` keeps on every
    ``every`` seconds until the run has ended. Returns the last state seen."""
    if not follow:
        last = query()
        print(strict_json(last.to_json(), 2), flush=True) if as_json else show(last)
        return last
    looks = _looks(query, every)
    if as_json:
        for last in looks:
            print(strict_json(last.to_json()), flush=True)
        return last
    if sys.stdout.isatty():
        return _live(looks)
    # For output that is no terminal: a line whenever something changed, the table at the end.
    shown = ""
    for last in looks:
        if (line := one_line(last)) != shown:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            shown = line
    show(last)
    return last


def _looks(query: Callable[[], Snapshot], every: float) -> Iterator[Snapshot]:
    """The run again and again, until it has ended."""
    while not (last := query()).phase.ended:
        yield last
        time.sleep(every)
    yield last


def _live(looks: Iterator[Snapshot]) -> Snapshot:
    from rich.live import Live

    last = next(looks)
    with Live(run_table(last, with_lines=True), console=console(), auto_refresh=False) as live:
        for last in looks:
            live.update(run_table(last, with_lines=True), refresh=True)
    return last


def checks_table(checks: list[Check]) -> RenderableType:
    """What a preflight found."""
    table = Table()
    on_hosts = any(check.hosts for check in checks)
    for heading in ("check", *(("hosts",) if on_hosts else ()), "result", "found"):
        table.add_column(heading)
    for check in checks:
        result = Text("ok", "green") if check.ok else Text("FAILS", "bold red")
        if check.ok and check.warning:
            result = Text("warning", "yellow")
        found = check.found + (f"\n→ {check.hint}" if check.hint and not check.ok else "")
        where = (Text(check.hosts),) if on_hosts else ()
        table.add_row(check.name, *where, result, Text(found))
    return table


def console() -> Console:
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNKNOWN_WIDTH
    return Console(highlight=False, soft_wrap=False, width=width)
