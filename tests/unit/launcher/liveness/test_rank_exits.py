"""Tests of the detection of ranks that end alone, with real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.waiting import wait_for

from flagscale.hosts import processes
from flagscale.launcher.layout import HostFiles
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.rank_exits import RankExits
from flagscale.status import RUN_ID_VARIABLE, read_exit_code, write_exit_code

# Stands for torchrun: starts rank 0 at once, and rank 1 once a file exists, which contains its
# program. When the file is removed, it kills rank 0 and waits for both ranks.
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
SLEEP, END_AT_ONCE = "import time; time.sleep(600)", "pass"


class TwoRankHost:
    """A host with two ranks, of which the second starts on request."""

    def __init__(self, root: Path) -> None:
        self._program = root / "program"
        self.attempt = Attempt("t-exits", 5)
        command = [sys.executable, "-c", STARTER, str(self._program)]
        self.attempt.start(command, {**os.environ, RUN_ID_VARIABLE: "t-exits"})
        files = HostFiles("h", 0, 2, root, root / "out")
        self.status = root / "status"
        self.status.mkdir()
        self.exits = RankExits(files, self.attempt, self.status)
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
        """Return the ranks that have ended early, ``seconds`` after the start of the attempt."""
        now = self.start + seconds
        self.exits.refresh(now)
        return [e.rank for e in self.exits.find_early_exits(finished_ranks, now)]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRankHost]:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    result = TwoRankHost(tmp_path)
    yield result
    result.attempt.kill()
    if result.attempt.stage is Stage.RUNNING:
        wait_for(result.is_over)


def test_exit_code_0_is_certain_once_torchrun_would_have_ended(host: TwoRankHost) -> None:
    host.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: host.attempt.find_ranks().get(1))
    assert host.early_exits(1) == []
    os.kill(rank_1.pid, 9)
    wait_for(lambda: not processes.is_alive(rank_1))
    assert host.early_exits(2) == []
    assert host.exits.ended_ranks == {1}
    assert host.early_exits(11.9) == []
    before = time.time()
    assert host.early_exits(12) == [1]
    (rank_exit,) = host.exits.find_early_exits((), host.start + 12)
    assert before - 60 < rank_exit.time <= before
    assert host.early_exits(13, 1) == []  # it has reported the end of its work


@pytest.mark.parametrize(
    ("code", "expected"), [("0", [1]), ("-15", []), ("3", []), ("", [1])], ids=str
)
def test_recorded_exit_code_decides(
    host: TwoRankHost, code: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: host.attempt.find_ranks().get(1))
    host.early_exits(1)
    monkeypatch.setenv("FLAGSCALE_STATUS_DIR", str(host.status))
    if code:
        write_exit_code(1, int(code))
    else:
        (host.status / "rank_1.exit").write_text("?")
    assert read_exit_code(host.status, 1) == (int(code) if code else None)
    os.kill(rank_1.pid, 9)
    wait_for(lambda: not processes.is_alive(rank_1))
    assert host.early_exits(2) == []
    assert host.early_exits(20) == expected


def test_rank_that_was_never_seen_has_ended_and_a_slow_one_has_not(host: TwoRankHost) -> None:
    assert host.early_exits(1) == []
    assert host.early_exits(10.9) == []
    assert host.exits.ended_ranks == set()
    host.early_exits(12)
    assert host.exits.ended_ranks == {1}
    host.start_rank_1(SLEEP)
    wait_for(lambda: 1 in host.attempt.find_ranks())
    assert host.early_exits(13.5) == []
    assert host.exits.ended_ranks == set()


def test_all_ranks_of_a_host_that_ended_well_have_exit_code_0(host: TwoRankHost) -> None:
    host.start_rank_1(END_AT_ONCE)
    host.early_exits(1)
    host.end()
    assert host.attempt.exit_code == 0
    assert sorted(host.early_exits(2)) == [0, 1]
    assert host.early_exits(2, 0) == [1]


def test_ranks_that_the_agent_ends_are_no_early_exits(host: TwoRankHost) -> None:
    host.start_rank_1(SLEEP)
    rank_1 = wait_for(lambda: host.attempt.find_ranks().get(1))
    host.early_exits(1)
    host.attempt.end(failed=True)
    os.kill(rank_1.pid, 9)
    wait_for(lambda: not processes.is_alive(rank_1))
    assert host.early_exits(60) == []
    assert host.exits.ended_ranks == set()
