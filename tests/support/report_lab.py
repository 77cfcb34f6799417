"""Runs as they lie on a disk, for tests of their pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from flagscale.files import write_json
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE, Layout
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState

BEGAN = 1_790_000_000.0
"""When runs were started, in Unix seconds."""


def steps(count: int, first: int = 1, **figures: Any) -> Iterator[dict[str, Any]]:
    """Progress events of steps that follow each other; a figure is a value, or says it of a
    step."""
    usual: dict[str, Any] = {"loss": lambda step: 9 - step / count, "grad_norm": 1.5}
    for step in range(first, first + count):
        told = {name: of(step) if callable(of) else of for name, of in {**usual, **figures}.items()}
        yield {"event": "progress", "step": step, "train_steps": 100, **told}


@dataclass
class Laid:
    """A run on the disk that has ended."""

    state: RunState
    moment: float = field(default=BEGAN)

    def report(self, *events: Mapping[str, Any], rank: int = 0, attempt: str = "status") -> None:
        """Append events to a rank's file, a second apart."""
        host = next(host for host in self.state.hosts if rank in host.ranks)
        directory = host.run_dir / attempt
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank_{rank}.jsonl").open("a", encoding="utf-8") as file:
            for event in events:
                self.moment += 1
                file.write(json.dumps({"time": self.moment, **event}) + "\n")

    def end(self, code: int = 0, **more: Any) -> None:
        for host in self.state.hosts:
            host.run_dir.mkdir(parents=True, exist_ok=True)
            record = {"code": code, "phase": "job", "signal": None, "ended": self.moment + 1}
            write_json(host.run_dir / EXIT_FILE, {**record, **more})

    def change(self, **fields: Any) -> Laid:
        """The same run with other fields of its state."""
        self.state = replace(self.state, **fields)
        self.state.save(Layout(self.state.exp_dir).state)
        return self

    def agree(self, **job: Any) -> None:
        """What the coordinator says of the job."""
        told = {"phase": "over", "attempt": 1, "attempts": 1, "failure": None, "hosts": {}}
        path = self.state.hosts[0].run_dir / LIVENESS_FILE
        write_json(path, {**told, "restarts": [], **job})

    def keep(self, config: Mapping[str, Any], *words: str, run_id: str = "", **plan: Any) -> None:
        """What a launcher keeps beside the scripts: the plan, of a program of these words, and the
        configuration."""
        layout = Layout(self.state.exp_dir)
        layout.scripts.mkdir(parents=True, exist_ok=True)
        hosts = [{"name": host.name, "program": list(words)} for host in self.state.hosts]
        whole = {"run_id": run_id or self.state.run_id, "notes": [], **plan, "hosts": hosts}
        write_json(layout.plan, whole)
        layout.config.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        layout.overrides.write_text(yaml.safe_dump(["train=8b"]), encoding="utf-8")


def lay(
    root: Path, name: str = "tiny", *, hosts: tuple[str, ...] = ("node",), nproc: int = 1,
    run_id: str = "20260921-000000-aaaaaa",
) -> Laid:  # fmt: skip
    """A run below ``root``, with nothing reported yet."""
    exp_dir = root / f"exp {run_id}"
    laid = []
    for number, host in enumerate(hosts):
        run_dir = exp_dir / "logs" / "details" / f"host_{number}" / run_id
        run_dir.mkdir(parents=True)
        own = {what: exp_dir / "logs" / f"{what}_{number}" for what in ("script", "output")}
        laid.append(
            HostState(
                name=host,
                nproc=nproc,
                first_rank=number * nproc,
                node_rank=number,
                run_dir=run_dir,
                pid_file=exp_dir / "pid",
                **own,
            )
        )
    runner = RunnerHandle("local")
    world = nproc * len(hosts)
    state = RunState(run_id, name, exp_dir, BEGAN, world, False, 1.0, runner, tuple(laid))
    state.save(Layout(exp_dir).state)
    return Laid(state)


class Read(HTMLParser):
    """A page as a browser takes it apart: its elements in order, its text, what its scripts hold,
    and what was not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.elements[-1][1].get("type") or "", data))
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def of(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of a tag that have these."""
        named = {name.rstrip("_"): value for name, value in attributes.items()}
        return [a for t, a in self.elements if t == tag and named.items() <= a.items()]
