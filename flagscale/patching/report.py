"""What the patch tools print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flagscale.errors import FlagscaleError
from flagscale.patching.collect import Collected
from flagscale.patching.manifest import Edits, Manifest
from flagscale.patching.spec import Layout
from flagscale.patching.unpatch import Outcome


def print_error(error: FlagscaleError) -> None:
    """One message on standard error, never a traceback."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(str(error)))


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def print_outcome(layout: Layout, outcome: Outcome) -> None:
    """What an unpatch did."""
    console = _console()
    tree = _short(layout.tree)
    manifest = outcome.manifest
    if not outcome.made:
        console.print(f"{tree}: nothing to do, {manifest.backend} {manifest.version} is in place")
        _print_edits(console, layout, outcome.edits)
    else:
        console.print(_table(layout, manifest, Edits()))
        if outcome.backup is not None:
            console.print(f"the tree that was there before is kept in {_short(outcome.backup)}")
    _print_warnings(console, manifest)


def print_status(layout: Layout, manifest: Manifest | None, edits: Edits) -> None:
    """What is applied to a tree, and what has been edited in it since."""
    console = _console()
    if manifest is None:
        console.print(f"{_short(layout.tree)}: not adapted")
        console.print(f"run tools/patch/unpatch.py --backend {layout.backend}")
        return
    console.print(_table(layout, manifest, edits))
    _print_edits(console, layout, edits)
    _print_warnings(console, manifest)


def print_collected(layout: Layout, collected: Collected) -> None:
    """What a collection did."""
    console = _console()
    directory = _short(layout.patches)
    if not collected.written and not collected.removed:
        kept = len(collected.unchanged)
        console.print(f"{directory}: nothing to do, {kept} patch(es) describe every edit")
        return
    for name in collected.written:
        console.print(Text("wrote    ", style="green") + Text(f"{directory}/{name}"))
    for name in collected.removed:
        console.print(Text("removed  ", style="red") + Text(f"{directory}/{name}"))
    for name in collected.unchanged:
        console.print(Text("kept     ", style="dim") + Text(f"{directory}/{name}"))


def _table(layout: Layout, manifest: Manifest, edits: Edits) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("backend", Text(f"{manifest.backend} {manifest.version}"))
    table.add_row("source", Text(manifest.source))
    table.add_row("tree", Text(f"{_short(layout.tree)}, made {manifest.made_at}"))
    table.add_row(
        "codemods",
        f"{sum(manifest.codemods.values())} places in {manifest.rewritten_files} files",
    )
    for name, count in manifest.codemods.items():
        table.add_row("", Text(f"{count:5d}  {name}"))
    table.add_row("patches", str(len(manifest.patches)) if manifest.patches else "none")
    for name in manifest.patches:
        table.add_row("", Text(name))
    if manifest.native:
        table.add_row("helper", Text(manifest.native))
    table.add_row("local edits", str(len(edits.paths())) if edits else "none")
    return table


def _print_edits(console: Console, layout: Layout, edits: Edits) -> None:
    if not edits:
        return
    console.print(f"local edits in {_short(layout.tree)}:")
    for line in edits.lines():
        console.print(Text(f"  {line}"))
    console.print(f"keep them as patches: tools/patch/patch.py --backend {layout.backend}")


def _print_warnings(console: Console, manifest: Manifest) -> None:
    for warning in manifest.warnings:
        console.print(Text("warning: ", style="bold yellow") + Text(warning))


def _short(path: Path) -> str:
    """``path`` relative to where the user is, when it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
