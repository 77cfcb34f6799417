"""Benchmark of one coordinator with the agents of many hosts.

The coordinator is a real agent, that of host 0. The agents of all other hosts are simulated in one
process: each has a connection of its own and speaks the agents' protocol, but runs no job.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.errors import JobError
from flagscale.free_port import free_port
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import (
    AttemptEnded,
    EndAttempt,
    Heartbeat,
    Hello,
    HostProgress,
    HostStatus,
    Order,
    RankFailed,
)
from flagscale.launcher.liveness.network import Client, ReadyEvents, raise_file_limit
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.status import RUN_ID_VARIABLE

_POLL_SECONDS = 0.02
_POLL_ALL_SECONDS = 0.1
_TIMEOUT_SECONDS = 60.0


@dataclass
class SimulatedAgent:
    """Simulated agent of one host."""

    number: int
    """Index of the host."""
    client: Client
    heartbeat_seconds: float
    """Time between two heartbeats."""
    attempt: int = 0
    """Number of earlier starts of the job."""
    exit_code: int | None = None
    """Exit code of the host's ranks; None while they run."""
    silent: bool = False
    """Neither read nor send, but keep the connection open."""
    orders: list[Order] = field(default_factory=list)
    """Orders received so far."""
    _next_heartbeat: float = 0.0

    def poll(self, ready: ReadyEvents, now: float) -> None:
        if self.silent:
            return
        self.orders += self.client.poll(ready, now)
        if self.client.is_new_connection:
            self.client.is_new_connection = False
            self.client.send(Hello(*self._message_header(), self._host_progress()))
            # Heartbeats of real hosts do not start at the same moment.
            self._next_heartbeat = now + self.heartbeat_seconds * secrets.randbelow(1000) / 1000
        elif now >= self._next_heartbeat:
            self._next_heartbeat = now + self.heartbeat_seconds
            self.client.send(Heartbeat(*self._message_header(), self._host_progress()))

    def report_failure(self) -> Failure:
        """Report a failure of the host's rank."""
        failure = Failure(
            f"h{self.number}",
            rank=self.number,
            exit_code=1,
            reason="failed: boom",
            traceback="",
            log=Path("log"),
        )
        report = FailureReport(failure, time.time(), FailureKind.RANK_FAILED)
        self.client.send(RankFailed(*self._message_header(), report))
        return failure

    def end_attempt(self, code: int) -> None:
        self.exit_code = code
        self.client.send(AttemptEnded(*self._message_header(), self._host_progress()))

    def start_attempt(self, attempt: int) -> None:
        self.attempt, self.exit_code = attempt, None

    def last_order(self, kind: type[Order]) -> Order | None:
        """Return the last order of the given kind, or None."""
        return next((order for order in reversed(self.orders) if isinstance(order, kind)), None)

    def _message_header(self) -> tuple[int, int, float]:
        return self.number, self.attempt, time.time()

    def _host_progress(self) -> HostProgress:
        status = HostStatus.RUNNING if self.exit_code is None else HostStatus.FAILED
        return HostProgress(
            status,
            joined=1,
            nproc=1,
            progress_count=1,
            in_busy_activity=False,
            has_run_long=False,
            exit_code=self.exit_code,
            failure_report=None,
        )


