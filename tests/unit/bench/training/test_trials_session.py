"""A rank of a session and the processes of its arms."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from flagscale.bench.placement import Placement
from flagscale.bench.rank import Job
from flagscale.bench.training import session
from flagscale.bench.training.arms import Arm
from flagscale.bench.training.models.names import Choice
from flagscale.bench.training.plan import SessionPlan, Training
from flagscale.bench.world import BenchWorld
from flagscale.errors import JobError

pytestmark = pytest.mark.torch


def test_one_that_dies_before_it_reads_its_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = BenchWorld("torchrun", rank=0, size=2, local_rank=0, local_size=2)
    given = (Choice("vgg19", "tiny"), "", (Arm("one", "gloo"),), Training(), Placement())
    dies = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"]
    monkeypatch.setattr(Job, "command", property(lambda _: dies))

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(session.subprocess, "Popen", Ended)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    arms = session._Arms(SessionPlan(*given), world, store, tmp_path)
    with pytest.raises(JobError, match="arm one, rank 0: its process failed: SIGKILL"):
        arms.wait_for_reports()
    arms.end()
    assert [process.poll() for process in arms._processes] == [-signal.SIGKILL]
