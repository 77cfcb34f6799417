"""What the directory of a run keeps when its job is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.launcher.liveness.identity import announce


@pytest.mark.parametrize(
    ("earlier_starts", "kept"),
    [
        pytest.param(0, [], id="by-hand"),
        pytest.param(1, ["status-before-1-status", "status-before-1-status-2"], id="by-slurm"),
    ],
)
def test_what_ranks_have_reported(tmp_path: Path, earlier_starts: int, kept: list[str]) -> None:
    """Ranks of a job that a scheduler has started again go on from what they have saved; those of
    a script that somebody starts again by hand know nothing of it."""
    for name in ("status", "status.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_0.jsonl").write_text("{}\n")
    (tmp_path / "exit.json").write_text("{}")
    assert announce(tmp_path, earlier_starts) is None
    assert not (tmp_path / "exit.json").exists()
    assert list((tmp_path / "status").iterdir()) == []
    found = sorted(path.parent.name for path in tmp_path.glob("status*/rank_0.jsonl"))
    assert found == kept
    # Once more: nothing of the first start is lost.
    (tmp_path / "status" / "rank_0.jsonl").write_text("{}\n")
    assert announce(tmp_path, earlier_starts * 2) is None
    found = sorted(path.parent.name for path in tmp_path.glob("status*/rank_0.jsonl"))
    assert found == ([*kept, "status-before-2-status"] if kept else [])
