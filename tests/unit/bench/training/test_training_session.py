"""Tests of a session's rank: monitoring of the processes of its arms."""

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
from flagscale.bench.training.arms import Arm
from flagscale.bench.training.models.names import ModelChoice
from flagscale.bench.training.plan import SessionPlan, TrainingOptions
from flagscale.bench.training.session import ArmProcesses
from flagscale.bench.world import BenchWorld
from flagscale.errors import JobError
from flagscale.hosts.workers import children
from flagscale.hosts.workers.task import WorkerTask

pytestmark = pytest.mark.torch


def test_process_killed_before_reading_its_task_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = BenchWorld("torchrun", rank=0, size=2, local_rank=0, local_size=2)
    plan_arguments = (
        ModelChoice("vgg19", "tiny"),
        "",
        (Arm("one", "gloo"),),
        TrainingOptions(),
        Placement(),
    )
    killing_command = [
        sys.executable,
        "-c",
        f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})",
    ]
    monkeypatch.setattr(WorkerTask, "command", property(lambda _: killing_command))

    class PopenAfterExit(subprocess.Popen[bytes]):
        """Popen that returns once the process has ended, before its stdin is written."""

        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(children.subprocess, "Popen", PopenAfterExit)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    arms = ArmProcesses(SessionPlan(*plan_arguments), world, store, tmp_path)
    with pytest.raises(JobError, match="arm one, rank 0: its process failed: SIGKILL"):
        arms.wait_for_reports()
    arms.close()
    assert arms._children.poll() == [-signal.SIGKILL]
