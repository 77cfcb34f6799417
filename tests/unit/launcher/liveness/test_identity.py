"""Tests of the files that a run's directory keeps when its job is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.launcher.liveness.identity import register_agent


@pytest.mark.parametrize(
    ("earlier_starts", "expected"),
    [
        pytest.param(0, [], id="by-hand"),
        pytest.param(1, ["status-before-1-status", "status-before-1-status-2"], id="by-slurm"),
    ],
)
def test_reports_are_kept_after_a_requeue_and_removed_after_a_restart_by_hand(
    tmp_path: Path, earlier_starts: int, expected: list[str]
) -> None:
    """After a requeue by a scheduler, ranks continue from their checkpoints; a script that is run
    again by hand starts without the earlier reports.
    """
    for name in ("status", "status.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_0.jsonl").write_text("{}\n")
    (tmp_path / "exit.json").write_text("{}")
    assert register_agent(tmp_path, earlier_starts) is None
    assert not (tmp_path / "exit.json").exists()
    assert list((tmp_path / "status").iterdir()) == []
    directories = sorted(path.parent.name for path in tmp_path.glob("status*/rank_0.jsonl"))
    assert directories == expected
    # Once more: nothing of the first start is lost.
    (tmp_path / "status" / "rank_0.jsonl").write_text("{}\n")
    assert register_agent(tmp_path, earlier_starts * 2) is None
    directories = sorted(path.parent.name for path in tmp_path.glob("status*/rank_0.jsonl"))
    assert directories == ([*expected, "status-before-2-status"] if expected else [])
