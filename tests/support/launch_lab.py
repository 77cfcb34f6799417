"""An experiment directory with a real command line: what tests that start runs share."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagscale.hosts import processes
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import RunState, load_state

PROJECT = Path(__file__).resolve().parents[2]


# What torchrun does for a rank, without torch: 64 of the real one take a minute to import. Output
# goes to the rank's files, or with --tee to where everything goes: a line is one write there, which
# it is not where Python buffers nothing.
LIGHT_TORCHRUN = """\
import os, signal, subprocess, sys
from pathlib import Path
options, rest = {}, sys.argv[1:]
while rest and rest[0].startswith("--"):
    options[rest[0][2:]] = rest[1]
    rest = rest[2:]
count, node = int(options["nproc_per_node"]), int(options["node_rank"])
logs = Path(options["log_dir"], f"{options['rdzv_id']}_{os.getpid()}", "attempt_0")
ranks = []
for local in range(count):
    rank = {"RANK": str(node * count + local), "LOCAL_RANK": str(local)}
    world = {"WORLD_SIZE": str(count * int(options["nnodes"]))}
    streams = {}
    if "tee" not in options:
        (logs / str(local)).mkdir(parents=True)
        streams = {s: (logs / str(local) / f"{s}.log").open("wb") for s in ("stdout", "stderr")}
    environment = {**os.environ, **rank, **world, "PYTHONUNBUFFERED": ""}
    ranks.append(subprocess.Popen([sys.executable, *rest], env=environment, **streams))
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""


def light_torchrun(root: Path) -> Path:
    """Write a torchrun that needs no torch; the directory for PYTHONPATH."""
    package = root / "light" / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "run.py").write_text(LIGHT_TORCHRUN, encoding="utf-8")
    return package.parents[1]


def free_port() -> int:
    """A port that is free, and that no connection is given: below those."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(20_000, max(low, 32_000))
        try:
            with socket.create_server(("", port), dualstack_ipv6=False):
                return port
        except OSError:
            continue


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What the condition returns once it is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"nothing within {seconds} s")
        time.sleep(0.05)


def remove(directory: Path) -> None:
    """Remove a directory to which others are writing: nobody finds it while it goes."""
    shutil.rmtree(directory.rename(directory.with_name(f"{directory.name} that was")))


def with_process(state: RunState, process: Process, boot_id: str) -> RunState:
    """The state with the script of its first host, as it was started."""
    first = replace(state.hosts[0], **vars(process), boot_id=boot_id)
    return replace(state, hosts=(first, *state.hosts[1:]))


def script_of(state: RunState) -> Process:
    """The script of a run's first host."""
    host = state.hosts[0]
    assert host.pid is not None
    assert host.start_ticks is not None
    return Process(host.pid, host.start_ticks)


def rank_processes(state: RunState) -> dict[int, Process]:
    """The living ranks of a run on this machine, by rank."""
    return processes.ranks(processes.members(state.run_id))


@dataclass
class Lab:
    """An experiment directory and its YAML, and the launcher's command line for it."""

    root: Path
    exp_dir: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def configure(self, program: str, *, light: bool = False, **experiment: Any) -> None:
        """Write the training program and the YAML. Keyword arguments replace keys of the
        YAML's ``experiment`` section, ``train`` its section of this name. ``light``: under a
        torchrun that needs no torch."""
        entrypoint = self.root / "program.py"
        entrypoint.write_text(program, encoding="utf-8")
        train = experiment.pop("train", {"system": {}, "model": {}, "data": {}})
        section: dict[str, Any] = {
            "exp_name": "lab",
            "exp_dir": str(self.exp_dir),
            "task": {"type": "train", "backend": "megatron", "entrypoint": str(entrypoint)},
            "runner": {"nproc_per_node": 2, "stop_grace": 3},
        }
        if light:
            section["envs"] = {"PYTHONPATH": str(light_torchrun(self.root))}
        for key, value in experiment.items():
            old = section.get(key)
            section[key] = {**old, **value} if isinstance(old, dict) else value
        config = {"experiment": section, "action": "run", "train": train}
        conf = self.root / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "lab.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def command(self, *words: str) -> list[str]:
        place = ("--config-path", "./conf", "--config-name", "lab")
        return [sys.executable, str(PROJECT / "run.py"), *place, *words]

    def do(
        self, action: str, *words: str, under: Sequence[str] = (), timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """An action, run to its end; ``under`` is a command that runs another one."""
        return subprocess.run(
            [*under, *self.command(f"action={action}", *words)],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def start(self, action: str, *words: str, in_a_group: bool = False) -> subprocess.Popen[str]:
        """The launcher itself in the background, its output in a pipe; ``in_a_group`` of processes
        of its own, as a shell starts it."""
        process = subprocess.Popen(
            self.command(f"action={action}", *words),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=in_a_group,
        )
        self.started.append(process)
        return process

    @staticmethod
    def environment() -> dict[str, str]:
        return {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    @property
    def layout(self) -> Layout:
        return Layout(self.exp_dir)

    def state(self) -> RunState:
        state = load_state(self.layout.state)
        assert state is not None
        return state

    def output(self) -> str:
        path = self.state().hosts[0].output
        # The state is written before the host is asked to start.
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def members(self) -> list[Process]:
        return processes.members(self.state().run_id)

    def gone(self, seconds: float = 60.0) -> None:
        """Wait until no process of the run is left."""
        until(lambda: not self.members(), seconds)

    def clear(self) -> None:
        """End whatever a test has left running."""
        for process in self.started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        state = load_state(self.layout.state)
        if state is not None:
            for left in processes.members(state.run_id):
                processes.send(left, signal.SIGKILL, run_id=state.run_id)
