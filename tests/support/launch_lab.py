"""An experiment directory with a real command line, shared by tests that start runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from flagscale.hosts import processes
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import RunState, load_state
from support.waiting import PATIENCE_SECONDS, wait_for
from support.warm_programs import run_command_line

PROJECT = Path(__file__).resolve().parents[2]


# Minimal torchrun without torch: importing 64 of the real one takes a minute. Output goes to the
# rank's files, or with --tee to the common output. A line is one write there, which it is not if
# Python runs unbuffered.
LIGHT_TORCHRUN = """\
import os, signal, subprocess, sys
from pathlib import Path
options, command = {}, sys.argv[1:]
while command and command[0].startswith("--"):
    options[command[0][2:]] = command[1]
    command = command[2:]
count, node = int(options["nproc_per_node"]), int(options["node_rank"])
logs = Path(options["log_dir"], f"{options['rdzv_id']}_{os.getpid()}", "attempt_0")
ranks = []
for local in range(count):
    rank = {"RANK": str(node * count + local), "LOCAL_RANK": str(local)}
    world = {"WORLD_SIZE": str(count * int(options["nnodes"]))}
    world["MASTER_ADDR"] = options["master_addr"]
    streams = {}
    if "tee" not in options:
        (logs / str(local)).mkdir(parents=True)
        streams = {s: (logs / str(local) / f"{s}.log").open("wb") for s in ("stdout", "stderr")}
    environment = {**os.environ, **rank, **world, "PYTHONUNBUFFERED": ""}
    ranks.append(subprocess.Popen([sys.executable, *command], env=environment, **streams))
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""


def write_light_torchrun(root: Path) -> Path:
    """Write a torchrun that does not need torch, and return the directory for PYTHONPATH."""
    package = root / "light" / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "run.py").write_text(LIGHT_TORCHRUN, encoding="utf-8")
    return package.parents[1]


def remove_directory(directory: Path) -> None:
    """Remove a directory while others write to it, by renaming it first."""
    shutil.rmtree(directory.rename(directory.with_name(f"{directory.name} that was")))


def with_process(state: RunState, process: Process, boot_id: str) -> RunState:
    """Return the state with the process of its first host's script, as after a start."""
    first = replace(state.hosts[0], **vars(process), boot_id=boot_id)
    return replace(state, hosts=(first, *state.hosts[1:]))


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Wait until a process has printed a line with this text."""
    stream = process.stdout
    assert stream is not None
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"the output has ended without {text!r}")


def script_process(state: RunState) -> Process:
    """Return the script's process on a run's first host."""
    host = state.hosts[0]
    assert host.pid is not None
    assert host.start_ticks is not None
    return Process(host.pid, host.start_ticks)


def rank_processes(state: RunState) -> dict[int, Process]:
    """Return the running ranks of a run on this machine, by rank."""
    return processes.find_ranks(processes.find_run_processes(state.run_id))


@dataclass
class Lab:
    """An experiment directory, its YAML, and the launcher's command line for it."""

    root: Path
    exp_dir: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def configure(self, program: str, *, light: bool = False, **experiment: Any) -> None:
        """Write the training program and the YAML.

        Keyword arguments replace keys of the YAML's ``experiment`` section, ``train`` its section
        of this name. ``light`` uses the torchrun of :func:`write_light_torchrun`.
        """
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
            section["envs"] = {"PYTHONPATH": str(write_light_torchrun(self.root))}
        for key, value in experiment.items():
            default = section.get(key)
            section[key] = {**default, **value} if isinstance(default, dict) else value
        config = {"experiment": section, "action": "run", "train": train}
        conf = self.root / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "lab.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def command(self, *words: str) -> list[str]:
        config_options = ("--config-path", "./conf", "--config-name", "lab")
        return [sys.executable, str(PROJECT / "run.py"), *config_options, *words]

    def run_action(
        self,
        action: str,
        *words: str,
        wrapper: Sequence[str] = (),
        timeout: float = PATIENCE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run an action of the command line to its end; ``wrapper`` is a command that starts it."""
        command = [*wrapper, *self.command(f"action={action}", *words)]
        return run_command_line(
            command, environment=self.environment(), cwd=self.root, timeout=timeout
        )

    def start(
        self, action: str, *words: str, own_process_group: bool = False
    ) -> subprocess.Popen[str]:
        """Start the launcher in the background with its output in a pipe.

        ``own_process_group`` starts it in its own process group, like a shell.
        """
        process = subprocess.Popen(
            self.command(f"action={action}", *words),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=own_process_group,
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
        # The state is written before the host is contacted.
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def run_processes(self) -> list[Process]:
        """Return the live processes of the run."""
        return processes.find_run_processes(self.state().run_id)

    def wait_until_ended(self, seconds: float = 60) -> None:
        """Wait until all processes of the run have ended."""
        wait_for(lambda: not self.run_processes(), seconds=seconds)

    def kill_processes(self) -> None:
        """Kill all processes that are still running."""
        for process in self.started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        state = load_state(self.layout.state)
        if state is not None:
            for member in processes.find_run_processes(state.run_id):
                processes.send_signal(member, signal.SIGKILL, run_id=state.run_id)
