"""Messages, status events and exit codes of a rank's failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.errors import ConfigError, JobError
from flagscale.status import StatusWriter, read_events
from flagscale.train.distributed import RankIdentity
from flagscale.train.failures import report_failure

pytestmark = pytest.mark.torch


def raise_and_catch(error: Exception) -> Exception:
    """Return the error with a traceback, as after being raised."""
    try:
        raise error
    except type(error) as error_with_traceback:
        return error_with_traceback


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ConfigError("lr: must be given"), 2, "error: lr: must be given\n"),
        (JobError("no", hint="try again"), 1, "error: no\n  hint: try again\n"),
    ],
)
def test_error_of_the_user_is_printed_without_traceback(
    error: Exception, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        report_failure(raise_and_catch(error), RankIdentity(0, 0, 2), StatusWriter(tmp_path, 0))
        == code
    )
    assert capsys.readouterr().err == expected
    (event,) = read_events(tmp_path / "rank_0.jsonl")[0]
    assert (event.event, event.get("kind")) == ("failed", type(error).__name__)
    assert "Traceback" in event.get("traceback")
    assert event.get("explained") is True


def test_unexpected_error_is_printed_with_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        report_failure(
            raise_and_catch(ZeroDivisionError("x")),
            RankIdentity(0, 0, 1),
            StatusWriter(tmp_path, 0),
        )
        == 1
    )
    assert "rank 0 failed:\nTraceback" in capsys.readouterr().err


def test_only_local_rank_0_prints_before_the_rendezvous(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        report_failure(
            raise_and_catch(ConfigError("no")), RankIdentity(9, 1, 16), StatusWriter(tmp_path, 9)
        )
        == 2
    )
    assert capsys.readouterr().err == ""
    assert len(read_events(tmp_path / "rank_9.jsonl")[0]) == 1


@pytest.mark.usefixtures("single_process_group")
def test_only_the_first_failed_rank_prints_the_whole_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = StatusWriter(tmp_path, 3)
    report_failure(raise_and_catch(RuntimeError("the cause")), RankIdentity(3, 3, 4), status)
    first_output = capsys.readouterr().err
    report_failure(
        raise_and_catch(RuntimeError("lost a partner\nmore")), RankIdentity(0, 0, 4), status
    )
    assert "rank 3 failed:" in first_output
    assert capsys.readouterr().err == "rank 0: RuntimeError: lost a partner\n"
