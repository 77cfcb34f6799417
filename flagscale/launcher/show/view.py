"""Tables of runs and checks for a terminal, printed once or refreshed."""

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
from flagscale.hosts.names import compress_names
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.snapshot import HostRow, Phase, Snapshot
from flagscale.output_streams import escape_controls
from flagscale.tables import FittingTable

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
# Characters of a host's last line that are shown, from its end.
_LAST_LINE_CHARACTERS = 120
# Host names get this many characters before figures get room.
_HOST_WIDTH = 24
_METRICS = ("step", "loss", "tokens/s", "a GPU", "memory", "left")
# Width if the output is not a terminal and COLUMNS is not set.
_UNKNOWN_WIDTH = 120


def format_duration(seconds: float) -> str:
    """Format seconds as ``1d 02:03:04``, ``2:03:04`` or ``3:04``."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def run_table(snapshot: Snapshot, *, with_lines: bool = False) -> RenderableType:
    """Return a run's table, with equal hosts in one row, then the first failure and warnings."""
    table = FittingTable(
        _host_table(snapshot, with_lines), measured=_host_table(snapshot, with_lines=False)
    )
    return Group(_format_title(snapshot), table, *_notes_below(snapshot))


def print_run(snapshot: Snapshot) -> None:
    """Print a run's table.

    Lines below the table are not wrapped, so that the path of a log can be copied whole.
    """
    output = make_console()
    output.print(
        _format_title(snapshot), FittingTable(_host_table(snapshot, with_lines=False)), sep="\n"
    )
    for text in _notes_below(snapshot):
        output.print(text, soft_wrap=True)


def _format_title(snapshot: Snapshot) -> Text:
    duration = format_duration(time.time() - snapshot.since)
    phase = snapshot.phase
    since = f"ended {duration} ago" if phase.ended else f"{phase.value} for {duration}"
    job = f" · job {snapshot.job}" if snapshot.job else ""
    title = Text(f"{snapshot.name} · run {snapshot.run_id}{job} · {since}")
    if snapshot.attempts > 1:
        title.append(f" · attempt {snapshot.attempt} of {snapshot.attempts}")
    return title


def _host_table(snapshot: Snapshot, with_lines: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    groups = _group_equal_rows(snapshot.hosts)
    metric_cells = [_format_metrics(snapshot, rows[0]) for rows in groups]
    # An empty column, such as the memory of a CPU, is left out.
    used_columns = [i for i in range(len(_METRICS)) if any(cells[i] for cells in metric_cells)]
    longest = max((len(compress_names(row.host for row in rows)) for rows in groups), default=0)
    table.add_column("host", min_width=min(longest, _HOST_WIDTH))
    for heading in ("state", "since", "ranks", *(_METRICS[i] for i in used_columns)):
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    if with_lines:
        table.add_column("last line")
    for rows, cells in zip(groups, metric_cells, strict=True):
        # Hosts in one row are in the same state: show the line of any that printed one.
        line = next((row.last_line for row in rows if row.last_line), "")
        last = [_foreign_text(line[-_LAST_LINE_CHARACTERS:])] if with_lines else []
        table.add_row(*_host_cells(snapshot, rows), *(cells[i] for i in used_columns), *last)
    return table


def _notes_below(snapshot: Snapshot) -> list[Text]:
    texts = [_foreign_text(f"warning: {message}", "yellow") for message in snapshot.warnings]
    waits = dict.fromkeys(row.waits for row in snapshot.hosts if row.waits)
    texts += [_foreign_text(reason, "yellow") for reason in waits]
    texts += [
        _foreign_text(f"{compress_names(row.host for row in rows)}: {rows[0].trouble}", "bold red")
        for rows in _group_equal_rows(snapshot.hosts)
        if rows[0].trouble
    ]
    texts += [
        _foreign_text(f"attempt {number} failed: {failure.headline()}", "yellow")
        for number, failure in snapshot.earlier
    ]
    if snapshot.task_scores:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in snapshot.task_scores.items())
        texts.append(_foreign_text(f"tasks: {scores}"))
    if snapshot.end_detail is not None:
        texts.append(_foreign_text(f"training ended early: {snapshot.end_detail}"))
    if snapshot.best_checkpoint is not None:
        value = "" if snapshot.best_loss is None else f", validation loss {snapshot.best_loss:.4f}"
        if snapshot.best_metric is not None and snapshot.best_value is not None:
            value = f", {snapshot.best_metric} {snapshot.best_value:.4f}"
        text = f"best checkpoint: step {snapshot.best_step}{value}: {snapshot.best_checkpoint}"
        texts.append(_foreign_text(text))
    if snapshot.failure is not None:
        texts.append(_foreign_text(f"first failure: {snapshot.failure.describe()}", "red"))
    return texts


def _foreign_text(text: str, style: str = "") -> Text:
    """Return a text that contains output of other programs, whose colors are kept."""
    return Text.from_ansi(escape_controls(text), style=style)


