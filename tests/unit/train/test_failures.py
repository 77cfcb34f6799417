from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.errors import ConfigError, JobError
from flagscale.status import StatusWriter, read_events
from flagscale.train.distributed import Rank
from flagscale.train.failures import report

pytestmark = pytest.mark.torch


def fail(error: Exception) -> Exception:
    """The error as it looks after being raised."""
    try:
        raise error
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ConfigError("lr: must be given"), 2, "error: lr: must be given\n"),
        (JobError("no", hint="try again"), 1, "error: no\n  hint: try again\n"),
    ],
)
def test_a_users_mistake(
    error: Exception, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(fail(error), Rank(0, 0, 2), StatusWriter(tmp_path, 0)) == code
    assert capsys.readouterr().err == expected
    (event,) = read_events(tmp_path / "rank_0.jsonl")[0]
    assert (event.event, event.get("kind")) == ("failed", type(error).__name__)
    assert "Traceback" in event.get("traceback")
    assert event.get("explained") is True


def test_a_defect_shows_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(fail(ZeroDivisionError("x")), Rank(0, 0, 1), StatusWriter(tmp_path, 0)) == 1
    assert "rank 0 failed:\nTraceback" in capsys.readouterr().err


def test_a_host_speaks_once_before_the_ranks_are_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(fail(ConfigError("no")), Rank(9, 1, 16), StatusWriter(tmp_path, 9)) == 2
    assert capsys.readouterr().err == ""
    assert len(read_events(tmp_path / "rank_9.jsonl")[0]) == 1


@pytest.mark.usefixtures("one_rank")
def test_after_that_the_first_to_fail_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = StatusWriter(tmp_path, 3)
    report(fail(RuntimeError("the cause")), Rank(3, 3, 4), status)
    first = capsys.readouterr().err
    report(fail(RuntimeError("lost a partner\nmore")), Rank(0, 0, 4), status)
    assert "rank 3 failed:" in first
    assert capsys.readouterr().err == "rank 0: RuntimeError: lost a partner\n"
