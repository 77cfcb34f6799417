"""A thousand agents, each with a connection of its own, at one real coordinator."""

from __future__ import annotations

import json
import resource
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import Crowd, CrowdAgent, coordinator

from flagscale.files import plain
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.messages import EndAttempt, FinishJob, Order, StartAttempt

pytestmark = pytest.mark.integration

COUNT = 1000
SILENCE = 10.0


def told(agents: list[CrowdAgent], kind: type[Order]) -> Callable[[], bool]:
    return lambda: all(agent.got(kind) is not None for agent in agents)


def read(run_dir: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((run_dir / name).read_text()))


@pytest.fixture
def few_files() -> Iterator[None]:
    """The limit of open files that many systems begin with, for this process and its children."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= before[1] < 2 * COUNT:
        pytest.skip(f"no process here may open more than {before[1]} files (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_a_thousand_agents_share_one_fate(tmp_path: Path) -> None:
    key = secret.new()
    told_of = {"lost_host_timeout": float(SILENCE), "max_restarts": 1}
    with coordinator(tmp_path, COUNT, key, **told_of) as (process, port):
        crowd = Crowd(COUNT, key, port, beat_seconds=SILENCE / 5)
        run_dir = tmp_path / "h0"

        # All come at once, and all are admitted and known.
        assert crowd.run(crowd.admitted)
        expected = {str(n): "running" for n in range(1, COUNT + 1)} | {"0": "starting"}
        assert crowd.run(lambda: read(run_dir, LIVENESS_FILE)["hosts"] == expected)

        # What one reports, all hear, and start again once all have ended.
        failure = crowd.agents[COUNT // 2].fail()
        assert crowd.run(told(crowd.agents, EndAttempt))
        assert {agent.got(EndAttempt) for agent in crowd.agents} == {EndAttempt(0, failure)}
        for agent in crowd.agents:
            agent.end(1)
        assert crowd.run(told(crowd.agents, StartAttempt))
        assert read(run_dir, LIVENESS_FILE)["restarts"][0]["failure"] == plain(failure)

        # One falls silent, with its connection open: it is named, to all others.
        silent, others = crowd.agents[-1], crowd.agents[:-1]
        silent.silent = True
        for agent in crowd.agents:
            agent.start(1)
            agent.orders.clear()
        assert crowd.run(told(others, EndAttempt))
        (lost,) = {agent.got(EndAttempt) for agent in others}
        assert isinstance(lost, EndAttempt)
        assert lost.failure is not None
        assert (lost.attempt, lost.failure.host) == (1, f"h{COUNT}")
        for agent in others:
            agent.end(1)
        assert crowd.run(told(others, FinishJob))
        crowd.close()
        assert process.wait(60) == 1
        record = read(run_dir, EXIT_FILE)
        assert record["failure"]["host"] == f"h{COUNT}"
        assert "no word from its agent for 10 s" in record["failure"]["reason"]


def test_unauthenticated_peers_do_not_keep_agents_out(tmp_path: Path) -> None:
    """More of them than may try at once, who come first and say nothing."""
    key = secret.new()
    with coordinator(tmp_path, 20, key) as (_, port):
        peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for peer in peers[::2]:
            peer.sendall(secrets.token_bytes(8))
        crowd = Crowd(20, key, port, beat_seconds=1.0)
        assert crowd.run(crowd.admitted)
        for peer in peers:
            peer.close()
        crowd.close()
