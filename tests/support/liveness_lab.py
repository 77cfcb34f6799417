"""Several agents on one machine, each acting as a host with its own run directory and identity.

The program that the ranks run stays in step over a TCP connection, like a collective, reports
through :mod:`flagscale.status`, and follows the instructions in ``TOY_<rank>_<attempt>``.
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

from flagscale.free_port import free_port
from flagscale.hosts import processes
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.status import RUN_ID_VARIABLE, read_progress
from support.launch_lab import PROJECT, write_light_torchrun
from support.waiting import PATIENCE_SECONDS, wait_for

TOY_PROGRAM = r'''
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


def connect_peers():
    """Return connections to the peers. Rank 0 listens, the others connect to it."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["TOY_PORT"]))
    if rank == 0:
        listener = socket.create_server(address, reuse_port=True)
        return [listener.accept()[0] for _ in range(world - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except OSError:
            time.sleep(0.1)


def barrier(peers):
    """Wait for all peers, and raise ConnectionResetError if one has exited."""
    try:
        for peer in peers:
            peer.sendall(b"x")
        for peer in peers:
            if not peer.recv(1):
                raise ConnectionResetError("Connection closed by peer")
    except ConnectionError:
        if {"patient", "save"} & {*plan}:  # like a collective without a timeout
            time.sleep(600)
        raise


def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)


def work():
    peers = connect_peers()
    status.write("joined", backend="toy", seconds=0.1)
    for step in range(1, int(os.environ.get("TOY_STEPS", "100000"))):
        status.write_progress(step)
        if "raise" in plan and step == 5:
            raise ValueError("bad data in shard 7")
        if "leave" in plan and step == 5:
            os._exit(0)
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
class AgentHost:
    """An agent, and the files of its host."""

    name: str
    run_id: str
    run_dir: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def agent(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def exit_record(self) -> dict[str, Any]:
        """Return the exit record that the agent has written."""
        return dict(json.loads((self.run_dir / EXIT_FILE).read_text()))

    def run_processes(self) -> list[processes.Process]:
        return processes.find_run_processes(self.run_id)

    def rank_pid(self) -> int:
        """Return the pid of the host's rank."""
        for process in self.run_processes():
            environment = processes.read_environment(process.pid)
            parent = processes.parent_pid_of(process.pid)
            is_rank = b"RANK" in environment
            if is_rank and parent is not None and b"RANK" not in processes.read_environment(parent):
                return process.pid
        raise AssertionError(f"{self.name} has no rank\n{self.read_output()}")

    def read_output(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


@dataclass
class AgentHosts:
    """The hosts of one run, with one rank each."""

    root: Path
    count: int = 2
    hosts: list[AgentHost] = field(default_factory=list)
    secret: str = field(default_factory=secret.generate_secret)
    separate_secrets: bool = False
    """Generate a separate secret for each host, so that agents reject each other."""

    def __getitem__(self, number: int) -> AgentHost:
        return self.hosts[number]

    def start(
        self,
        overrides: Mapping[str, Any] | None = None,
        *,
        command: list[str] | None = None,
        light: bool = False,
        **environment: str,
    ) -> None:
        """Start every agent.

        ``overrides`` are options for all of them. ``light`` uses a torchrun that does not need
        torch, which starts in a fraction of the time.
        """
        path = [str(PROJECT)] if not light else [str(write_light_torchrun(self.root)), str(PROJECT)]
        self.port, rendezvous_port, toy_port = free_port(), free_port(), free_port()
        program = self.root / "toy.py"
        program.write_text(TOY_PROGRAM)
        rendezvous_id = secrets.token_hex(4)
        for number in range(self.count):
            run_dir = self.root / f"h{number}"
            run_dir.mkdir(exist_ok=True)
            host = AgentHost(f"h{number}", f"t-{rendezvous_id}-{number}", run_dir, run_dir / "out")
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", str(self.count), "--node_rank", str(number)]
            torchrun += [
                "--nproc_per_node",
                "1",
                "--rdzv_id",
                rendezvous_id,
                "--master_addr",
                "127.0.0.1",
            ]
            torchrun += ["--master_port", str(rendezvous_port), "--log_dir", str(run_dir / "ranks")]
            torchrun += ["--redirects", "3", str(program)]
            options = self.options(number, overrides or {}).to_json()
            agent_environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
                "TOY_PORT": str(toy_port),
                RUN_ID_VARIABLE: host.run_id,
                secret.SECRET_VARIABLE: secret.generate_secret()
                if self.separate_secrets
                else self.secret,
                **environment,
            }
            with host.output.open("wb") as output:
                host.process = subprocess.Popen(
                    [sys.executable, "-m", "flagscale.launcher.agent", "--options", options, "--"]
                    + (command or torchrun),
                    env=agent_environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.hosts.append(host)

    def options(self, number: int, overrides: Mapping[str, Any]) -> AgentOptions:
        """Return the options of a host's agent."""
        defaults: dict[str, Any] = {
            "max_restarts": 0,
            "on_failure": "stop",
            "lost_host_timeout": 60.0,
        }
        defaults |= {"start_timeout": 600.0, "hang_detection_timeout": 0.0, "stop_grace": 3.0}
        defaults["nproc"] = 1
        if self.count > 1:
            defaults |= {"master_addr": "127.0.0.1", "liveness_port": self.port}
            # A short pause of an agent must not count as a loss.
            defaults |= {"lost_host_timeout": 8.0, "master_name": "h0"}
            defaults |= {"hosts": (f"h[0-{self.count - 1}]",)}
        return AgentOptions(
            run_name="toy",
            run_dir=self.root / f"h{number}",
            name=f"h{number}",
            node_rank=number,
            first_rank=number,
            **{**defaults, **overrides},
        )

    def wait_until_joined(self) -> None:
        """Wait until every rank has joined."""
        for number, host in enumerate(self.hosts):
            directory = host.run_dir / "status"
            wait_for(lambda path=directory, rank=number: read_progress(path, rank))

    def wait_for_exit_codes(self) -> list[int]:
        """Wait for all agents, and return their exit codes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for host in self.hosts:
            try:
                host.agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.read_outputs()) from None
        return [host.agent.returncode for host in self.hosts]

    def wait_until_ended(self, seconds: float = 60) -> None:
        """Wait until all processes of the run have ended."""
        wait_for(lambda: not any(host.run_processes() for host in self.hosts), seconds=seconds)

    def job_summary(self) -> dict[str, Any]:
        """Return the coordinator's summary of the job."""
        return dict(json.loads((self[0].run_dir / LIVENESS_FILE).read_text()))

    def read_outputs(self) -> str:
        return "\n".join(f"--- {s.name}\n{s.read_output()}" for s in self.hosts)

    def kill_processes(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                host.agent.kill()
            for process in host.run_processes():
                processes.send_signal(process, signal.SIGKILL, run_id=host.run_id)
            host.agent.wait()


@contextlib.contextmanager
def agent_hosts(root: Path, count: int = 2) -> Iterator[AgentHosts]:
    """Yield hosts whose agents a test can start, and kill all their processes at the end."""
    hosts = AgentHosts(root, count)
    try:
        yield hosts
    finally:
        hosts.kill_processes()
