"""An experiment on the hosts of the test bed (tests/bed), started with the launcher's own
command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from bed.host import Host, HostProcess
from bed.lab import Bed

from flagscale.launcher.layout import Layout
from flagscale.launcher.state import RunState, load_state
from support.launch_lab import PROJECT, write_light_torchrun
from support.waiting import PATIENCE_SECONDS, wait_for
from support.warm_programs import run_command_line

# Joins and runs until SIGTERM, without torch.
STEADY_PROGRAM = """\
import os, signal, sys, time
sys.path.insert(0, {project!r})
from flagscale.status import StatusWriter
rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
status.write("started", rank=rank)
# Before it joins, because the launcher is done then, and a test may read the line or stop the run.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
# Labelled like the output of torchrun.
print(f"{os.uname().nodename}:{rank}: rank {rank} works", flush=True)
status.write("joined", backend="none")
for step in range(10_000):
    if rank == 0:
        status.write("progress", step=step, train_steps=10_000, loss=1.0, tokens_per_second=10.0)
    time.sleep(0.2)
"""


@dataclass
class SshLab:
    """A directory that hosts share, with a YAML, a hostfile and a training program."""

    bed: Bed
    root: Path
    exp_dir: Path
    slots: int = 1
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def configure(
        self, program: str = "", *, light: bool = True, hostfile: str = "", **experiment: Any
    ) -> None:
        """Write all files.

        Keyword arguments replace keys of the YAML's ``experiment``; those of ``runner`` and
        ``envs`` are merged. ``top`` are keys next to ``experiment``.
        """
        entrypoint = self.root / "program.py"
        text = program or STEADY_PROGRAM
        entrypoint.write_text(text.replace("{project!r}", repr(str(PROJECT))), encoding="utf-8")
        lines = hostfile or "".join(f"{name} slots={self.slots}\n" for name in self.bed.names)
        (self.root / "hostfile").write_text(lines, encoding="utf-8")
        top = experiment.pop("top", {})
        section: dict[str, Any] = {
            "exp_name": "lab",
            "exp_dir": str(self.exp_dir),
            "task": {"type": "train", "backend": "megatron", "entrypoint": str(entrypoint)},
            "runner": {
                "type": "ssh",
                "hostfile": str(self.root / "hostfile"),
                "ssh_config": str(self.bed.ssh_config),
                "nproc_per_node": self.slots,
                "stop_grace": 3,
                "start_timeout": PATIENCE_SECONDS,
            },
            "envs": {"OMP_NUM_THREADS": 1},
        }
        if light:
            section["envs"]["PYTHONPATH"] = str(write_light_torchrun(self.root))
        for key, value in experiment.items():
            section[key] = {**section[key], **value} if key in section else value
        config = {"experiment": section, "action": "run", "train": {}, **top}
        conf = self.root / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "lab.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def copy_program(self) -> None:
        """Copy the training program to hosts with a private root.

        They do not see this machine's files.
        """
        for host in self.bed.hosts:
            for source in (self.root / "program.py", *(self.root / "light").rglob("*.py")):
                target = host.local_path(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())

    def command(self, *words: str) -> list[str]:
        config_options = ("--config-path", str(self.root / "conf"), "--config-name", "lab")
        return [sys.executable, str(PROJECT / "run.py"), *config_options, *words]

    def run_action(
        self,
        action: str,
        *words: str,
        wrapper: Sequence[str] = (),
        timeout: float = PATIENCE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run an action to its end; ``wrapper`` is a command that the action is run by."""
        command = [*wrapper, *self.command(f"action={action}", *words)]
        environment = self.bed.environment(COLUMNS="200")
        return run_command_line(command, environment=environment, cwd=self.root, timeout=timeout)

    def start(self, action: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(f"action={action}", *words),
            cwd=self.root,
            env=self.bed.environment(COLUMNS="200"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def query(self) -> dict[str, Any]:
        result = self.run_action("query", "json=true")
        return dict(json.loads(result.stdout))

    def state(self) -> RunState:
        state = load_state(Layout(self.exp_dir).state)
        assert state is not None
        return state

    def run_processes(self, host: Host, run_id: str = "") -> list[HostProcess]:
        """Return the processes of the run in the process table of a host."""
        run_id = run_id or self.state().run_id
        alive = [process for process in host.processes() if process.state != "Z"]
        return [p for p in alive if p.environment().get("FLAGSCALE_RUN_ID") == run_id]

    def remaining_processes(self) -> dict[str, list[tuple[str, ...]]]:
        """Return the command lines of the remaining processes of the run by host; empty if every
        host is clean.
        """
        processes = {
            host.name: [p.argv for p in self.run_processes(host)] for host in self.bed.hosts
        }
        return {name: commands for name, commands in processes.items() if commands}

    def kill_processes(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def ssh_lab(bed: Bed, root: Path, **options: Any) -> Iterator[SshLab]:
    """Yield a lab within the block. The hosts' processes end with the bed."""
    root.mkdir(parents=True, exist_ok=True)
    lab = SshLab(bed, root, root / "exp", **options)
    try:
        yield lab
    finally:
        lab.kill_processes()


def start_bystanders(bed: Bed) -> dict[str, list[int]]:
    """Start processes on every host that resemble a run: a torchrun, and a rank of another run.

    Returns their pids by host, as :func:`find_bystanders` does while they are all alive.
    """
    other_rank = "FLAGSCALE_RUN_ID=20200101-000000-abcdef exec -a train_gpt.py sleep 1001"
    for host in bed.hosts:
        for command in ("exec -a torchrun sleep 1000", other_rank):
            subprocess.Popen(
                ["nsenter", "-t", str(host.pid), "-a", "--", "bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    wait_for(lambda: all(len(pids) == 2 for pids in find_bystanders(bed).values()))
    return find_bystanders(bed)


def find_bystanders(bed: Bed) -> dict[str, list[int]]:
    """Return the pids of the running bystanders by host."""
    arguments = (("1000",), ("1001",))
    return {h.name: [p.pid for p in h.processes() if p.argv[1:] in arguments] for h in bed.hosts}
