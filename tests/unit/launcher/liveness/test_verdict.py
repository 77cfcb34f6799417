"""Tests of the launcher's reading of the hosts' files, with and without the agents' decision."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flagscale.files import to_plain
from flagscale.launcher.failures import find_first_failure, read_job_record
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState
from flagscale.status import Event


def lost_record(host: str, rank: int | None, code: int | None = None) -> dict[str, Any]:
    return to_plain(Failure(host, rank, code, "was lost", "", Path("log")))


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    hosts = []
    for n in range(2):
        run_dir = tmp_path / f"h{n}"
        run_dir.mkdir()
        paths = {name: run_dir / name for name in ("script", "output", "pid_file")}
        hosts.append(HostState(f"h{n}", n, 1, run_dir, node_rank=n, **paths))
    return RunState(
        "r",
        name="n",
        exp_dir=tmp_path,
        started=time.time(),
        world_size=2,
        external=True,
        stop_grace=1.0,
        runner=RunnerHandle("local"),
        hosts=tuple(hosts),
    )


def write_exit_record(state: RunState, host: int, name: str = EXIT_FILE, **record: Any) -> None:
    fields = {"code": 1, "phase": "job", "signal": None, "ended": 1.0, **record}
    (state.hosts[host].run_dir / name).write_text(json.dumps(fields), encoding="utf-8")


def first_failure(state: RunState, *events: Event) -> tuple[str, int | None, int | None, str]:
    failure = find_first_failure(state, {event.rank: [event] for event in events})
    assert failure is not None
    return failure.host, failure.rank, failure.exit_code, failure.reason


def test_failure_of_host_0_takes_precedence(state: RunState) -> None:
    write_exit_record(state, 0, failure=lost_record("h1", 1, 3))
    write_exit_record(state, 1, failure=lost_record("h0", None))
    assert first_failure(state)[:3] == ("h1", 1, 3)


def test_failure_of_another_host_without_a_record_of_host_0(state: RunState) -> None:
    write_exit_record(state, 1, failure=lost_record("h0", None))
    assert first_failure(state)[:2] == ("h0", None)


def test_failure_from_the_summary_while_the_job_runs(state: RunState) -> None:
    shortened = {**lost_record("h1", 1), "reason": "failed: E: m"}
    write_exit_record(state, 0, LIVENESS_FILE, attempt=2, attempts=3, failure=shortened)
    assert first_failure(state)[:2] == ("h1", 1)
    assert read_job_record(state.hosts)["attempt"] == 2
    failed = Event(1, 5.0, "failed", {"kind": "E", "message": "m\nall of it"})
    assert first_failure(state, failed)[3] == "failed: E: m\nall of it"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_agent_explains_a_loss(state: RunState, victim: int) -> None:
    survivor = 1 - victim
    write_exit_record(state, survivor, failure=lost_record(f"h{victim}", None))
    write_exit_record(state, victim, code=137, phase="agent")
    host, rank, code, reason = first_failure(state)
    assert (host, rank, code) == (f"h{victim}", None, 137)
    assert "lost its agent" in reason


@pytest.mark.parametrize("record", [{}, {"failure": 3}, {"failure": {"host": "x"}}])
def test_without_a_verdict_the_files_have_to_do(state: RunState, record: dict[str, Any]) -> None:
    write_exit_record(state, 0, code=2, **record)
    assert "exit code 2" in first_failure(state)[3]
