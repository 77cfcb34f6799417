"""Attempts, their figures and what happened, from what ranks have left."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.report_lab import BEGAN, StoredRun, steps, store_run

from flagscale.report.history import Attempt
from flagscale.report.run import RunReport, collect_run

FAILURE = {
    **{"host": "node", "rank": 0, "exit_code": -9, "reason": "ended with signal 9 (SIGKILL)"},
    **{"traceback": "", "log": "/l"},
}


@pytest.fixture
def laid(tmp_path: Path) -> StoredRun:
    return store_run(tmp_path)


def _told(run: RunReport, *kinds: str) -> list[tuple[int, int | None, str]]:
    return [(one.attempt, one.step, one.text) for one in run.happened if one.kind in kinds]


def test_progress_events_become_columns(laid: StoredRun) -> None:
    mfu = {1: None, 2: 0.5}
    laid.report({"event": "started", "device": "cuda:0"}, *steps(2, mfu=mfu.get, odd="x"))
    laid.report(
        {"event": "progress", "step": "3"}, {"event": "progress", "step": 4, "loss": 10**400}
    )
    laid.report({"event": "progress", "step": True}, {"event": "progress", "step": 2**60})
    laid.end()
    (attempt,) = collect_run(laid.state).attempts
    assert list(attempt.steps) == [1, 2, 4]
    assert set(attempt.figures) == {"loss", "grad_norm", "mfu"}
    assert [*attempt.figures["loss"]][:2] == [8.5, 8.0]
    assert all(math.isnan(v) for v in (attempt.figures["loss"][2], attempt.figures["mfu"][0]))
    assert (attempt.started, attempt.train_steps) == (BEGAN + 1, None)


def test_each_start_of_the_job_is_an_attempt(laid: StoredRun) -> None:
    """In the order in which they were: of an earlier start of the scripts, too."""
    directories = ("status-before-0-status", "status-before-0-status-1", "status", "status.1")
    for number, attempt in enumerate(directories):
        laid.report(*steps(3, first=1 + 2 * number), attempt=attempt)
    (laid.state.hosts[0].run_dir / "status.x").mkdir()
    (laid.state.hosts[0].run_dir / "status.2").mkdir()
    laid.agree(attempt=2, attempts=3, restarts=[{"attempt": 0, "failure": FAILURE}])
    laid.end()
    run = collect_run(laid.state)
    told = [(a.number, a.again, a.current, list(a.steps)) for a in run.attempts]
    assert told == [
        (1, 1, False, [1, 2, 3]), (2, 2, False, [3, 4, 5]),
        (3, 1, True, [5, 6, 7]), (4, 2, True, [7, 8, 9]),
    ]  # fmt: skip
    why = "; before: node: rank 0 ended with signal 9 (SIGKILL)"
    assert _told(run, "restart") == [
        (2, 3, "the job was started again, attempt 2, from step 3"),
        (3, 5, "the job was started again, attempt 3, from step 5"),
        (4, 7, f"the job was started again, attempt 4, from step 7{why}"),
    ]


def test_attempts_are_merged_over_hosts(tmp_path: Path) -> None:
    laid = store_run(tmp_path, hosts=("a", "b"), nproc=2)
    for rank in range(4):
        laid.report({"event": "started", "device": "cpu"}, rank=rank)
    laid.report(*steps(5), rank=3)
    # One of them has begun the next attempt, the other has not yet.
    laid.report({"event": "started", "device": "cpu"}, rank=0, attempt="status.1")
    laid.end()
    first, second = collect_run(laid.state).attempts
    assert (len([*first.of("started")]), len(first.steps)) == (4, 5)
    assert (len([*second.of("started")]), len(second.steps)) == (1, 0)


def test_events_of_the_timeline(laid: StoredRun) -> None:
    spike = "loss spike at step 25: 30.0000 is more than 2 times the median"
    losses = {30: 25.0, 40: math.nan}
    laid.report(*steps(29), {"event": "warning", "message": spike})
    laid.report({"event": "warning", "message": "https://me:pw@host/ token=abc"})
    laid.report(*steps(21, first=30, loss=lambda step: losses.get(step, 8.0)))
    laid.report({"event": "checkpoint", "step": 50, "path": "/c/50", "seconds": 1.5})
    laid.report({"event": "evaluation", "step": 50, "loss": 5.5})
    laid.report({"event": "evaluation", "step": 51, "loss": 5.5, "data": "law"})
    laid.report({"event": "finished", "step": 50, "reason": "completed"})
    laid.end()
    run = collect_run(laid.state)
    assert _told(run, "spike") == [
        (1, 25, spike),
        (1, 30, "loss spike: 25, more than 2 times the usual 8.4828"),
        (1, 40, "loss is NaN"),
    ]
    assert _told(run, "warning") == [(1, None, "https://me:<hidden>@host/ token=<hidden>")]
    assert _told(run, "checkpoint", "evaluation", "finished", "end") == [
        (1, 50, "checkpoint saved in 1.5 s: /c/50"),
        (1, 50, "validation loss 5.5"),
        (1, 51, "law validation loss 5.5"),
        (1, 50, "training ended: completed"),
        (1, 50, "completed"),
    ]
    times = [one.time for one in run.happened]
    assert times == sorted(times, key=lambda time: time or 0)


def test_reported_spike_is_listed_once(laid: StoredRun) -> None:
    logged = [*steps(200)][9::10]
    logged[-1]["loss"] = 30.0
    warned = "loss spike at step 196: 30.0000 is more than 2 times the median"
    laid.report(*logged[:-1], {"event": "warning", "message": warned}, logged[-1])
    laid.end()
    assert _told(collect_run(laid.state), "spike") == [(1, 196, warned)]


@pytest.mark.parametrize("said", [True, False], ids=["by-the-rank", "by-its-end-alone"])
def test_first_failure_has_a_step(laid: StoredRun, said: bool) -> None:
    laid.report({"event": "joined"}, *steps(7))
    if said:
        trace = "Traceback: password=hunter2"
        laid.report({"event": "failed", "kind": "E", "message": "boom", "traceback": trace})
    failure = {**FAILURE, "exit_code": 1, "reason": "raised E: boom"}
    laid.agree(failure=failure)
    laid.end(1, failure=failure)
    run = collect_run(laid.state)
    assert _told(run, "failure") == [(1, 7, "first failure: node: rank 0 raised E: boom")]
    last = run.happened[-1].time
    assert last == BEGAN + (9 if said else 8)


def test_run_without_events(laid: StoredRun) -> None:
    run = collect_run(laid.state)
    assert run.attempts == ()
    assert run.snapshot.phase.value == "lost"
    assert _told(run, "failure") == [(1, None, "lost")]
    assert Attempt(1, 1, [], [], {}).last_step() is None
