"""What the launcher makes of the hosts' files once their agents have agreed, or could not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flagscale.files import plain
from flagscale.launcher.failures import first_failure, job_record
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState
from flagscale.status import Event


def verdict(host: str, rank: int | None, code: int | None = None) -> dict[str, Any]:
    return plain(Failure(host, rank, code, "was lost", "", Path("log")))


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    hosts = []
    for n in range(2):
        run_dir = tmp_path / f"h{n}"
        run_dir.mkdir()
        paths = {name: run_dir / name for name in ("script", "output", "pid_file")}
        hosts.append(HostState(f"h{n}", n, 1, run_dir, node_rank=n, **paths))
    return RunState(
        "r", "n", tmp_path, time.time(), 2, True, 1.0, RunnerHandle("local"), tuple(hosts)
    )


def leave(state: RunState, host: int, name: str = EXIT_FILE, **record: Any) -> None:
    given = {"code": 1, "phase": "job", "signal": None, "ended": 1.0, **record}
    (state.hosts[host].run_dir / name).write_text(json.dumps(given), encoding="utf-8")


def first(state: RunState, *events: Event) -> tuple[str, int | None, int | None, str]:
    found = first_failure(state, {event.rank: [event] for event in events})
    assert found is not None
    return found.host, found.rank, found.exit_code, found.reason


def test_host_0_knows_best(state: RunState) -> None:
    leave(state, 0, failure=verdict("h1", 1, 3))
    leave(state, 1, failure=verdict("h0", None))
    assert first(state)[:3] == ("h1", 1, 3)


def test_another_host_knows_where_host_0_left_nothing(state: RunState) -> None:
    leave(state, 1, failure=verdict("h0", None))
    assert first(state)[:2] == ("h0", None)


def test_while_it_runs_the_coordinator_tells(state: RunState) -> None:
    shortened = {**verdict("h1", 1), "reason": "failed: E: m"}
    leave(state, 0, LIVENESS_FILE, attempt=2, attempts=3, failure=shortened)
    assert first(state)[:2] == ("h1", 1)
    assert job_record(state.hosts)["attempt"] == 2
    failed = Event(1, 5.0, "failed", {"kind": "E", "message": "m\nall of it"})
    assert first(state, failed)[3] == "failed: E: m\nall of it"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_agent_explains_a_loss(state: RunState, victim: int) -> None:
    other = 1 - victim
    leave(state, other, failure=verdict(f"h{victim}", None))
    leave(state, victim, code=137, phase="agent")
    host, rank, code, reason = first(state)
    assert (host, rank, code) == (f"h{victim}", None, 137)
    assert "lost its agent" in reason


@pytest.mark.parametrize("record", [{}, {"failure": 3}, {"failure": {"host": "x"}}])
def test_without_a_verdict_the_files_have_to_do(state: RunState, record: dict[str, Any]) -> None:
    leave(state, 0, code=2, **record)
    assert "exit code 2" in first(state)[3]
