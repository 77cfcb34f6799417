"""Tests of the detection of ranks that end alone, with real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.launch_lab import wait_for

from flagscale.launcher.layout import HostFiles
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.rank_exits import RankExits
from flagscale.status import RUN_ID_VARIABLE, read_exit_code, write_exit_code

# Starts rank 0 at once and rank 1 when a file appears, which says what it does.
STARTER = """
import os, subprocess, sys, time
def start(rank, program):
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env={**os.environ, **variables})
ranks = [start(0, "import time; time.sleep(600)")]
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
ranks.append(start(1, open(sys.argv[1]).read()))
open(sys.argv[1] + ".started", "w").close()
while os.path.exists(sys.argv[1]):
    time.sleep(0.01)
ranks[0].kill()
codes = [rank.wait() for rank in ranks]
"""
SLEEP, END = "import time; time.sleep(600)", "pass"


class Lab:
    """One host with two ranks, of which the second starts on request."""

    def __init__(self, root: Path) -> None:
        self._program = root / "program"
        self.attempt = Attempt("t-exits", 5)
        command = [sys.executable, "-c", STARTER, str(self._program)]
        self.attempt.start(command, {**os.environ, RUN_ID_VARIABLE: "t-exits"})
        host = HostFiles("h", 0, 2, root, root / "out")
        self.status = root / "status"
        self.status.mkdir()
        self.exits = RankExits(host, self.attempt, self.status)
        self.start = self.attempt.start_time
        wait_for(lambda: 0 in self.attempt.find_ranks())

    def start_rank_1(self, program: str) -> None:
        temporary = self._program.with_suffix(".new")
        temporary.write_text(program)
        temporary.rename(self._program)
        wait_for(self._program.with_suffix(".started").exists)

    def end(self) -> None:
        """Let the starter end its ranks, and then end with exit code 0."""
        self._program.unlink()
        wait_for(self.is_over)

    def is_over(self) -> bool:
        with suppress(ChildProcessError):
            self.attempt.on_child_exit(*os.waitpid(-1, os.WNOHANG))
        return self.attempt.stage is not Stage.RUNNING

    def early_exits(self, seconds: float, *finished_ranks: int) -> list[int]:
        """Return the early exits so many seconds after the start."""
        now = self.start + seconds
        self.exits.refresh(now)
        return [e.rank for e in self.exits.find_early_exits(finished_ranks, now)]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    result = Lab(tmp_path)
    yield result
    result.attempt.kill()
    if result.attempt.stage is Stage.RUNNING:
        wait_for(result.is_over)


def test_exit_code_0_is_certain_once_torchrun_would_have_ended(lab: Lab) -> None:
    lab.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: lab.attempt.find_ranks().get(1))
    assert lab.early_exits(1) == []
    os.kill(rank_1.pid, 9)
    wait_for(lambda: 1 not in lab.attempt.find_ranks())
    assert lab.early_exits(2) == []
    assert lab.exits.ended_ranks == {1}
    assert lab.early_exits(11.9) == []
    before = time.time()
    assert lab.early_exits(12) == [1]
    (rank_exit,) = lab.exits.find_early_exits((), lab.start + 12)
    assert before - 60 < rank_exit.time <= before
    assert lab.early_exits(13, 1) == []  # it has reported the end of its work


@pytest.mark.parametrize(
    ("code", "expected"), [("0", [1]), ("-15", []), ("3", []), ("", [1])], ids=str
)
def test_recorded_exit_code_decides(
    lab: Lab, code: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: lab.attempt.find_ranks().get(1))
    lab.early_exits(1)
    monkeypatch.setenv("FLAGSCALE_STATUS_DIR", str(lab.status))
    if code:
        write_exit_code(1, int(code))
    else:
        (lab.status / "rank_1.exit").write_text("?")
    assert read_exit_code(lab.status, 1) == (int(code) if code else None)
    os.kill(rank_1.pid, 9)
    wait_for(lambda: 1 not in lab.attempt.find_ranks())
    assert lab.early_exits(2) == []
    assert lab.early_exits(20) == expected


def test_rank_that_was_never_seen_has_ended_and_a_slow_one_has_not(lab: Lab) -> None:
    assert lab.early_exits(1) == []
    assert lab.early_exits(10.9) == []
    assert lab.exits.ended_ranks == set()
    lab.early_exits(12)
    assert lab.exits.ended_ranks == {1}
    lab.start_rank_1(SLEEP)
    wait_for(lambda: 1 in lab.attempt.find_ranks())
    assert lab.early_exits(13.5) == []
    assert lab.exits.ended_ranks == set()


def test_all_ranks_of_a_host_that_ended_well_have_exit_code_0(lab: Lab) -> None:
    lab.start_rank_1(END)
    lab.early_exits(1)
    lab.end()
    assert lab.attempt.exit_code == 0
    assert sorted(lab.early_exits(2)) == [0, 1]
    assert lab.early_exits(2, 0) == [1]


def test_ranks_that_the_agent_ends_are_no_early_exits(lab: Lab) -> None:
    lab.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: lab.attempt.find_ranks().get(1))
    lab.early_exits(1)
    lab.attempt.end(failed=True)
    os.kill(rank_1.pid, 9)
    wait_for(lambda: 1 not in lab.attempt.find_ranks())
    assert lab.early_exits(60) == []
    assert lab.exits.ended_ranks == set()
