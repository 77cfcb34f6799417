"""Tests of how an agent observes its ranks: status files, stacks and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import kernel, processes
from flagscale.launcher.layout import HostFiles, latest_status_directory, status_directory
from flagscale.launcher.liveness import attempt as attempt_module
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.watch import RankWatch, StackDump
from flagscale.status import BUSY_ACTIVITIES, RUN_ID_VARIABLE, TRAINING, StatusWriter, read_progress


def test_progress_and_events_are_counted_and_repetitions_are_not(tmp_path: Path) -> None:
    watch, rank = RankWatch(tmp_path), StatusWriter(tmp_path, 3)
    watch.refresh()
    assert (watch.progress_count, watch.joined_ranks, watch.step_of(3)) == (0, set(), None)
    rank.write("started", rank=3)
    rank.write("warning", message="odd")
    watch.refresh()
    assert watch.progress_count == 0
    rank.write("joined")
    watch.refresh()
    assert (watch.progress_count, watch.joined_ranks) == (1, {3})
    for step, progress_count in ((1, 2), (1, 2), (2, 3)):
        rank.write_progress(step)
        watch.refresh()
        assert (watch.progress_count, watch.step_of(3), watch.activity_of(3)) == (
            progress_count,
            step,
            TRAINING,
        )
    assert not watch.in_busy_activity()
    rank.write_progress(2, BUSY_ACTIVITIES[1])
    watch.refresh()
    assert watch.in_busy_activity()
    assert not watch.in_busy_activity({3})
    rank.write("failed", kind="E", message="m")
    watch.refresh()
    assert watch.has_failure


def test_progress_events_are_counted_without_a_progress_file(tmp_path: Path) -> None:
    watch, rank = RankWatch(tmp_path), StatusWriter(tmp_path, 0)
    rank.write("progress", step=7)
    watch.refresh()
    (tmp_path / "rank_0.place").write_text("")
    assert (watch.progress_count, watch.step_of(0)) == (1, 7)
    rank.write("progress", step=8)
    watch.refresh()
    assert (watch.progress_count, watch.step_of(0)) == (2, 8)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": null, "doing": ""}', '{"step": "x"}'])
def test_incomplete_progress_file_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank_0.place").write_text(text)
    assert read_progress(tmp_path, 0) is None


def test_only_processes_with_a_handler_get_the_stack_signal(tmp_path: Path) -> None:
    host = HostFiles("h", 0, 3, tmp_path, tmp_path / "out")
    handler = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2);"
    sleeping = "import time\ndef wait_for_it():\n time.sleep(600)\nwait_for_it()"
    ranks = {}
    for rank, program in enumerate((handler + sleeping, sleeping, handler + sleeping)):
        log = tmp_path / f"ranks/x/attempt_0/{rank}/stderr.log"
        log.parent.mkdir(parents=True)
        with log.open("wb") as file:
            ranks[rank] = subprocess.Popen([sys.executable, "-c", program], stderr=file)
    try:
        wait_for(lambda: all(kernel.catches_signal(ranks[r].pid, signal.SIGUSR2) for r in (0, 2)))
        os.kill(ranks[2].pid, signal.SIGSTOP)
        wait_for(lambda: kernel.is_stopped(ranks[2].pid))
        identity = {r: processes.identify_process(p.pid) for r, p in ranks.items()}
        stack_dump = StackDump(host, RankWatch(tmp_path), {r: p for r, p in identity.items() if p})
        wait_for(lambda: stack_dump.is_complete(time.monotonic()))
        first, second, third = stack_dump.rank_progress()
        assert "in wait_for_it" in first.stack
        assert (first.answered, second.answered, third.answered) == (True, True, False)
        assert third.stopped
        assert [ranks[r].poll() for r in (0, 1)] == [None, None]
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def test_a_stack_that_is_still_written_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "ranks/x/attempt_0/0/stderr.log"
    log.parent.mkdir(parents=True)
    log.touch()
    handler = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: None); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", handler])
    try:
        wait_for(lambda: kernel.catches_signal(rank.pid, signal.SIGUSR2))
        process = processes.identify_process(rank.pid)
        assert process is not None
        host = HostFiles("h", 0, 1, tmp_path, tmp_path / "out")
        stack_dump = StackDump(host, RankWatch(tmp_path), {0: process})
        completion_flags = []
        with log.open("a") as file:
            # Alternately: a part is written, and completion is queried twice.
            for number, part in enumerate(
                ("Current thread 0x1 (", "most recent call", " first):\n")
            ):
                file.write(part)
                file.flush()
                completion_flags += [
                    stack_dump.is_complete(10.0 * number + 1),
                    stack_dump.is_complete(10.0 * number + 1.2),
                ]
        assert completion_flags == [False] * 6
        assert stack_dump.is_complete(30.0)
        assert stack_dump.read_stacks() == {0: "Current thread 0x1 (most recent call first):"}
    finally:
        rank.kill()
        rank.wait()


def test_latest_attempt_is_selected(tmp_path: Path) -> None:
    assert latest_status_directory(tmp_path) == tmp_path / "status"
    for number in (0, 2, 10):
        (tmp_path / status_directory(number)).mkdir()
    assert latest_status_directory(tmp_path).name == "status.10"


def test_secret_is_moved_from_the_environment_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secret.take_secret(tmp_path) is None
    monkeypatch.setenv(secret.SECRET_VARIABLE, "a" * 64)
    assert secret.take_secret(tmp_path) == b"a" * 64
    assert secret.SECRET_VARIABLE not in os.environ
    assert secret.take_secret(tmp_path) == b"a" * 64
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(secret.SECRET_VARIABLE, "short")
    assert secret.take_secret(tmp_path / "other") is None


def test_rank_that_ends_by_itself_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own exit code is more informative than a signal's."""
    monkeypatch.setattr(attempt_module, "FAILED_GRACE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(attempt_module, "TORCHRUN_EXIT_SECONDS", PATIENCE_SECONDS)
    program = (
        "import os, sys, time; rank = os.environ['RANK']; open(sys.argv[1] + rank, 'w').close();"
        "time.sleep(1 if rank == '0' else 600); sys.exit(7)"
    )
    starter = (
        "import os, subprocess, sys; words = [sys.executable, '-c', *sys.argv[1:]];"
        "ranks = [subprocess.Popen(words,"
        " env={**os.environ, 'RANK': str(r), 'LOCAL_RANK': str(r)}) for r in (0, 1)];"
        "print(*[rank.wait() for rank in ranks], file=open(sys.argv[2] + 'codes', 'w'))"
    )
    attempt = Attempt("t-dying", PATIENCE_SECONDS)
    command = [sys.executable, "-c", starter, program, f"{tmp_path}/"]
    attempt.start(command, {**os.environ, RUN_ID_VARIABLE: "t-dying"})
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    attempt.end(failed=True, self_ending_ranks={0})

    def is_over() -> bool:
        with suppress(ChildProcessError):
            attempt.on_child_exit(*os.waitpid(-1, os.WNOHANG))
        attempt.tick(time.monotonic())
        return attempt.stage is Stage.OVER

    wait_for(is_over)
    assert (tmp_path / "codes").read_text() == "7 -15\n"
    assert attempt.exit_code == 0
