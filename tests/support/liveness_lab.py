"""Several agents on one machine, each as a host of its own: its own run directory and identity.

The program that the ranks run keeps in step over a TCP connection, as a collective would, reports
through :mod:`flagscale.status`, and does what ``TOY_<rank>_<attempt>`` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.hosts import processes
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.status import RUN_ID_VARIABLE, read_progress
from support.launch_lab import PROJECT, free_port, light_torchrun, until

TOY = r'''
import faulthandler, os, signal, socket, struct, sys, time, traceback
from flagscale.status import StatusWriter

faulthandler.register(signal.SIGUSR2)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["FLAGSCALE_ATTEMPT"]
plan = os.environ.get(f"TOY_{rank}_{attempt}", "work").split(",")
status = StatusWriter.from_environment(rank)
status.write("started", rank=rank, pid=os.getpid(), world_size=world)
if "early" in plan:
    sys.exit(5)


def meet():
    """A connection to every other rank: rank 0 listens."""
    address = (os.environ.get("TOY_ADDRESS", "127.0.0.1"), int(os.environ["TOY_PORT"]))
    if rank == 0:
        listener = socket.create_server(address, reuse_port=True)
        return [listener.accept()[0] for _ in range(world - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except OSError:
            time.sleep(0.1)


def barrier(peers):
    """Wait for all others; a peer that is gone is an error."""
    for peer in peers:
        peer.sendall(b"x")
    for peer in peers:
        if not peer.recv(1):
            raise ConnectionResetError("Connection closed by peer")


def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)


def work():
    peers = meet()
    status.write("joined", backend="toy", seconds=0.1)
    for step in range(1, int(os.environ.get("TOY_STEPS", "100000"))):
        status.write_progress(step)
        if "raise" in plan and step == 5:
            raise ValueError("bad data in shard 7")
        if "exit" in plan and step == 5:
            sys.exit(3)
        if "stuck" in plan and step == 5:
            time.sleep(600)
        if "busy" in plan and step == 5:
            status.write_progress(step, "saving a checkpoint")
            time.sleep(6)
        barrier(peers)
        time.sleep(0.05)
    barrier(peers)


if "save" in plan:
    signal.signal(signal.SIGTERM, save)
try:
    work()
except Exception as error:
    status.write("failed", kind=type(error).__name__, message=str(error),
                 traceback=traceback.format_exc())
    raise
status.write("finished", step=1, reason="completed")
'''


@dataclass
class Station:
    """One agent and what it leaves."""

    name: str
    run_id: str
    run_dir: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def agent(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def exit(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / EXIT_FILE).read_text()))

    def members(self) -> list[processes.Process]:
        return processes.members(self.run_id)

    def rank(self) -> int:
        """The pid of its rank."""
        for process in self.members():
            environment = processes.environment(process.pid)
            above = processes.parent(process.pid)
            own = b"RANK" in environment
            if own and above is not None and b"RANK" not in processes.environment(above):
                return process.pid
        raise AssertionError(f"{self.name} has no rank\n{self.said()}")

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


@dataclass
class Stations:
    """The hosts of one run, one rank each."""

    root: Path
    count: int = 2
    stations: list[Station] = field(default_factory=list)
    secret: str = field(default_factory=secret.new)
    own_secrets: bool = False
    """Whether every host has a secret of its own."""

    def __getitem__(self, number: int) -> Station:
        return self.stations[number]

    def start(
        self,
        told: Mapping[str, Any] | None = None,
        *,
        command: list[str] | None = None,
        light: bool = False,
        **environment: str,
    ) -> None:
        """Start every agent; ``told`` are options that all of them get. ``light``: under a
        torchrun that needs no torch, which starts in a fraction of the time."""
        path = [str(PROJECT)] if not light else [str(light_torchrun(self.root)), str(PROJECT)]
        self.port, meeting, toy = free_port(), free_port(), free_port()
        program = self.root / "toy.py"
        program.write_text(TOY)
        mark = secrets.token_hex(4)
        for number in range(self.count):
            run_dir = self.root / f"h{number}"
            run_dir.mkdir(exist_ok=True)
            station = Station(f"h{number}", f"t-{mark}-{number}", run_dir, run_dir / "out")
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", str(self.count), "--node_rank", str(number)]
            torchrun += ["--nproc_per_node", "1", "--rdzv_id", mark, "--master_addr", "127.0.0.1"]
            torchrun += ["--master_port", str(meeting), "--log_dir", str(run_dir / "ranks")]
            torchrun += ["--redirects", "3", str(program)]
            options = self.options(number, told or {}).to_json()
            given = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
                "TOY_PORT": str(toy),
                RUN_ID_VARIABLE: station.run_id,
                secret.VARIABLE: secret.new() if self.own_secrets else self.secret,
                **environment,
            }
            with station.output.open("wb") as output:
                station.process = subprocess.Popen(
                    [sys.executable, "-m", "flagscale.launcher.agent", "--options", options, "--"]
                    + (command or torchrun),
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.stations.append(station)

    def options(self, number: int, told: Mapping[str, Any]) -> AgentOptions:
        """What the agent of a host is told."""
        given: dict[str, Any] = {"max_restarts": 0, "on_failure": "stop", "lost_host_timeout": 60.0}
        given |= {"start_timeout": 600.0, "hang_detection_timeout": 0.0, "stop_grace": 3.0}
        if self.count > 1:
            given |= {"master_addr": "127.0.0.1", "liveness_port": self.port}
            given |= {"lost_host_timeout": 3.0, "master_name": "h0"}
            given |= {"hosts": (f"h[0-{self.count - 1}]",)}
        return AgentOptions(
            run_name="toy",
            run_dir=self.root / f"h{number}",
            name=f"h{number}",
            node_rank=number,
            first_rank=number,
            nproc=1,
            **{**given, **told},
        )

    def joined(self) -> None:
        """Wait until every rank works."""
        for number, station in enumerate(self.stations):
            directory = station.run_dir / "status"
            until(lambda path=directory, rank=number: read_progress(path, rank))

    def codes(self, seconds: float = 90) -> list[int]:
        """The agents' exit codes."""
        deadline = time.monotonic() + seconds
        for station in self.stations:
            try:
                station.agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.said()) from None
        return [station.agent.returncode for station in self.stations]

    def gone(self, seconds: float = 60) -> None:
        until(lambda: not any(station.members() for station in self.stations), seconds)

    def job(self) -> dict[str, Any]:
        """What the coordinator says."""
        return dict(json.loads((self[0].run_dir / LIVENESS_FILE).read_text()))

    def said(self) -> str:
        return "\n".join(f"--- {s.name}\n{s.said()}" for s in self.stations)

    def clear(self) -> None:
        for station in self.stations:
            with contextlib.suppress(ProcessLookupError):
                station.agent.kill()
            for left in station.members():
                processes.send(left, signal.SIGKILL, run_id=station.run_id)
            station.agent.wait()


@contextlib.contextmanager
def stations(root: Path, count: int = 2) -> Iterator[Stations]:
    made = Stations(root, count)
    try:
        yield made
    finally:
        made.clear()
