"""Training on a full disk: output that does not fit is dropped, and training continues."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.train.test_train_gpt import TrainingProcess
from support.full_disk import fill_disk, small_disk
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.sinks import delivery
from flagscale.status import Event, StatusWriter, read_events
from flagscale.train.deferred_metrics import HostMetrics, StepMetrics
from flagscale.train.report import TrainingReporter

pytestmark = [pytest.mark.integration, pytest.mark.torch]

STEPS_ON_FULL_DISK = 100
"""Number of steps whose output is larger than the free rest of a file's last block."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as path:
        yield path


def create_metrics(step: int) -> StepMetrics:
    host_metrics = HostMetrics(step=step, consumed_samples=4 * step, learning_rate=1e-3)
    return StepMetrics(
        host_metrics, loss=2.0, grad_norm=1.0, stop_reason=None, is_rank_loss_finite=True
    )


def read_rank_0_events(status: Path) -> list[Event]:
    return read_events(status / "rank_0.jsonl")[0]


def read_warnings(status: Path) -> list[str]:
    return [
        event.get("message") for event in read_rank_0_events(status) if event.event == "warning"
    ]


def read_latest_step(status: Path) -> int:
    return max(
        (e.get("step") for e in read_rank_0_events(status) if e.event == "progress"), default=0
    )


def wait_for_step(training: subprocess.Popen[str], status: Path, step: int) -> None:
    def is_reached() -> bool:
        assert training.poll() is None, [
            e.fields for e in read_rank_0_events(status) if e.event == "failed"
        ]
        return read_latest_step(status) >= step

    wait_for(is_reached, f"step {step}")


def read_plotted_steps(board: Path) -> set[int]:
    """Return the steps with a loss in the TensorBoard files of a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(board))
    accumulator.Reload()
    return {event.step for event in accumulator.Scalars("train/loss")}


def test_metrics_wait_until_there_is_space(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(delivery, "MAX_RETRY_SECONDS", 0.05)
    board, status = disk / "board", tmp_path / "status"
    # So many may wait that none is dropped on a busy machine, however long the thread sleeps.
    overrides = {
        "tensorboard_dir": str(board),
        "train_iters": 10,
        "tensorboard_queue_size": 1_000_000,
    }
    args = Namespace(**{**vars(parse_arguments([])), **overrides})
    reporter = TrainingReporter(args, StatusWriter(status, 0), is_reporting_rank=True)
    reporter.start_sinks(0)
    step = 0

    def log_until(condition: Callable[[], bool]) -> None:
        nonlocal step
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            step += 1
            reporter.log_scalars(create_metrics(step))
            assert time.monotonic() < deadline
            time.sleep(0.005)

    log_until(lambda: any(board.glob("*")) and step >= 3)
    filler = fill_disk(disk)
    log_until(lambda: bool(read_warnings(status)))
    [warning] = read_warnings(status)
    text = f"TensorBoard: tensorboard_dir: {board} cannot be written: No space left on device; its "
    assert text in warning
    files = len(list(board.iterdir()))
    filler.unlink()
    log_until(lambda: len(list(board.iterdir())) > files)
    reporter.close("finished")
    assert len(read_warnings(status)) == 1
    assert read_plotted_steps(board) == set(range(1, step + 1))


@pytest.mark.parametrize(
    ("tensorboard_dir", "python_unbuffered"),
    [
        pytest.param("disk/board", "1", id="tensorboard-on-full-disk-unbuffered"),
        pytest.param("board", "", id="tensorboard-elsewhere-buffered"),
    ],
)
def test_full_disk_does_not_end_training(
    tensorboard_dir: str, python_unbuffered: str, disk: Path, tmp_path: Path
) -> None:
    """Standard output is a file on the disk, as with the launcher's logs. The disk stays full."""
    status = tmp_path / "status"
    arguments = "--train-iters 1000000 --exit-signal-handler --tensorboard-queue-size 1000000 "
    arguments += (
        f"--tensorboard-dir {tmp_path / tensorboard_dir} --data-cache-path {tmp_path / 'cache'}"
    )
    with (disk / "output").open("wb") as output:
        training = TrainingProcess(
            tmp_path, arguments, output=output, PYTHONUNBUFFERED=python_unbuffered
        ).process
    try:
        wait_for_step(training, status, 1)
        fill_disk(disk)
        wait_for_step(training, status, read_latest_step(status) + STEPS_ON_FULL_DISK)
        training.send_signal(signal.SIGTERM)
        assert training.wait(PATIENCE_SECONDS) == 0
    finally:
        training.kill()
        training.wait()
    assert read_rank_0_events(status)[-1].fields["reason"] == "signal"
    assert os.statvfs(disk).f_bavail == 0
    failures = [text for text in read_warnings(status) if "cannot be written" in text]
    assert len(failures) == tensorboard_dir.startswith("disk")
    assert failures == read_warnings(status)[:1]