def _group_equal_rows(hosts: Sequence[HostRow]) -> list[list[HostRow]]:
    """Group hosts in the same state, in order of first appearance."""
    groups: dict[tuple[object, ...], list[HostRow]] = {}
    for row in hosts:
        key = (row.phase, row.trouble, row.step, row.joined < row.ranks)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _host_cells(snapshot: Snapshot, rows: Sequence[HostRow]) -> tuple[Text, Text, str, str]:
    phase = rows[0].phase
    ranks = _format_ranks(phase, sum(row.joined for row in rows), sum(row.ranks for row in rows))
    names = Text(compress_names(row.host for row in rows))
    return names, Text(phase.value, STYLES[phase]), _format_moment(snapshot.since), ranks


def _format_moment(moment: float) -> str:
    today = time.strftime("%Y-%m-%d")
    day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)).split()
    return clock if day == today else f"{day} {clock}"


def _format_ranks(phase: Phase, joined: int, ranks: int) -> str:
    return f"{joined}/{ranks}" if phase is Phase.STARTING else f"{ranks}"


def _format_metrics(
    snapshot: Snapshot, row: HostRow | None = None
) -> tuple[str, str, str, str, str, str]:
    """Return step, loss, speed, speed per GPU, memory and time left.

    They belong to the job; only the step may be a host's own. The speed per GPU is omitted if there
    is one rank, or on a CPU, which reports no memory.
    """
    step_number = snapshot.step if row is None or row.step is None else row.step
    step = "" if step_number is None else f"{step_number}"
    if snapshot.train_steps is not None and step:
        step += f"/{snapshot.train_steps}"
    speed, speed_of_gpu = snapshot.tokens_per_second, snapshot.tokens_per_second_per_gpu
    has_gpus = snapshot.world_size > 1 and snapshot.memory_gib is not None
    return (
        step,
        "" if snapshot.loss is None else f"{snapshot.loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        f"{speed_of_gpu:,.0f}" if speed_of_gpu is not None and has_gpus else "",
        "" if snapshot.memory_gib is None else f"{snapshot.memory_gib:.1f} GiB",
        "" if snapshot.eta_seconds is None else format_duration(snapshot.eta_seconds),
    )


def format_one_line(snapshot: Snapshot) -> str:
    """Format a run in one line, for output that is not a terminal."""
    step, loss, speed, _, _, time_left = _format_metrics(snapshot)
    ranks = _format_ranks(snapshot.phase, snapshot.joined, snapshot.world_size)
    parts = [snapshot.phase.value, f"ranks {ranks}"]
    metrics = (("step", step), ("loss", loss), ("tokens/s", speed), ("left", time_left))
    return "  ".join(parts + [f"{name} {value}" for name, value in metrics if value])


def show_snapshots(
    query: Callable[[], Snapshot], *, follow: bool, as_json: bool, interval_seconds: float
) -> Snapshot:
    """Show the result of ``query`` as a table or as one JSON object per line.

    With ``follow``, repeat it every ``interval_seconds`` until the run has ended. Returns the last
    snapshot.
    """
    if not follow:
        last = query()
        print(strict_json(last.to_json(), 2), flush=True) if as_json else print_run(last)
        return last
    snapshots = _poll_until_ended(query, interval_seconds)
    if as_json:
        for last in snapshots:
            print(strict_json(last.to_json()), flush=True)
        return last
    if sys.stdout.isatty():
        return _show_live(snapshots)
    # Without a terminal: one line per change, and the table at the end.
    printed = ""
    for last in snapshots:
        if (line := format_one_line(last)) != printed:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            printed = line
    print_run(last)
    return last


def _poll_until_ended(query: Callable[[], Snapshot], interval_seconds: float) -> Iterator[Snapshot]:
    """Yield snapshots until the run has ended."""
    while not (last := query()).phase.ended:
        yield last
        time.sleep(interval_seconds)
    yield last


def _show_live(snapshots: Iterator[Snapshot]) -> Snapshot:
    from rich.live import Live

    last = next(snapshots)
    with Live(run_table(last, with_lines=True), console=make_console(), auto_refresh=False) as live:
        for last in snapshots:
            live.update(run_table(last, with_lines=True), refresh=True)
    return last


def checks_table(checks: list[Check]) -> RenderableType:
    """Return the table of a preflight's results."""
    table = Table()
    on_hosts = any(check.hosts for check in checks)
    for heading in ("check", *(("hosts",) if on_hosts else ()), "result", "found"):
        table.add_column(heading)
    for check in checks:
        result = Text("ok", "green") if check.ok else Text("FAILS", "bold red")
        if check.ok and check.warning:
            result = Text("warning", "yellow")
        finding = check.found + (f"\n→ {check.hint}" if check.hint and not check.ok else "")
        hosts_cell = (Text(check.hosts),) if on_hosts else ()
        table.add_row(check.name, *hosts_cell, result, Text(finding))
    return table


def make_console() -> Console:
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNKNOWN_WIDTH
    return Console(highlight=False, soft_wrap=False, width=width)
