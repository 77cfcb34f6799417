"""Tests of runs whose hosts end before every rank has joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagscale.errors import JobError
from flagscale.files import make_private_directory, write_json
from flagscale.hosts.hostfile import Host
from flagscale.launcher import snapshot, start
from flagscale.launcher.layout import EXIT_FILE
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.state import RunState, make_state

MakePlan = Callable[..., LaunchPlan]


class FileRunner(HostRunner):
    """A runner that determines the end of runs from their files only."""

    stopped = False
    brings = ""

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        ended_flags = [host.exit() is not None for host in state.hosts]
        return any(ended_flags) if any_host else all(ended_flags)

    def query(self, state: RunState, *, with_lines: bool = False) -> snapshot.Snapshot:
        return snapshot.take_snapshot(state, {})

    def bring_output(self, state: RunState) -> None:
        state.hosts[0].output.parent.mkdir(parents=True, exist_ok=True)
        state.hosts[0].output.write_text(self.brings, encoding="utf-8")

    def stop(self, state: RunState) -> Any:
        self.stopped = True


@pytest.fixture
def state(make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunState:
    monkeypatch.setattr(start, "_FAILURE_REPORT_SECONDS", 0.1)
    return make_state(make_plan(hosts=(Host("h0"), Host("h1")), exp_dir=tmp_path / "exp"))


def write_exit_record(state: RunState, rank: int, code: int, **more: Any) -> None:
    run_dir = state.hosts[rank].run_dir
    make_private_directory(run_dir)
    write_json(run_dir / EXIT_FILE, {"code": code, "ended": 1.0, "phase": "job", **more})


def test_job_that_succeeds_on_one_host_first_may_finish(state: RunState) -> None:
    runner = FileRunner()
    write_exit_record(state, 0, 0)
    assert "ended on some hosts, without an error" in start.wait_until_started(state, runner, 60)
    assert not runner.stopped


def test_job_is_stopped_after_an_unexplained_end_of_one_host(
    state: RunState,
) -> None:
    runner = FileRunner()
    write_exit_record(state, 1, 143, signal=15)
    with pytest.raises(JobError, match=r"the script ended on h\[0-1\] before every"):
        start.wait_until_started(state, runner, 60)
    assert runner.stopped


def test_output_is_fetched_before_it_is_quoted(state: RunState) -> None:
    runner = FileRunner()
    runner.brings = "/opt/no such/python: No such file or directory\n"
    write_exit_record(state, 1, 143, signal=15)
    with pytest.raises(JobError, match="/opt/no such/python: No such file"):
        start.wait_until_started(state, runner, 60)


def test_a_host_that_failed_is_named(state: RunState) -> None:
    write_exit_record(state, 1, 5, phase="before_start")
    with pytest.raises(JobError, match="h1: before_start failed with exit code 5"):
        start.wait_until_started(state, FileRunner(), 60)
