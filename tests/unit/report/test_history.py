"""Tests of reading attempts, metrics and the timeline from the files of the ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.report_lab import START_TIME, StoredRun, progress_events, store_run

from flagscale.report.history import Attempt
from flagscale.report.run import RunReport, collect_run

FAILURE = {
    **{"host": "node", "rank": 0, "exit_code": -9, "reason": "ended with signal 9 (SIGKILL)"},
    **{"traceback": "", "log": "/l"},
}


@pytest.fixture
def stored_run(tmp_path: Path) -> StoredRun:
    return store_run(tmp_path)


def _list_events(run: RunReport, *kinds: str) -> list[tuple[int, int | None, str]]:
    return [
        (event.attempt, event.step, event.text) for event in run.timeline if event.kind in kinds
    ]


def test_progress_events_become_columns(stored_run: StoredRun) -> None:
    mfu = {1: None, 2: 0.5}
    stored_run.append_events(
        {"event": "started", "device": "cuda:0"}, *progress_events(2, mfu=mfu.get, odd="x")
    )
    stored_run.append_events(
        {"event": "progress", "step": "3"}, {"event": "progress", "step": 4, "loss": 10**400}
    )
    stored_run.append_events(
        {"event": "progress", "step": True}, {"event": "progress", "step": 2**60}
    )
    stored_run.write_exit_records()
    (attempt,) = collect_run(stored_run.state).attempts
    assert list(attempt.steps) == [1, 2, 4]
    assert set(attempt.metrics) == {"loss", "grad_norm", "mfu"}
    assert [*attempt.metrics["loss"]][:2] == [8.5, 8.0]
    assert all(math.isnan(v) for v in (attempt.metrics["loss"][2], attempt.metrics["mfu"][0]))
    assert (attempt.start_time, attempt.train_steps) == (START_TIME + 1, None)


def test_each_start_of_the_job_is_an_attempt(stored_run: StoredRun) -> None:
    """Attempts are in chronological order, including those of earlier starts of the scripts."""
    directories = ("status-before-0-status", "status-before-0-status-1", "status", "status.1")
    for number, attempt in enumerate(directories):
        stored_run.append_events(*progress_events(3, first=1 + 2 * number), attempt=attempt)
    (stored_run.state.hosts[0].run_dir / "status.x").mkdir()
    (stored_run.state.hosts[0].run_dir / "status.2").mkdir()
    stored_run.write_job_summary(
        attempt=2, attempts=3, restarts=[{"attempt": 0, "failure": FAILURE}]
    )
    stored_run.write_exit_records()
    run = collect_run(stored_run.state)
    attempts = [(a.number, a.number_in_start, a.is_current, list(a.steps)) for a in run.attempts]
    assert attempts == [
        (1, 1, False, [1, 2, 3]), (2, 2, False, [3, 4, 5]),
        (3, 1, True, [5, 6, 7]), (4, 2, True, [7, 8, 9]),
    ]  # fmt: skip
    reason = "; before: node: rank 0 ended with signal 9 (SIGKILL)"
    assert _list_events(run, "restart") == [
        (2, 3, "the job was started again, attempt 2, from step 3"),
        (3, 5, "the job was started again, attempt 3, from step 5"),
        (4, 7, f"the job was started again, attempt 4, from step 7{reason}"),
    ]


def test_attempts_are_merged_over_hosts(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path, hosts=("a", "b"), nproc=2)
    for rank in range(4):
        stored_run.append_events({"event": "started", "device": "cpu"}, rank=rank)
    stored_run.append_events(*progress_events(5), rank=3)
    # One host has started the next attempt, the other has not yet.
    stored_run.append_events({"event": "started", "device": "cpu"}, rank=0, attempt="status.1")
    stored_run.write_exit_records()
    first, second = collect_run(stored_run.state).attempts
    assert (len([*first.events_of_kind("started")]), len(first.steps)) == (4, 5)
    assert (len([*second.events_of_kind("started")]), len(second.steps)) == (1, 0)


def test_events_of_the_timeline(stored_run: StoredRun) -> None:
    spike = "loss spike at step 25: 30.0000 is more than 2 times the median"
    losses = {30: 25.0, 40: math.nan}
    stored_run.append_events(*progress_events(29), {"event": "warning", "message": spike})
    stored_run.append_events({"event": "warning", "message": "https://me:pw@host/ token=abc"})
    stored_run.append_events(
        *progress_events(21, first=30, loss=lambda step: losses.get(step, 8.0))
    )
    stored_run.append_events({"event": "checkpoint", "step": 50, "path": "/c/50", "seconds": 1.5})
    stored_run.append_events({"event": "evaluation", "step": 50, "loss": 5.5})
    stored_run.append_events({"event": "evaluation", "step": 51, "loss": 5.5, "data": "law"})
    stored_run.append_events({"event": "finished", "step": 50, "reason": "completed"})
    stored_run.write_exit_records()
    run = collect_run(stored_run.state)
    assert _list_events(run, "spike") == [
        (1, 25, spike),
        (1, 30, "loss spike: 25, more than 2 times the usual 8.4828"),
        (1, 40, "loss is NaN"),
    ]
    assert _list_events(run, "warning") == [(1, None, "https://me:<hidden>@host/ token=<hidden>")]
    assert _list_events(run, "checkpoint", "evaluation", "finished", "end") == [
        (1, 50, "checkpoint saved in 1.5 s: /c/50"),
        (1, 50, "validation loss 5.5"),
        (1, 51, "law validation loss 5.5"),
        (1, 50, "training ended: completed"),
        (1, 50, "completed"),
    ]
    times = [event.time for event in run.timeline]
    assert times == sorted(times, key=lambda time: time or 0)


def test_reported_spike_is_listed_once(stored_run: StoredRun) -> None:
    logged = [*progress_events(200)][9::10]
    logged[-1]["loss"] = 30.0
    warned = "loss spike at step 196: 30.0000 is more than 2 times the median"
    stored_run.append_events(*logged[:-1], {"event": "warning", "message": warned}, logged[-1])
    stored_run.write_exit_records()
    assert _list_events(collect_run(stored_run.state), "spike") == [(1, 196, warned)]


@pytest.mark.parametrize("expected_text", [True, False], ids=["by-the-rank", "by-its-end-alone"])
def test_first_failure_has_a_step(stored_run: StoredRun, expected_text: bool) -> None:
    stored_run.append_events({"event": "joined"}, *progress_events(7))
    if expected_text:
        trace = "Traceback: password=hunter2"
        stored_run.append_events(
            {"event": "failed", "kind": "E", "message": "boom", "traceback": trace}
        )
    failure = {**FAILURE, "exit_code": 1, "reason": "raised E: boom"}
    stored_run.write_job_summary(failure=failure)
    stored_run.write_exit_records(1, failure=failure)
    run = collect_run(stored_run.state)
    assert _list_events(run, "failure") == [(1, 7, "first failure: node: rank 0 raised E: boom")]
    last = run.timeline[-1].time
    assert last == START_TIME + (9 if expected_text else 8)


def test_run_without_events(stored_run: StoredRun) -> None:
    run = collect_run(stored_run.state)
    assert run.attempts == ()
    assert run.snapshot.phase.value == "lost"
    assert _list_events(run, "failure") == [(1, None, "lost")]
    assert Attempt(number=1, number_in_start=1, steps=[], times=[], metrics={}).last_step() is None
