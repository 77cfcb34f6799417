"""The agents of many hosts against one coordinator: what it costs to keep them together.

The coordinator is a real agent, the one of host 0. The others are one process with a connection
each, which speak as agents do but run nothing: a *crowd*.
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
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.diagnosis import Failure, Report, Severity
from flagscale.launcher.liveness.messages import (
    Beat,
    EndAttempt,
    Ended,
    Hello,
    HostStatus,
    Order,
    Position,
    Reported,
)
from flagscale.launcher.liveness.network import Client, Ready, allow_files
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.status import RUN_ID_VARIABLE

_TURN_SECONDS = 0.02
_SWEEP_SECONDS = 0.1
_LIMIT_SECONDS = 60.0


@dataclass
class CrowdAgent:
    """One host. ``orders`` are those that it was given; a ``silent`` one neither hears nor says
    anything, and its connection stays."""

    number: int
    client: Client
    beat_seconds: float
    attempt: int = 0
    ended: int | None = None
    silent: bool = False
    orders: list[Order] = field(default_factory=list)
    _beat_at: float = 0.0

    def turn(self, ready: Ready, now: float) -> None:
        if self.silent:
            return
        self.orders += self.client.poll(ready, now)
        if self.client.fresh:
            self.client.fresh = False
            self.client.send(Hello(*self._head(), self._position()))
            # Agents of real hosts have not all begun in the same moment.
            self._beat_at = now + self.beat_seconds * secrets.randbelow(1000) / 1000
        elif now >= self._beat_at:
            self._beat_at = now + self.beat_seconds
            self.client.send(Beat(*self._head(), self._position()))

    def fail(self) -> Failure:
        """Report a failure of the host's rank."""
        failure = Failure(f"h{self.number}", self.number, 1, "failed: boom", "", Path("log"))
        report = Report(failure, time.time(), Severity.FAILED)
        self.client.send(Reported(*self._head(), report))
        return failure

    def end(self, code: int) -> None:
        self.ended = code
        self.client.send(Ended(*self._head(), self._position()))

    def start(self, attempt: int) -> None:
        self.attempt, self.ended = attempt, None

    def got(self, kind: type[Order]) -> Order | None:
        """The last order of this kind."""
        return next((order for order in reversed(self.orders) if isinstance(order, kind)), None)

    def _head(self) -> tuple[int, int, float]:
        return self.number, self.attempt, time.time()

    def _position(self) -> Position:
        status = HostStatus.RUNNING if self.ended is None else HostStatus.FAILED
        return Position(status, 1, 1, 1, False, False, self.ended, None)


class Crowd:
    """The agents of hosts 1 to ``count``, which meet the coordinator at a port of this machine."""

    def __init__(self, count: int, key: str, port: int, beat_seconds: float) -> None:
        allow_files(count)
        self._selector = selectors.DefaultSelector()
        self.agents = [
            CrowdAgent(n, Client(key.encode(), ("127.0.0.1", port), self._selector), beat_seconds)
            for n in range(1, count + 1)
        ]
        self._by_client = {agent.client: agent for agent in self.agents}
        self._swept = 0.0

    def run(self, condition: Callable[[], bool], seconds: float = _LIMIT_SECONDS) -> bool:
        """Speak and listen until the condition is true; whether it became so in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            for ready in self._selector.select(_TURN_SECONDS):
                self._by_client[ready[0].data].turn([ready], time.monotonic())
            if time.monotonic() - self._swept >= _SWEEP_SECONDS:
                self._swept = time.monotonic()
                for agent in self.agents:
                    agent.turn([], self._swept)
        return True

    def admitted(self) -> bool:
        return all(agent.client.ready for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.client.close()
        self._selector.close()


@contextmanager
def coordinator(
    scratch: Path, count: int, key: str, **changes: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The agent of host 0 of a run of ``count`` others, whose own job does nothing, and the port
    at which it listens. ``changes`` are options of it."""
    port, run_id = _free_port(), f"crowd-{secrets.token_hex(4)}"
    options: dict[str, Any] = {
        "max_restarts": 0,
        "on_failure": "stop",
        "lost_host_timeout": 60.0,
        "start_timeout": 600.0,
        "hang_detection_timeout": 0.0,
        "run_name": "crowd",
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
    told = AgentOptions(**{**options, **changes})
    command = [sys.executable, "-m", "flagscale.launcher.agent", "--options", told.to_json()]
    command += ["--", "sleep", "3600"]
    given = {**os.environ, RUN_ID_VARIABLE: run_id, secret.VARIABLE: key}
    with (scratch / "output").open("wb") as output:
        agent = subprocess.Popen(
            command, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _until_listening(agent, port, scratch / "output")
        yield agent, port
    finally:
        agent.terminate()
        agent.wait()


def _until_listening(agent: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError as error:
            if agent.poll() is not None or time.monotonic() > deadline:
                said = output.read_text(errors="replace")
                raise JobError(f"the coordinator does not listen: {said}") from error
            time.sleep(_TURN_SECONDS)


def measure(scratch: Path, *, count: int, seconds: float) -> dict[str, float]:
    """Seconds until all are admitted; share of a core that the coordinator takes at rest, over so
    many seconds; seconds until a failure has reached all.

    Raises :class:`JobError` where one of these does not come about within a minute.
    """
    key = secret.new()
    with coordinator(scratch, count, key) as (agent, port):
        crowd = Crowd(count, key, port, beat_seconds=5.0)
        began, worked = time.monotonic(), _worked(agent.pid)
        _wait(crowd, crowd.admitted, "all agents are admitted")
        found = {"admission_seconds": time.monotonic() - began}
        found["admission_core_seconds"] = _worked(agent.pid) - worked
        crowd.run(lambda: False, 2.0)  # what the start has left to do
        began, worked = time.monotonic(), _worked(agent.pid)
        crowd.run(lambda: False, seconds)
        found["rest_core_share"] = (_worked(agent.pid) - worked) / (time.monotonic() - began)
        began = time.monotonic()
        crowd.agents[-1].fail()
        _wait(crowd, lambda: _told(crowd.agents, EndAttempt), "the failure has reached all")
        found["failure_seconds"] = time.monotonic() - began
        crowd.close()
    return {name: round(value, 3) for name, value in found.items()}


def _told(agents: Sequence[CrowdAgent], kind: type[Order]) -> bool:
    return all(agent.got(kind) is not None for agent in agents)


def _wait(crowd: Crowd, condition: Callable[[], bool], what: str) -> None:
    if not crowd.run(condition):
        raise JobError(f"not within {_LIMIT_SECONDS:g} s: {what}")


def _worked(pid: int) -> float:
    """Seconds that a process has had of a core."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
