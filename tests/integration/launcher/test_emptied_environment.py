"""Tests of processes of a run that carry nothing of it, because their environment was emptied."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_lab import Lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes
from flagscale.hosts.processes import Process

pytestmark = pytest.mark.integration

DAEMON = "env -i setsid bash -c 'echo $$ >pid; exec sleep 600' &"
"""Command that starts a process in a session of its own, without environment."""


@pytest.fixture
def daemon_file(lab: Lab) -> Iterator[Path]:
    """File with the pid of the daemon, which does not outlive the test."""
    path = lab.root / "pid"
    yield path
    if path.exists() and (process := processes.identify_process(int(path.read_text()))):
        os.kill(process.pid, signal.SIGKILL)


def read_process(path: Path) -> Process:
    """Return the process whose pid is in a file."""
    text = wait_for(lambda: path.exists() and path.read_text())
    process = processes.identify_process(int(text))
    assert process is not None
    return process


def configure_command(lab: Lab, *words: str, **runner: object) -> None:
    lab.configure(
        "",
        task={"type": "command", "command": list(words)},
        runner={"nproc_per_node": 1, "preflight": False, "stop_grace": 2, **runner},
    )


def test_a_daemon_without_environment_ends_with_the_job(lab: Lab, daemon_file: Path) -> None:
    configure_command(lab, "bash", "-c", f"{DAEMON} while [[ ! -s pid ]]; do sleep 0.05; done")
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    pid = int(daemon_file.read_text())
    assert processes.identify_process(pid) is None
    record = json.loads((lab.state().hosts[0].run_dir / "exit.json").read_text())
    assert (record["swept"], record["left"]) == ([pid], [])


def test_a_daemon_without_environment_ends_with_a_stop(lab: Lab, daemon_file: Path) -> None:
    configure_command(lab, "bash", "-c", f"{DAEMON} exec sleep 600", wait_for="none")
    assert lab.run_action("run").returncode == 0
    daemon = read_process(daemon_file)
    result = lab.run_action("stop")
    assert result.returncode == 0, result.stderr
    assert not processes.is_alive(daemon)
    assert lab.run_processes() == []


def test_a_daemon_that_a_killed_agent_has_left_is_reported(lab: Lab, daemon_file: Path) -> None:
    configure_command(lab, "bash", "-c", f"{DAEMON} exec sleep 600", wait_for="none")
    assert lab.run_action("run").returncode == 0
    daemon = read_process(daemon_file)
    run_dir = lab.state().hosts[0].run_dir
    os.kill(json.loads((run_dir / "agent.json").read_text())["pid"], signal.SIGKILL)
    lab.wait_until_ended()
    assert json.loads((run_dir / "exit.json").read_text())["left"] == [daemon.pid]
    assert f"has left processes with an emptied environment: {daemon.pid}\n" in lab.output()


def test_a_command_that_empties_its_environment_counts_as_started(
    lab: Lab, daemon_file: Path
) -> None:
    """Its ranks get their whole grace period in a stop, too."""
    saving = 'trap "sleep 1; echo saved >saved; exit 0" TERM; echo $$ >pid; '
    waiting = "while :; do sleep 0.05; done"
    configure_command(
        *(lab, "env", "-i", "bash", "-c", saving + waiting),
        start_timeout=PATIENCE_SECONDS,
        stop_grace=30,
    )
    start_time = time.monotonic()
    result = lab.run_action("run")
    assert "1 rank process(es) are running" in result.stdout, result.stderr
    assert time.monotonic() - start_time < PATIENCE_SECONDS
    rank = read_process(daemon_file)
    assert json.loads(lab.run_action("query", "json=true").stdout)["state"] == "running"
    assert lab.run_action("stop").returncode == 0
    assert not processes.is_alive(rank)
    assert (lab.root / "saved").read_text() == "saved\n"


def test_another_run_that_was_started_from_a_rank_goes_on(lab: Lab, daemon_file: Path) -> None:
    """A job may launch a run in the background, which is a run of its own."""
    other = (
        "env FLAGSCALE_RUN_ID=another setsid bash -c 'echo $$ >pid; env -i sleep 600; echo over' &"
    )
    configure_command(lab, "bash", "-c", f"{other} while [[ ! -s pid ]]; do sleep 0.05; done")
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    other_process = read_process(daemon_file)
    assert processes.is_alive(other_process)
    (child,) = wait_for(lambda: processes.find_descendants(other_process.pid, "another"))
    assert processes.is_alive(child)
    for process in (other_process, child):
        os.kill(process.pid, signal.SIGKILL)
