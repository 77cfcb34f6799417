"""``flagscale comm list``: every backend, whether it works here, and how to get what is missing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flagscale.accelerators.registry import CPU, accelerators
from flagscale.comm import registry
from flagscale.comm.base import OPERATIONS, DeviceType


@dataclass(frozen=True)
class Listed:
    """One backend on this machine."""

    name: str
    summary: str
    states: dict[DeviceType, str]
    """By kind of device ``yes``, ``-`` (not made for it), or why not."""
    version: str | None
    how_to_get: str
    environment: dict[str, str]
    operations: dict[DeviceType, tuple[str, ...]]
    """What it can do, on each device it is made for."""
    options: dict[str, str]
    """What a YAML may set under ``train.system.comm``, with its meaning."""

    @property
    def works(self) -> bool:
        return "yes" in self.states.values()

    def to_json(self) -> dict[str, Any]:
        """Plain data, with an entry for each kind of device."""
        plain = asdict(self)
        states = plain.pop("states")
        return {**plain, **states}


def listed() -> list[Listed]:
    """Every backend that a YAML can name."""
    found = []
    for name in registry.names():
        backend = registry.backend(name)

        def state(device: DeviceType, backend: registry.CommBackend = backend) -> str:
            if not backend.serves(device):
                return "-"
            return backend.unavailable(device) or "yes"

        states = {kind: state(kind) for kind in (CPU, *(found.name for found in accelerators()))}
        variables = dict(backend.environment)
        operations = {k: tuple(backend.operations_on(k)) for k in states if backend.serves(k)}
        options = {o.name: f"{o.doc} ({o.expected})" for o in backend.options}
        found.append(
            Listed(
                *(name, backend.summary, states, backend.version()),
                *(backend.how_to_get, variables, operations, options),
            )
        )
    return found


def main(words: Sequence[str], *, prog: str) -> int:
    """Carry out the command; the exit code."""
    about = "Every backend, whether it works here, and how to get what is missing."
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--json", action="store_true", help="for programs")
    show("json" if parser.parse_args(words).json else "table")
    return 0


def show(form: Literal["table", "json"] = "table") -> None:
    """Print the list."""
    rows = listed()
    if form == "json":
        print(json.dumps([row.to_json() for row in rows], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("backend", "version", *rows[0].states, "what it is"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        marks = ("yes" if t == "yes" else "-" if t == "-" else "no" for t in row.states.values())
        table.add_row(row.name, row.version or "-", *marks, row.summary)
    console = Console(highlight=False, markup=False)
    console.print(table)
    _show_details(console, rows)
    for row in rows:
        if row.works:
            continue
        reasons = dict.fromkeys(t for t in row.states.values() if t not in ("yes", "-"))
        console.print(f"\n{row.name}: {'; '.join(reasons)}", soft_wrap=True)
        if row.how_to_get:
            console.print(f"  to get it: {row.how_to_get}", soft_wrap=True)
    console.print("\nAlso: a map such as cpu:gloo,cuda:nccl.", soft_wrap=True)


def _show_details(console: Console, rows: Sequence[Listed]) -> None:
    """What backends cannot do, and what can be set of those that work here."""
    console.print(f"\noperations: {', '.join(OPERATIONS)}", soft_wrap=True)
    for row in rows:
        for devices, lacking in _lacking(row).items():
            console.print(f"  {row.name}{devices}: all but {lacking}", soft_wrap=True)
    console.print("\nwhat train.system.comm of a YAML may set:", soft_wrap=True)
    for row in rows:
        # auto has those of the backends it chooses from.
        if row.options and row.name != "auto":
            console.print(f"  {row.name}", soft_wrap=True)
            for name, doc in row.options.items():
                console.print(f"    {name}: {doc}", soft_wrap=True)


def _lacking(row: Listed) -> dict[str, str]:
    """The operations it cannot do, by the devices this holds for."""
    found = {
        f" on {device}": ", ".join(name for name in OPERATIONS if name not in able)
        for device, able in row.operations.items()
    }
    texts = set(found.values())
    # Said once where every device is the same.
    shown = {"": texts.pop()} if len(texts) == 1 else found
    return {where: text for where, text in shown.items() if text}
