"""Training on a full disk: output that does not fit is dropped, and training continues."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.train.test_train_gpt import Job
from support.full_disk import fill_disk, small_disk

from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.status import Event, StatusWriter, read_events
from flagscale.train import report
from flagscale.train.deferred_metrics import HostMetrics, StepMetrics
from flagscale.train.report import TrainingReporter

pytestmark = [pytest.mark.integration, pytest.mark.torch]

STEPS_WITHOUT_ROOM = 100
"""Number of steps whose output exceeds the last free block of a file."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as path:
        yield path


def step_metrics(step: int) -> StepMetrics:
    host_metrics = HostMetrics(step=step, samples=4 * step, learning_rate=1e-3)
    return StepMetrics(host_metrics, loss=2.0, grad_norm=1.0, stop=None, own_loss_finite=True)


def events(status: Path) -> list[Event]:
    return read_events(status / "rank_0.jsonl")[0]


def warnings(status: Path) -> list[str]:
    return [event.get("message") for event in events(status) if event.event == "warning"]


def latest_step(status: Path) -> int:
    return max((e.get("step") for e in events(status) if e.event == "progress"), default=0)


def wait_for_step(training: subprocess.Popen[str], status: Path, step: int) -> None:
    for _ in range(1200):
        if latest_step(status) >= step:
            return
        assert training.poll() is None, [e.fields for e in events(status) if e.event == "failed"]
        time.sleep(0.1)
    raise AssertionError(f"step {step} did not come")


def plotted_steps(board: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(board))
    accumulator.Reload()
    return {event.step for event in accumulator.Scalars("train/loss")}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_metrics_are_dropped_until_there_is_space(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_RETRY_SECONDS", 0.0)
    board, status = disk / "board", tmp_path / "status"
    overrides = {"tensorboard_dir": str(board), "train_iters": 10, "tensorboard_queue_size": 1}
    args = Namespace(**{**vars(parse_arguments([])), **overrides})
    reporter = TrainingReporter(args, StatusWriter(status, 0), is_reporting_rank=True)
    reporter.log_scalars(step_metrics(1))
    filler, resumed_step = fill_disk(disk), 2 + STEPS_WITHOUT_ROOM
    for step in range(2, resumed_step):
        reporter.log_scalars(step_metrics(step))
    [warning] = warnings(status)
    assert f"tensorboard_dir: {board} cannot be written: No space left on device" in warning
    filler.unlink()
    for step in range(resumed_step, resumed_step + 3):
        reporter.log_scalars(step_metrics(step))
    reporter.close()
    assert warnings(status)[1:] == [
        f"tensorboard_dir: {board} can be written again: its figures go on at step {resumed_step}"
    ]
    steps = plotted_steps(board)
    assert 1 in steps
    assert {resumed_step, resumed_step + 1, resumed_step + 2} <= steps
    assert resumed_step - 1 not in steps


@pytest.mark.parametrize(
    ("board", "unbuffered"),
    [
        pytest.param("disk/board", "1", id="board-on-it-unbuffered"),
        pytest.param("board", "", id="board-elsewhere-buffered"),
    ],
)
def test_full_disk_does_not_end_training(
    board: str, unbuffered: str, disk: Path, tmp_path: Path
) -> None:
    """Standard output is a file on the disk, as with the launcher's logs. The disk stays full."""
    status = tmp_path / "status"
    arguments = "--train-iters 20000 --exit-signal-handler --tensorboard-queue-size 1 "
    arguments += f"--tensorboard-dir {tmp_path / board} --data-cache-path {tmp_path / 'cache'}"
    with (disk / "output").open("wb") as output:
        training = Job(tmp_path, arguments, output=output, PYTHONUNBUFFERED=unbuffered).process
    try:
        wait_for_step(training, status, 1)
        fill_disk(disk)
        wait_for_step(training, status, latest_step(status) + STEPS_WITHOUT_ROOM)
        training.send_signal(signal.SIGTERM)
        assert training.wait(60) == 0
    finally:
        training.kill()
        training.wait()
    assert events(status)[-1].fields["reason"] == "signal"
    assert os.statvfs(disk).f_bavail == 0
    assert len(warnings(status)) == board.startswith("disk")
