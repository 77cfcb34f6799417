"""How plans, runs and checks look in a terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flagscale.launch.plan import HostPlan, LaunchPlan
from flagscale.launch.preflight import Check
from flagscale.launch.script import render
from flagscale.launch.snapshot import Phase, Snapshot

_STYLES = {
    Phase.STARTING: "yellow",
    Phase.RUNNING: "green",
    Phase.COMPLETED: "bold green",
    Phase.FAILED: "bold red",
    Phase.STOPPED: "magenta",
    Phase.LOST: "bold red",
}


def duration(seconds: float) -> str:
    """``1d 02:03:04``, ``2:03:04`` or ``3:04``."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def run_table(snapshot: Snapshot) -> RenderableType:
    """A run in one table; below it the first failure and warnings."""
    lasted = duration(time.time() - snapshot.since)
    title = Text(f"{snapshot.name} · run {snapshot.run_id} · {snapshot.phase.value} for {lasted}")
    if snapshot.phase.ended:
        title = Text(f"{snapshot.name} · run {snapshot.run_id} · ended {lasted} ago")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("host", "state", "since", "ranks", "step", "loss", "tokens/s", "left"):
        left = heading in ("host", "state")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "host")
    for host, phase in snapshot.hosts:
        state = Text(phase.value, _STYLES[phase])
        since = _clock(snapshot.since)
        table.add_row(Text(host), state, since, _ranks(snapshot), *_figures(snapshot))
    below = [Text(f"warning: {message}", "yellow") for message in snapshot.warnings]
    if snapshot.failure is not None:
        below.append(Text(f"first failure: {snapshot.failure.describe()}", "red"))
    return Group(table, *below)


def _clock(moment: float) -> str:
    today = time.strftime("%Y-%m-%d")
    day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)).split()
    return clock if day == today else f"{day} {clock}"


def _ranks(snapshot: Snapshot) -> str:
    if snapshot.phase is Phase.STARTING:
        return f"{snapshot.joined}/{snapshot.world_size}"
    return str(snapshot.world_size)


def _figures(snapshot: Snapshot) -> tuple[str, str, str, str]:
    step = "" if snapshot.step is None else f"{snapshot.step}"
    if snapshot.train_steps is not None:
        step += f"/{snapshot.train_steps}"
    speed = snapshot.tokens_per_second
    return (
        step,
        "" if snapshot.loss is None else f"{snapshot.loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        "" if snapshot.eta_seconds is None else duration(snapshot.eta_seconds),
    )


def one_line(snapshot: Snapshot) -> str:
    """A run in one line, for output that is no terminal."""
    step, loss, speed, left = _figures(snapshot)
    parts = [snapshot.phase.value, f"ranks {_ranks(snapshot)}"]
    named = (("step", step), ("loss", loss), ("tokens/s", speed), ("left", left))
    return "  ".join(parts + [f"{name} {value}" for name, value in named if value])


def checks_table(checks: list[Check]) -> RenderableType:
    """What a preflight found."""
    table = Table()
    for heading in ("check", "result", "found"):
        table.add_column(heading)
    for check in checks:
        result = Text("ok", "green") if check.ok else Text("FAILS", "bold red")
        if check.ok and check.warning:
            result = Text("warning", "yellow")
        found = check.found + (f"\n→ {check.hint}" if check.hint and not check.ok else "")
        table.add_row(check.name, result, Text(found))
    return table


def plan_text(plan: LaunchPlan) -> str:
    """A plan and its scripts, as plain text."""
    return "\n".join(_plan_lines(plan))


def _plan_lines(plan: LaunchPlan) -> Iterator[str]:
    yield f"# {plan.name}: {plan.world_size} rank(s) on {len(plan.hosts)} host(s)"
    yield f"# ranks meet at {plan.master_addr}:{plan.master_port}"
    for note in plan.notes:
        yield f"# note: {note}"
    for host in plan.hosts:
        yield ""
        yield from _host_lines(host)
        yield f"# --- {host.script}"
        yield render(plan, host)


def _host_lines(host: HostPlan) -> Iterator[str]:
    kind = f" ({host.device_type})" if host.device_type else ""
    yield f"# host {host.rank} {host.name}{kind}: ranks {host.ranks.start}-{host.ranks.stop - 1}"
    width = max((len(value.origin) for value in host.environment), default=0)
    for value in host.environment:
        shown = "<secret, not written>" if value.secret else shlex.quote(value.value)
        # A value may have line ends, which would end the comment.
        shown = shown.replace("\n", "\\n").replace("\r", "\\r")
        yield f"#   {value.origin:{width}}  {value.name}={shown}"


def console() -> Console:
    return Console(highlight=False, soft_wrap=False)
