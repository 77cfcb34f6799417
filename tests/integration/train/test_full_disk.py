"""A full disk ends no training: figures and lines that do not fit are left out."""

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
from support.full_disk import fill, small_disk

from flagscale.config.arguments.parser import parse_arguments
from flagscale.status import Event, StatusWriter, read_events
from flagscale.train import report
from flagscale.train.readings import Reading, StepNumbers
from flagscale.train.report import Reporter

pytestmark = [pytest.mark.integration, pytest.mark.torch]

STEPS_WITHOUT_ROOM = 100
"""What these steps say is more than the last block of a file has room for."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as path:
        yield path


def reading(step: int) -> Reading:
    numbers = StepNumbers(step=step, samples=4 * step, learning_rate=1e-3)
    return Reading(numbers, loss=2.0, grad_norm=1.0, stop=None, own_loss_finite=True)


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


def steps_shown(board: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(board))
    shown.Reload()
    return {event.step for event in shown.Scalars("train/loss")}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_figures_are_left_out_until_there_is_room(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_TRY_AGAIN_SECONDS", 0.0)
    board, status = disk / "board", tmp_path / "status"
    known = {"tensorboard_dir": str(board), "train_iters": 10, "tensorboard_queue_size": 1}
    args = Namespace(**{**vars(parse_arguments([])), **known})
    reporter = Reporter(args, StatusWriter(status, 0), speaks=True)
    reporter.scalars(reading(1))
    filler, back = fill(disk), 2 + STEPS_WITHOUT_ROOM
    for step in range(2, back):
        reporter.scalars(reading(step))
    [warning] = warnings(status)
    assert f"tensorboard_dir: {board} cannot be written: No space left on device" in warning
    filler.unlink()
    for step in range(back, back + 3):
        reporter.scalars(reading(step))
    reporter.close()
    assert warnings(status)[1:] == [
        f"tensorboard_dir: {board} can be written again: its figures go on at step {back}"
    ]
    shown = steps_shown(board)
    assert 1 in shown
    assert {back, back + 1, back + 2} <= shown
    assert back - 1 not in shown


@pytest.mark.parametrize(
    ("board", "unbuffered"),
    [
        pytest.param("disk/board", "1", id="board-on-it-unbuffered"),
        pytest.param("board", "", id="board-elsewhere-buffered"),
    ],
)
def test_a_disk_that_fills_up_ends_no_training(
    board: str, unbuffered: str, disk: Path, tmp_path: Path
) -> None:
    """The output is a file on the disk, as the launcher's logs are. It stays full to the end."""
    status = tmp_path / "status"
    arguments = "--train-iters 20000 --exit-signal-handler --tensorboard-queue-size 1 "
    arguments += f"--tensorboard-dir {tmp_path / board} --data-cache-path {tmp_path / 'cache'}"
    with (disk / "output").open("wb") as output:
        training = Job(tmp_path, arguments, output=output, PYTHONUNBUFFERED=unbuffered).process
    try:
        wait_for_step(training, status, 1)
        fill(disk)
        wait_for_step(training, status, latest_step(status) + STEPS_WITHOUT_ROOM)
        training.send_signal(signal.SIGTERM)
        assert training.wait(60) == 0
    finally:
        training.kill()
        training.wait()
    assert events(status)[-1].fields["reason"] == "signal"
    assert os.statvfs(disk).f_bavail == 0
    assert len(warnings(status)) == board.startswith("disk")
