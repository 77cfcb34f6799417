"""``flagscale comm list``: every backend, whether it works here, and how to get what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from flagscale.comm import registry
from flagscale.comm.base import DeviceType


@dataclass(frozen=True)
class Listed:
    """One backend on this machine."""

    name: str
    summary: str
    cpu: str
    """``yes``, ``-`` (not made for it), or why not."""
    cuda: str
    version: str | None
    how_to_get: str
    environment: dict[str, str]

    @property
    def works(self) -> bool:
        return "yes" in (self.cpu, self.cuda)


def listed() -> list[Listed]:
    """Every backend that a YAML can name."""
    found = []
    for name in registry.names():
        backend = registry.backend(name)

        def state(device: DeviceType, backend: registry.CommBackend = backend) -> str:
            if device not in backend.devices:
                return "-"
            return backend.unavailable(device) or "yes"

        cpu, cuda = state("cpu"), state("cuda")
        variables = dict(backend.environment)
        found.append(
            Listed(
                *(name, backend.summary, cpu, cuda, backend.version()),
                *(backend.how_to_get, variables),
            )
        )
    return found


def show(form: Literal["table", "json"] = "table") -> None:
    """Print the list."""
    rows = listed()
    if form == "json":
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("backend", "version", "cpu", "cuda", "what it is"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        marks = ("yes" if t == "yes" else "-" if t == "-" else "no" for t in (row.cpu, row.cuda))
        table.add_row(row.name, row.version or "-", *marks, row.summary)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for row in rows:
        if row.works:
            continue
        reasons = dict.fromkeys(t for t in (row.cpu, row.cuda) if t not in ("yes", "-"))
        console.print(f"\n{row.name}: {'; '.join(reasons)}", soft_wrap=True)
        if row.how_to_get:
            console.print(f"  to get it: {row.how_to_get}", soft_wrap=True)
    console.print("\nAlso: a map such as cpu:gloo,cuda:nccl.", soft_wrap=True)
