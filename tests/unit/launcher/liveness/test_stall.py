"""Tests of the detection and the report of the rank that the others wait for in a stalled job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flagscale.launcher.liveness.diagnosis import FailureKind
from flagscale.launcher.liveness.job import find_straggler, stalled_report
from flagscale.launcher.liveness.messages import RankProgress

IN_COLLECTIVE = 'File "/v/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'
IN_LOADER = 'File "/v/torch/utils/data/dataloader.py", line 1200 in _try_get_data'


def rank_progress(rank: int, step: int | None = 5, **fields: Any) -> RankProgress:
    defaults = {"doing": "in training", "stopped": False, "answered": True, "stack": IN_COLLECTIVE}
    return RankProgress("h", rank, step, log=Path("log"), **{**defaults, **fields})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([], None, id="no-ranks"),
        pytest.param(
            [rank_progress(0), rank_progress(1, 4, stopped=False), rank_progress(2)],
            1,
            id="lowest-step",
        ),
        pytest.param(
            [rank_progress(0), rank_progress(1, stopped=True, answered=False)], 1, id="stopped"
        ),
        pytest.param(
            [rank_progress(0), rank_progress(1, answered=False, stack="")], 1, id="silent"
        ),
        pytest.param(
            [rank_progress(0), rank_progress(1, stack=IN_LOADER)], 1, id="waits-for-no-peer"
        ),
        pytest.param(
            [rank_progress(0), rank_progress(1, stack='File "x", line 3 in barrier')],
            0,
            id="all-wait",
        ),
        pytest.param(
            [rank_progress(0, None), rank_progress(1, None, stopped=True)], 1, id="steps-not-known"
        ),
        pytest.param([rank_progress(0, None), rank_progress(1, 3)], 1, id="one-step-known"),
    ],
)
def test_straggler_is_found(ranks: list[RankProgress], expected: int | None) -> None:
    straggler = find_straggler(ranks)
    assert (straggler.rank if straggler else None) == expected


def test_report_contains_rank_step_and_stack() -> None:
    report = stalled_report(
        [rank_progress(0), rank_progress(1, 4, stopped=True)], 61.2, "h", Path("out")
    )
    assert report.kind is FailureKind.PROCESS_KILLED
    assert report.failure.headline() == (
        "h: rank 1 stalled: no rank has made progress for 61 s, and this one is behind in training "
        "at step 4; its process is stopped (SIGSTOP)"
    )
    assert report.failure.traceback == IN_COLLECTIVE
    report_without_ranks = stalled_report([], 5, "h", Path("out"))
    assert (report_without_ranks.failure.rank, report_without_ranks.failure.host) == (None, "h")
