"""Tests of stops on a full disk, and of ranks that do not end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.full_disk import fill_disk, small_disk
from support.launch_lab import Lab, rank_processes
from support.waiting import wait_for

from flagscale.hosts import processes

pytestmark = pytest.mark.integration

SLEEPING = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
REPORTING = """
import os, signal, sys, time
from flagscale.status import StatusWriter
status = StatusWriter.from_environment(int(os.environ["RANK"]))
def save(*_):
    status.write("checkpoint", step=7, path="x", seconds=0.1)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "128m") as path:
        yield path


def start(lab: Lab, program: str = SLEEPING, stop_grace: int = 30) -> None:
    """Start a program. Ranks that end when they are stopped do not use up their grace period."""
    lab.configure(program, light=True, runner={"stop_grace": stop_grace})
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    wait_for(lambda: lab.output().count("ready") == 2)


def test_a_full_disk_does_not_keep_a_run_alive(lab: Lab, disk: Path) -> None:
    lab = replace(lab, exp_dir=disk / "exp")
    try:
        start(lab)
        # A file that the run replaces meanwhile leaves room.
        wait_for(lambda: fill_disk(disk) and shutil.disk_usage(disk).free == 0)
        result = lab.run_action("stop")
        assert lab.run_processes() == []
        assert "stopped in" in result.stdout
        # Files that the run removes at its end may have made room.
        recorded = lab.state().stop_requested is not None
        assert result.returncode == (0 if recorded else 1), result.stderr
        assert ("No space left on device" in result.stderr) is not recorded
    finally:
        lab.kill_processes()


def test_a_stop_that_cannot_be_recorded_is_an_error_afterwards(lab: Lab) -> None:
    start(lab)
    result = lab.run_action("stop", wrapper=["prlimit", "--fsize=0"])
    assert lab.run_processes() == []
    assert result.returncode == 1
    assert "stopped in" in result.stdout
    assert result.stderr.startswith(
        f"error: run {lab.state().run_id} of lab was stopped, but that "
    )
    assert f"could not be recorded: {lab.layout.state}: File too large" in result.stderr
    assert lab.state().stop_requested is None
    assert "(stopped)" in lab.run_action("stop").stdout


@pytest.mark.parametrize(
    ("program", "other_output"),
    [
        pytest.param(SLEEPING, "what was not saved is lost", id="nothing-known"),
        pytest.param(REPORTING, "the checkpoint of step 7 was saved on the way", id="saved"),
    ],
)
def test_a_rank_that_had_to_be_killed_is_named(lab: Lab, program: str, other_output: str) -> None:
    start(lab, program, stop_grace=5)
    os.kill(rank_processes(lab.state())[1].pid, signal.SIGSTOP)
    result = lab.run_action("stop")
    assert (result.returncode, lab.run_processes()) == (0, [])
    assert "stopped in" in result.stdout
    assert result.stderr == (
        "warning: rank 1 on localhost did not end within the 5 s of runner.stop_grace and was "
        f"killed; {other_output}\n"
    )


def test_stop_without_an_agent(lab: Lab) -> None:
    start(lab, stop_grace=1)
    state = lab.state()
    ranks = rank_processes(state).values()
    helpers = [p.pid for p in processes.find_run_processes(state.run_id) if p not in ranks]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in helpers:
            os.kill(pid, number)
    wait_for(lambda: len(lab.run_processes()) == len(ranks))
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    result = lab.run_action("stop")
    assert (result.returncode, lab.run_processes()) == (0, [])
    assert "warning: ranks 0, 1 on localhost did not end within the 1 s" in result.stderr
    assert "and were killed; what was not saved is lost" in result.stderr


def test_no_warning_about_ranks_that_end(lab: Lab) -> None:
    start(lab, REPORTING)
    result = lab.run_action("stop")
    assert (result.returncode, result.stderr) == (0, "")
