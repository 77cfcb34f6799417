"""Tests of a thousand agents, each with its own connection, at one real coordinator."""

from __future__ import annotations

import json
import resource
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_agents import SimulatedAgent, SimulatedAgents, run_coordinator

from flagscale.files import to_plain
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.messages import EndAttempt, FinishJob, Order, StartAttempt

pytestmark = pytest.mark.integration

COUNT = 1000
SILENCE = 20.0


def all_received(agents: list[SimulatedAgent], kind: type[Order]) -> Callable[[], bool]:
    return lambda: all(agent.last_order(kind) is not None for agent in agents)


def read_record(run_dir: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((run_dir / name).read_text()))


@pytest.fixture
def few_files() -> Iterator[None]:
    """Limit the open files of this process and its children to a common default."""
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits_before[1] < 2 * COUNT:
        pytest.skip(f"no process here may open more than {limits_before[1]} files (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits_before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits_before)


@pytest.mark.usefixtures("few_files")
def test_a_thousand_agents_share_one_fate(tmp_path: Path) -> None:
    key = secret.generate_secret()
    told_of = {"lost_host_timeout": float(SILENCE), "max_restarts": 1}
    with run_coordinator(tmp_path, COUNT, key, **told_of) as (process, port):
        agents = SimulatedAgents(COUNT, key, port, heartbeat_seconds=SILENCE / 5)
        run_dir = tmp_path / "h0"

        # All come at once, and all are admitted and known.
        assert agents.run_until(agents.all_admitted)
        expected = {str(n): "running" for n in range(1, COUNT + 1)} | {"0": "starting"}
        assert agents.run_until(lambda: read_record(run_dir, LIVENESS_FILE)["hosts"] == expected)

        # The failure of one agent reaches all, and all restart once every attempt has ended.
        failure = agents.agents[COUNT // 2].report_failure()
        assert agents.run_until(all_received(agents.agents, EndAttempt))
        assert {agent.last_order(EndAttempt) for agent in agents.agents} == {EndAttempt(0, failure)}
        for agent in agents.agents:
            agent.end_attempt(1)
        assert agents.run_until(all_received(agents.agents, StartAttempt))
        assert read_record(run_dir, LIVENESS_FILE)["restarts"][0]["failure"] == to_plain(failure)

        # One agent stops sending with its connection open, and is reported to all others.
        silent, remaining = agents.agents[-1], agents.agents[:-1]
        silent.silent = True
        for agent in agents.agents:
            agent.start_attempt(1)
            agent.orders.clear()
        assert agents.run_until(all_received(remaining, EndAttempt))
        (last_order,) = {agent.last_order(EndAttempt) for agent in remaining}
        assert isinstance(last_order, EndAttempt)
        assert last_order.failure is not None
        assert (last_order.attempt, last_order.failure.host) == (1, f"h{COUNT}")
        for agent in remaining:
            agent.end_attempt(1)
        assert agents.run_until(all_received(remaining, FinishJob))
        agents.close()
        assert process.wait(60) == 1
        record = read_record(run_dir, EXIT_FILE)
        assert record["failure"]["host"] == f"h{COUNT}"
        assert f"no word from its agent for {SILENCE:g} s" in record["failure"]["reason"]


def test_unauthenticated_peers_do_not_keep_agents_out(tmp_path: Path) -> None:
    """More of them than the limit connect first and send nothing."""
    key = secret.generate_secret()
    with run_coordinator(tmp_path, 20, key) as (_, port):
        peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for peer in peers[::2]:
            peer.sendall(secrets.token_bytes(8))
        agents = SimulatedAgents(20, key, port, heartbeat_seconds=1.0)
        assert agents.run_until(agents.all_admitted)
        for peer in peers:
            peer.close()
        agents.close()
