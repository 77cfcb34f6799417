"""Runs on disk, for tests of their report pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from flagscale.files import write_json
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE, Layout, RunFiles
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState

START_TIME = 1_790_000_000.0
"""Start time of the runs, in Unix seconds."""


def progress_events(count: int, first: int = 1, **metrics: Any) -> Iterator[dict[str, Any]]:
    """Yield progress events of consecutive steps; a metric is a value or a function of the step."""
    defaults: dict[str, Any] = {"loss": lambda step: 9 - step / count, "grad_norm": 1.5}
    for step in range(first, first + count):
        values = {
            name: metric(step) if callable(metric) else metric
            for name, metric in {**defaults, **metrics}.items()
        }
        yield {"event": "progress", "step": step, "train_steps": 100, **values}


@dataclass
class StoredRun:
    """A run on disk that has ended."""

    state: RunState
    last_event_time: float = field(default=START_TIME)

    def append_events(
        self, *events: Mapping[str, Any], rank: int = 0, attempt: str = "status"
    ) -> None:
        """Append events to a rank's file, one second apart. ``attempt`` is the name of the status
        directory.
        """
        host = next(host for host in self.state.hosts if rank in host.ranks)
        directory = host.run_dir / attempt
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank_{rank}.jsonl").open("a", encoding="utf-8") as file:
            for event in events:
                self.last_event_time += 1
                file.write(json.dumps({"time": self.last_event_time, **event}) + "\n")

    def write_exit_records(self, code: int = 0, **more: Any) -> None:
        """Write the exit record of every host."""
        for host in self.state.hosts:
            host.run_dir.mkdir(parents=True, exist_ok=True)
            record = {
                "code": code,
                "phase": "job",
                "signal": None,
                "ended": self.last_event_time + 1,
            }
            write_json(host.run_dir / EXIT_FILE, {**record, **more})

    def replace_state(self, **fields: Any) -> StoredRun:
        """Return the same run with other fields of its state."""
        self.state = replace(self.state, **fields)
        self.state.save(Layout(self.state.exp_dir).state)
        return self

    def write_job_summary(self, **job: Any) -> None:
        """Write the coordinator's summary of the job."""
        summary = {"phase": "over", "attempt": 1, "attempts": 1, "failure": None, "hosts": {}}
        path = self.state.hosts[0].run_dir / LIVENESS_FILE
        write_json(path, {**summary, "restarts": [], **job})

    def write_launcher_files(
        self, config: Mapping[str, Any], *program_argv: str, run_id: str = "", **plan: Any
    ) -> None:
        """Write the launcher's files next to the scripts: the configuration, and the plan of a
        program with these arguments.
        """
        layout = Layout(self.state.exp_dir)
        layout.scripts.mkdir(parents=True, exist_ok=True)
        self._write_launcher_files(layout, config, *program_argv, run_id=run_id, **plan)

    def write_own_files(
        self, config: Mapping[str, Any], commit: str = "", changes: str = "", **record: Any
    ) -> None:
        """Write the files that belong to this run alone: its configuration, and the record of its
        start with the code at a commit.
        """
        files = Layout(self.state.exp_dir).run_files(self.state.run_id)
        files.directory.mkdir(parents=True, exist_ok=True)
        self._write_launcher_files(files, config)
        code = [{"checkout": "/src/code", "commit": commit, "changes": changes}] if commit else []
        launch = {"launched": self.state.started, "version": "1", "directory": "/", "code": code}
        write_json(files.launch, {**launch, "config_file": "x.yaml", "rerun_of": "", **record})

    def set_aside(self) -> None:
        """Move the run's state to its own directory, as the start of a later run does."""
        layout = Layout(self.state.exp_dir)
        files = layout.run_files(self.state.run_id)
        files.directory.mkdir(parents=True, exist_ok=True)
        layout.state.rename(files.state)

    def _write_launcher_files(
        self,
        files: Layout | RunFiles,
        config: Mapping[str, Any],
        *program_argv: str,
        run_id: str = "",
        **plan: Any,
    ) -> None:
        hosts = [{"name": host.name, "program": list(program_argv)} for host in self.state.hosts]
        stored_plan = {"run_id": run_id or self.state.run_id, "notes": [], **plan, "hosts": hosts}
        write_json(files.plan, stored_plan)
        files.config.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        files.overrides.write_text(yaml.safe_dump(["train=8b"]), encoding="utf-8")


def store_run(
    root: Path, name: str = "tiny", *, hosts: tuple[str, ...] = ("node",), nproc: int = 1,
    run_id: str = "20260921-000000-aaaaaa", exp_dir: Path | None = None,
    started: float = START_TIME,
) -> StoredRun:  # fmt: skip
    """Create a run below ``root`` without any reports; in ``exp_dir`` it is the latest one."""
    exp_dir = exp_dir or root / f"exp {run_id}"
    host_states = []
    for number, host in enumerate(hosts):
        run_dir = exp_dir / "logs" / "details" / f"host_{number}" / run_id
        run_dir.mkdir(parents=True)
        files = {kind: exp_dir / "logs" / f"{kind}_{number}" for kind in ("script", "output")}
        host_states.append(
            HostState(
                name=host,
                nproc=nproc,
                first_rank=number * nproc,
                node_rank=number,
                run_dir=run_dir,
                pid_file=exp_dir / "pid",
                **files,
            )
        )
    runner = RunnerHandle("local")
    world = nproc * len(hosts)
    state = RunState(
        run_id,
        name=name,
        exp_dir=exp_dir,
        started=started,
        world_size=world,
        external=False,
        stop_grace=1.0,
        runner=runner,
        hosts=tuple(host_states),
    )
    state.save(Layout(exp_dir).state)
    return StoredRun(state, started)


class ParsedPage(HTMLParser):
    """A page as parsed by a browser: elements in order, text, contents of scripts, and unclosed
    elements.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.open_tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "!doctype"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script":
            self.scripts.append((self.elements[-1][1].get("type") or "", data))
        elif self.open_tags and self.open_tags[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def find_elements(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of this tag that have ``attributes``."""
        required = {name.rstrip("_"): value for name, value in attributes.items()}
        return [a for t, a in self.elements if t == tag and required.items() <= a.items()]
