"""Command ``flagscale comm list``: all communication backends, their state on this machine, and how
to install them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flagscale.accelerators.registry import CPU, list_device_accelerators
from flagscale.comm import registry
from flagscale.comm.base import OPERATIONS, DeviceType


@dataclass(frozen=True)
class BackendListing:
    """State of one backend on this machine."""

    name: str
    summary: str
    states: dict[DeviceType, str]
    """State by kind of device: ``yes``, ``-`` (not supported), or why it is unavailable."""
    version: str | None
    how_to_get: str
    environment: dict[str, str]
    operations: dict[DeviceType, tuple[str, ...]]
    """Supported operations by kind of device, without unsupported devices."""
    options: dict[str, str]
    """Documentation of the options under ``train.system.comm``, by name."""

    @property
    def is_usable(self) -> bool:
        return "yes" in self.states.values()

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with one entry per kind of device."""
        plain = asdict(self)
        states = plain.pop("states")
        return {**plain, **states}


def list_backends() -> list[BackendListing]:
    """Return the state of every backend that a YAML can name."""
    listings = []
    for name in registry.list_backend_names():
        backend = registry.get_backend(name)

        def state(device: DeviceType, backend: registry.CommBackend = backend) -> str:
            if not backend.supports_device(device):
                return "-"
            return backend.explain_unavailable(device) or "yes"

        states = {
            kind: state(kind)
            for kind in (CPU, *(device.name for device in list_device_accelerators()))
        }
        operations = {
            k: tuple(backend.operations_for(k)) for k in states if backend.supports_device(k)
        }
        options = {o.name: f"{o.doc} ({o.expected})" for o in backend.options}
        listings.append(
            BackendListing(
                name=name,
                summary=backend.summary,
                states=states,
                version=backend.version(),
                how_to_get=backend.how_to_get,
                environment=dict(backend.environment),
                operations=operations,
                options=options,
            )
        )
    return listings


def main(arguments: Sequence[str], *, prog: str) -> int:
    """Run the command and return its exit code."""
    description = "Every backend, whether it works here, and how to get what is missing."
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    print_listing("json" if parser.parse_args(arguments).json else "table")
    return 0


def print_listing(output_format: Literal["table", "json"] = "table") -> None:
    """Print the list as a table or as JSON."""
    rows = list_backends()
    if output_format == "json":
        print(json.dumps([row.to_json() for row in rows], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("backend", "version", *rows[0].states, "what it is"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        state_cells = (
            "yes" if t == "yes" else "-" if t == "-" else "no" for t in row.states.values()
        )
        table.add_row(row.name, row.version or "-", *state_cells, row.summary)
    console = Console(highlight=False, markup=False)
    console.print(table)
    _print_details(console, rows)
    for row in rows:
        if row.is_usable:
            continue
        reasons = dict.fromkeys(t for t in row.states.values() if t not in ("yes", "-"))
        console.print(f"\n{row.name}: {'; '.join(reasons)}", soft_wrap=True)
        if row.how_to_get:
            console.print(f"  to get it: {row.how_to_get}", soft_wrap=True)
    console.print("\nAlso: a map such as cpu:gloo,cuda:nccl.", soft_wrap=True)


def _print_details(console: Console, rows: Sequence[BackendListing]) -> None:
    """Print unsupported operations, and the options of all backends."""
    console.print(f"\noperations: {', '.join(OPERATIONS)}", soft_wrap=True)
    for row in rows:
        for devices, unsupported in _unsupported_operations(row).items():
            console.print(f"  {row.name}{devices}: all but {unsupported}", soft_wrap=True)
    console.print("\noptions of a YAML under train.system.comm:", soft_wrap=True)
    for row in rows:
        # The options of auto are those of the backends it selects from.
        if row.options and row.name != "auto":
            console.print(f"  {row.name}", soft_wrap=True)
            for name, doc in row.options.items():
                console.print(f"    {name}: {doc}", soft_wrap=True)


def _unsupported_operations(row: BackendListing) -> dict[str, str]:
    """Return the unsupported operations as text, by a description of the devices concerned."""
    missing_by_device = {
        f" on {device}": ", ".join(name for name in OPERATIONS if name not in supported)
        for device, supported in row.operations.items()
    }
    texts = set(missing_by_device.values())
    # A single entry suffices if all devices are the same.
    groups = {"": texts.pop()} if len(texts) == 1 else missing_by_device
    return {device_text: text for device_text, text in groups.items() if text}