class SimulatedAgents:
    """Simulated agents of hosts 1 to ``count``, connected to a coordinator on this machine."""

    def __init__(self, count: int, key: str, port: int, heartbeat_seconds: float) -> None:
        raise_file_limit(count)
        self._selector = selectors.DefaultSelector()
        self.agents = [
            SimulatedAgent(
                n, Client(key.encode(), ("127.0.0.1", port), self._selector), heartbeat_seconds
            )
            for n in range(1, count + 1)
        ]
        self._agent_by_client = {agent.client: agent for agent in self.agents}
        self._last_poll_all = 0.0

    def run_until(self, condition: Callable[[], bool], seconds: float = _TIMEOUT_SECONDS) -> bool:
        """Process messages until ``condition`` is true. Return False if it is not within
        ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            for ready in self._selector.select(_POLL_SECONDS):
                self._agent_by_client[ready[0].data].poll([ready], time.monotonic())
            if time.monotonic() - self._last_poll_all >= _POLL_ALL_SECONDS:
                self._last_poll_all = time.monotonic()
                for agent in self.agents:
                    agent.poll([], self._last_poll_all)
        return True

    def all_admitted(self) -> bool:
        return all(agent.client.is_connected for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.client.close()
        self._selector.close()


@contextmanager
def run_coordinator(
    scratch: Path, count: int, key: str, **changes: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the agent of host 0, coordinating ``count`` further hosts. Its own job only sleeps.

    Yields the agent's process and the port on which it listens. ``changes`` override agent options.
    """
    port, run_id = free_port(), f"simulated-{secrets.token_hex(4)}"
    options: dict[str, Any] = {
        "max_restarts": 0,
        "on_failure": "stop",
        "lost_host_timeout": 60.0,
        "start_timeout": 600.0,
        "hang_detection_timeout": 0.0,
        "run_name": "simulated",
        "run_dir": scratch / "h0",
        "name": "h0",
        "node_rank": 0,
        "first_rank": 0,
        "nproc": 1,
        "stop_grace": 0.5,
        "master_addr": "127.0.0.1",
        "liveness_port": port,
        "hosts": (f"h[0-{count}]",),
    }
    agent_options = AgentOptions(**{**options, **changes})
    command = [
        sys.executable,
        "-m",
        "flagscale.launcher.agent",
        "--options",
        agent_options.to_json(),
    ]
    command += ["--", "sleep", "3600"]
    environment = {**os.environ, RUN_ID_VARIABLE: run_id, secret.SECRET_VARIABLE: key}
    with (scratch / "output").open("wb") as output:
        agent = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _wait_until_listening(agent, port, scratch / "output")
        yield agent, port
    finally:
        agent.terminate()
        agent.wait()


def _wait_until_listening(agent: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError as error:
            if agent.poll() is not None or time.monotonic() > deadline:
                log = output.read_text(errors="replace")
                raise JobError(f"the coordinator does not listen: {log}") from error
            time.sleep(_POLL_SECONDS)


def measure_coordinator(scratch: Path, *, count: int, seconds: float) -> dict[str, float]:
    """Measure one coordinator with ``count`` agents.

    Returns the seconds until all agents are admitted, the share of a core that the coordinator uses
    when idle, averaged over ``seconds``, and the seconds until a failure has reached all agents.

    Raises:
        JobError: One of these takes longer than a minute.
    """
    key = secret.generate_secret()
    with run_coordinator(scratch, count, key) as (agent, port):
        agents = SimulatedAgents(count, key, port, heartbeat_seconds=5.0)
        start, cpu_before = time.monotonic(), _cpu_seconds(agent.pid)
        _wait_until(agents, agents.all_admitted, "all agents are admitted")
        metrics = {"admission_seconds": time.monotonic() - start}
        metrics["admission_core_seconds"] = _cpu_seconds(agent.pid) - cpu_before
        agents.run_until(lambda: False, 2.0)  # wait for remaining work of the start
        start, cpu_before = time.monotonic(), _cpu_seconds(agent.pid)
        agents.run_until(lambda: False, seconds)
        metrics["rest_core_share"] = (_cpu_seconds(agent.pid) - cpu_before) / (
            time.monotonic() - start
        )
        start = time.monotonic()
        agents.agents[-1].report_failure()
        _wait_until(
            agents, lambda: _all_received(agents.agents, EndAttempt), "the failure has reached all"
        )
        metrics["failure_seconds"] = time.monotonic() - start
        agents.close()
    return {name: round(value, 3) for name, value in metrics.items()}


def _all_received(agents: Sequence[SimulatedAgent], kind: type[Order]) -> bool:
    return all(agent.last_order(kind) is not None for agent in agents)


def _wait_until(agents: SimulatedAgents, condition: Callable[[], bool], description: str) -> None:
    if not agents.run_until(condition):
        raise JobError(f"timeout after {_TIMEOUT_SECONDS:g} s: {description}")


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
