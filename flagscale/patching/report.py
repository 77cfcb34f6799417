"""Console output of the patch commands."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flagscale.errors import FlagscaleError
from flagscale.patching.collect import CollectResult
from flagscale.patching.manifest import Edits, Manifest
from flagscale.patching.spec import BackendLayout
from flagscale.patching.unpatch import UnpatchResult


def print_error(error: FlagscaleError) -> None:
    """Print one message on standard error, without a traceback."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(str(error)))


def _make_console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def print_outcome(layout: BackendLayout, outcome: UnpatchResult) -> None:
    """Print the result of an unpatch."""
    console = _make_console()
    tree = _relative_if_below(layout.tree)
    manifest = outcome.manifest
    if not outcome.was_built:
        console.print(f"{tree}: nothing to do, {manifest.backend} {manifest.version} is in place")
        _print_edits(console, layout, outcome.edits)
    else:
        console.print(_manifest_table(layout, manifest, Edits()))
        if outcome.backup is not None:
            console.print(
                f"the tree that was there before is kept in {_relative_if_below(outcome.backup)}"
            )
    _print_warnings(console, manifest)


def print_status(layout: BackendLayout, manifest: Manifest | None, edits: Edits) -> None:
    """Print the adaptations of a tree and later edits."""
    console = _make_console()
    if manifest is None:
        console.print(f"{_relative_if_below(layout.tree)}: not adapted")
        console.print(f"run tools/patch/unpatch.py --backend {layout.backend}")
        return
    console.print(_manifest_table(layout, manifest, edits))
    _print_edits(console, layout, edits)
    _print_warnings(console, manifest)


def print_collected(layout: BackendLayout, collected: CollectResult) -> None:
    """Print the result of a collection."""
    console = _make_console()
    directory = _relative_if_below(layout.patches)
    if not collected.written and not collected.removed:
        count = len(collected.unchanged)
        console.print(f"{directory}: nothing to do, {count} patch(es) describe every edit")
        return
    for name in collected.written:
        console.print(Text("wrote    ", style="green") + Text(f"{directory}/{name}"))
    for name in collected.removed:
        console.print(Text("removed  ", style="red") + Text(f"{directory}/{name}"))
    for name in collected.unchanged:
        console.print(Text("kept     ", style="dim") + Text(f"{directory}/{name}"))


def _manifest_table(layout: BackendLayout, manifest: Manifest, edits: Edits) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("backend", Text(f"{manifest.backend} {manifest.version}"))
    table.add_row("source", Text(manifest.source))
    table.add_row("tree", Text(f"{_relative_if_below(layout.tree)}, made {manifest.made_at}"))
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


def _print_edits(console: Console, layout: BackendLayout, edits: Edits) -> None:
    if not edits:
        return
    console.print(f"local edits in {_relative_if_below(layout.tree)}:")
    for line in edits.format_lines():
        console.print(Text(f"  {line}"))
    console.print(f"keep them as patches: tools/patch/patch.py --backend {layout.backend}")


def _print_warnings(console: Console, manifest: Manifest) -> None:
    for warning in manifest.warnings:
        console.print(Text("warning: ", style="bold yellow") + Text(warning))


def _relative_if_below(path: Path) -> str:
    """Return ``path`` relative to the working directory if it is below."""
    working_directory = Path.cwd()
    return (
        str(path.relative_to(working_directory))
        if path.is_relative_to(working_directory)
        else str(path)
    )
