"""Tests that runs are found, listed and ended even after changes to their directories."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch_lab import PROJECT, Lab, remove_directory
from support.ssh_lab import STEADY_PROGRAM
from support.waiting import wait_for
from support.warm_programs import run_command_line

from flagscale.hosts import processes
from flagscale.launcher.state import RunState

pytestmark = pytest.mark.integration

PROGRAM = STEADY_PROGRAM.replace("{project!r}", repr(str(PROJECT)))
FAILS = """\
import os, sys, time
sys.path.insert(0, {project!r})
from flagscale.status import StatusWriter
rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
status.write("joined", backend="none")
if rank == 1:
    status.write("failed", kind="ValueError", message="no such token", traceback="")
    sys.exit(3)
time.sleep(600)
""".replace("{project!r}", repr(str(PROJECT)))


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/flagscale/runs"


def flagscale(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flagscale.cli", *argv]
    return run_command_line(command, environment=Lab.environment(), cwd=cwd, timeout=60)


def list_runs(root: Path, *argv: str) -> dict[str, dict[str, Any]]:
    """Return the output of ``flagscale runs`` by id."""
    result = flagscale("runs", "--json", *argv, cwd=root)
    assert result.returncode == 0, result.stderr
    return {row["run_id"]: row for row in json.loads(result.stdout)}


def start(lab: Lab, **experiment: Any) -> RunState:
    lab.configure(PROGRAM, light=True, **experiment)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    return lab.state()


def has_ended(state: RunState) -> bool:
    return not processes.find_run_processes(state.run_id)


@pytest.mark.parametrize("by", ["id", "beginning", "directory", "configuration"])
def test_a_run_without_its_directory_is_ended(lab: Lab, by: str) -> None:
    state = start(lab)
    texts = {
        "id": state.run_id,
        "beginning": state.run_id[:-2],
        "directory": "./exp",
        "configuration": "conf/lab.yaml",
    }
    remove_directory(lab.exp_dir)
    assert processes.find_run_processes(state.run_id)
    result = flagscale("stop", texts[by], cwd=lab.root)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"run {state.run_id} of lab stopped in" in result.stdout
    assert has_ended(state)
    assert not lab.exp_dir.exists()
    second_result = flagscale("stop", texts[by], cwd=lab.root)
    assert second_result.returncode == 0
    assert f"run {state.run_id} of lab has ended already (stopped)" in second_result.stdout


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param('{"run_id": "x"}', id="another-version"),
        pytest.param(None, id="cut"),
    ],
)
def test_a_run_with_a_damaged_state_is_ended_by_its_directory(
    lab: Lab, content: str | None
) -> None:
    state = start(lab)
    text = lab.layout.state.read_text(encoding="utf-8")
    lab.layout.state.write_text(text[:200] if content is None else content, encoding="utf-8")
    refused = lab.run_action("run")
    assert refused.returncode != 0
    assert "state.json" in refused.stderr
    assert not has_ended(state)
    result = flagscale("stop", "./exp", cwd=lab.root)
    assert result.returncode == 0, result.stderr
    assert f"run {state.run_id}, which is registered, is used" in result.stderr
    assert has_ended(state)
    query = flagscale("query", "./exp", "--json", cwd=lab.root)
    assert json.loads(query.stdout)["state"] == "stopped"
    lab.layout.state.write_text(text, encoding="utf-8")  # read after the test


def test_stop_of_a_run_that_was_never_started(lab: Lab) -> None:
    lab.configure(PROGRAM, light=True)
    by_config = flagscale("stop", "conf/lab.yaml", cwd=lab.root)
    assert by_config.returncode == 0
    assert "nothing to stop" in by_config.stdout
    by_id = flagscale("stop", "19700101-000000-nobody", cwd=lab.root)
    assert by_id.returncode == 1
    assert "is not a run id" in by_id.stderr


@pytest.mark.parametrize("preflight", [True, False])
def test_no_second_start_while_a_run_without_files_is_alive(lab: Lab, preflight: bool) -> None:
    state = start(lab, runner={"preflight": preflight})
    remove_directory(lab.exp_dir)
    result = lab.run_action("run")
    assert result.returncode == 1
    assert f"run {state.run_id} of lab is alive in {lab.exp_dir}" in result.stderr
    assert len(processes.find_ranks(processes.find_run_processes(state.run_id))) == 2
    assert lab.run_action("stop").returncode == 0
    assert lab.run_action("run").returncode == 0
    assert lab.state().run_id != state.run_id
    assert lab.run_action("stop").returncode == 0


def test_relative_directory_from_another_working_directory(lab: Lab, tmp_path: Path) -> None:
    """``run`` reports a run elsewhere, and ``stop`` ends it."""
    second_directory = tmp_path / "elsewhere"
    second_directory.mkdir()
    first_state = start(lab, exp_dir="exp")
    assert first_state.exp_dir == lab.exp_dir
    config = str(lab.root / "conf/lab.yaml")
    second_result = flagscale("run", config, cwd=second_directory)
    assert second_result.returncode == 0, second_result.stderr
    note = f"note: run {first_state.run_id} of this configuration lives in {lab.exp_dir}"
    assert note in second_result.stderr
    result = flagscale("stop", config, cwd=second_directory)
    assert result.returncode == 0
    assert first_state.run_id not in result.stdout
    assert not has_ended(first_state)
    third_directory = tmp_path / "third"
    third_directory.mkdir()
    query_result = flagscale("query", config, "--json", cwd=third_directory)
    assert json.loads(query_result.stdout)["run_id"] == first_state.run_id
    stop_result = flagscale("stop", config, cwd=third_directory)
    assert f"note: run {first_state.run_id} was started in {lab.exp_dir}" in stop_result.stderr
    assert stop_result.returncode == 0
    assert has_ended(first_state)
    nothing = flagscale("stop", config, cwd=third_directory)
    assert (nothing.returncode, "nothing to stop" in nothing.stdout) == (0, True)


def test_runs_are_listed(lab: Lab) -> None:
    state = start(lab)
    wait_for(lambda: list_runs(lab.root)[state.run_id]["step"])
    row = list_runs(lab.root)[state.run_id]
    assert (row["name"], row["state"], row["hosts"]) == ("lab", "running", ["localhost"])
    assert (row["exp_dir"], row["there"], row["failures"]) == (str(lab.exp_dir), True, [])
    assert row["step"].endswith("/10000")
    assert row["started"] == state.started
    for text in (state.run_id, "./exp"):
        assert len(flagscale("logs", text, "-n", "1", cwd=lab.root).stdout.splitlines()) == 1
        query_result = flagscale("query", text, "--json", cwd=lab.root)
        assert json.loads(query_result.stdout)["run_id"] == state.run_id
    # Of this experiment alone: the list of all runs includes those of other tests at this time.
    table = flagscale("runs", "./exp", cwd=lab.root).stdout
    heading = next(line for line in table.splitlines() if "state" in line)
    assert heading.split() == ["run", "name", "state", "step", "age", "hosts", "directory"]
    for rows in (table, flagscale("runs", cwd=lab.root).stdout):
        table_row = next(line for line in rows.splitlines() if state.run_id in line)
        assert table_row.split()[1:3] == ["lab", "running"]
    remove_directory(lab.exp_dir)
    row = list_runs(lab.root)[state.run_id]
    assert (row["state"], row["there"]) == ("running", False)
    assert flagscale("stop", state.run_id, cwd=lab.root).returncode == 0
    assert list_runs(lab.root)[state.run_id]["state"] == "stopped"
    query_result = json.loads(flagscale("query", state.run_id, "--json", cwd=lab.root).stdout)
    assert [query_result["state"], *(host["state"] for host in query_result["hosts"])] == [
        "stopped"
    ] * 2
    assert f"{lab.exp_dir} (gone)" in flagscale("runs", cwd=lab.root).stdout.replace("\n", "")


@pytest.mark.parametrize("by", ["id", "directory", "configuration"])
def test_a_runs_attempts_are_listed_with_their_failures(lab: Lab, by: str) -> None:
    lab.configure(FAILS, light=True, runner={"max_restarts": 1, "wait_for": "none"})
    assert lab.run_action("run").returncode == 0
    first_state = lab.state()
    wait_for(lambda: list_runs(lab.root)[first_state.run_id]["state"] == "failed")
    argv = {"id": first_state.run_id, "directory": "./exp", "configuration": "conf/lab.yaml"}[by]
    for has_files in (True, False):
        result = flagscale("runs", argv, cwd=lab.root)
        assert result.returncode == 0
        for attempt in (1, 2):
            assert (
                f"{first_state.run_id} attempt {attempt}: localhost: rank 1 failed" in result.stdout
            )
            assert "ValueError: no such token" in result.stdout
        if has_files:
            remove_directory(lab.exp_dir)
    assert flagscale("runs", "./nowhere", cwd=lab.root).returncode == 1


def test_unregistered_run_is_found_by_its_processes(lab: Lab, registry: Path) -> None:
    state = start(lab)
    shutil.rmtree(registry)
    remove_directory(lab.exp_dir)
    row = list_runs(lab.root)[state.run_id]
    assert (row["state"], row["exp_dir"]) == ("running", str(lab.exp_dir))
    rejected = lab.run_action("run")
    assert rejected.returncode == 1
    assert f"run {state.run_id}" in rejected.stderr
    result = flagscale("stop", state.run_id, cwd=lab.root)
    assert (result.returncode, result.stderr) == (0, "")
    assert has_ended(state)
    assert state.run_id not in list_runs(lab.root)


def test_a_registry_that_cannot_be_written_costs_a_note(lab: Lab, registry: Path) -> None:
    registry.parents[1].write_text("a file", encoding="utf-8")
    lab.configure(PROGRAM, light=True)
    result = lab.run_action("run")
    assert result.returncode == 0
    state = lab.state()
    assert f"note: run {state.run_id} is not registered: {registry.parents[0]}" in result.stderr
    assert flagscale("stop", state.run_id, cwd=lab.root).returncode == 0
    assert has_ended(state)


def test_a_launcher_that_dies_leaves_a_run_to_stop(lab: Lab, registry: Path) -> None:
    lab.configure(PROGRAM, light=True)
    launcher = lab.start("run")
    wait_for(lambda: list(registry.glob("*.json")))
    wait_for(lab.layout.state.exists)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    (path,) = registry.glob("*.json")
    run_id = path.stem
    remove_directory(lab.exp_dir)
    result = flagscale("stop", run_id, cwd=lab.root)
    assert result.returncode == 0, result.stderr
    assert not processes.find_run_processes(run_id)
