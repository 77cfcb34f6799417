"""Tests of the agent's side of the worker that measures a host between two attempts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from flagscale.hosts.workers.messages import WorkerLine
from flagscale.launcher.health_worker import HealthWorker, WorkerReply
from flagscale.launcher.liveness.messages import MeasureHealth
from flagscale.records import encode


def start_worker(monkeypatch: pytest.MonkeyPatch, program: str) -> HealthWorker:
    """Order a check whose worker runs this Python program."""

    def start(worker: Any) -> None:
        command = [sys.executable, "-c", program]
        worker._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        os.set_blocking(worker._process.stdout.fileno(), False)

    monkeypatch.setattr(HealthWorker, "_start", start)
    settings: Any = None
    worker = HealthWorker(settings)
    worker.execute(MeasureHealth(3, None))
    return worker


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (encode(WorkerLine(failure="there is no torch")), "there is no torch"),
        ("", "its worker has ended"),
    ],
    ids=["failure", "silent"],
)
def test_last_words_of_a_worker_are_its_reply(
    words: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its exit is noticed first."""
    worker = start_worker(monkeypatch, f"print({words!r})")
    (pid,) = worker.pids
    os.waitpid(pid, 0)
    worker.record_exit(pid)
    assert not worker.pids
    replies = [reply for _ in range(2) for reply in worker.poll()]
    assert replies == [WorkerReply(3, None, problem)]
    worker.end()


def test_killed_worker_is_known_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does not wait for a process that the kernel holds."""
    worker = start_worker(monkeypatch, "import time; time.sleep(600)")
    (pid,) = worker.pids
    worker.end()
    assert list(worker.pids) == [pid]
    assert not list(worker.poll())
    os.waitpid(pid, 0)
    worker.record_exit(pid)
    assert not worker.pids
