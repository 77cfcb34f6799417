"""Tests of the coordinator, second by second, without processes or sockets."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.liveness_job import PROGRESS, SPARE, Job, lose

from flagscale.flight_records import FlightRecord, RecordedGroup, RecordedOperation
from flagscale.health.messages import HealthEvent, PairMeasurement
from flagscale.launcher.liveness.coordinator import STEADY_SECONDS
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import (
    AttemptEnded,
    DumpStacks,
    EndAttempt,
    FinishJob,
    HealthReply,
    Heartbeat,
    Hello,
    HostMessage,
    HostProgress,
    HostStatus,
    JobPhase,
    LastRecords,
    PauseAttempt,
    RankExit,
    RankFailed,
    RankProgress,
    RankStacks,
    StartAttempt,
    StopJob,
    StopSignalled,
)


def test_a_job_that_ends_well() -> None:
    job = Job()
    job.run(20)
    job.send_end(0, 0)
    job.run(20)
    assert job.order_types() == []
    job.send_end(1, 0)
    job.run(1)
    assert (job.order_types(), job.notified_events, job.coordinator.phase) == (
        [FinishJob],
        ["finished"],
        JobPhase.OVER,
    )


def test_a_failure_is_broadcast_at_once_and_waits_for_all_ends() -> None:
    job = Job(3)
    job.run(5)
    job.send_failure(1, 4)
    job.collect()
    ((host, order),) = job.orders
    assert host is None
    assert isinstance(order, EndAttempt)
    assert order.failure is not None
    assert order.failure.rank == 4
    for host in (1, 0):
        job.send_end(host)
        job.run(5)
    assert job.order_types() == [EndAttempt]
    job.send_end(2)
    job.run(1)
    assert job.order_types() == [EndAttempt, FinishJob]
    assert (job.first_failed_rank, job.notified_events) == (("h1", 4), ["failed"])


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param(
            [(0, 0, FailureKind.RANK_FAILED, 0), (1, 1, FailureKind.RANK_FAILED, -2)],
            1,
            id="earliest",
        ),
        pytest.param(
            [(0, 0, FailureKind.CONSEQUENCE, -9), (1, 1, FailureKind.RANK_FAILED, 0)],
            1,
            id="no-consequence",
        ),
        pytest.param(
            [(0, 0, FailureKind.RANK_FAILED, -1), (1, 1, FailureKind.PROCESS_KILLED, 0)],
            1,
            id="killed-at-that-moment",
        ),
        pytest.param(
            [(0, 0, FailureKind.RANK_FAILED, -9), (1, 1, FailureKind.PROCESS_KILLED, 0)],
            0,
            id="killed-much-later",
        ),
        pytest.param([(0, 0, FailureKind.CONSEQUENCE, 0)], 0, id="nothing-else-is-known"),
        pytest.param(
            [(0, None, FailureKind.UNEXPLAINED, -1), (1, 1, FailureKind.RANK_FAILED, 0)],
            1,
            id="a-rank-before-none",
        ),
    ],
)
def test_first_failure_across_hosts_with_different_clocks(
    reports: list[tuple[int, int, FailureKind, float]], expected: int
) -> None:
    """The hosts' clocks differ by weeks."""
    job = Job()
    job.run(10)
    for host, rank, kind, delay_seconds in reports:
        job.send_failure(host, rank, kind, delay_seconds)
    for host in (0, 1):
        job.send_end(host)
    job.run(1)
    assert job.first_failed_rank[0] == f"h{expected}"


def test_later_report_of_the_same_rank_replaces_the_earlier() -> None:
    job = Job()
    job.run(5)
    job.send_failure(1, 1)
    failure = Failure("h1", 1, 9, "failed (exit code 9)", "", Path("log"))
    report = FailureReport(failure, job.clock[1] + job.now, FailureKind.RANK_FAILED)
    job.send_end(1, failure_report=report)
    job.send_end(0)
    job.run(1)
    assert job.coordinator.failure == failure


def test_lost_host_is_the_failure_unless_there_is_a_cause() -> None:
    job = Job()
    job.run(5)
    job.silent.add(1)
    job.run(9)
    job.send_failure(0, 0, FailureKind.CONSEQUENCE)
    job.send_end(0)
    job.run(5)
    assert job.first_failed_rank == ("h1", None)
    assert "no word" in str(job.coordinator.failure)
    assert job.coordinator.phase is JobPhase.OVER
    # It reconnects too late, and is ordered to finish.
    job.send(Hello, 1, PROGRESS)
    job.collect()
    assert job.orders[-1][0] == 1
    assert job.order_types()[-1] == FinishJob


def test_mesh_position_of_a_lost_host_is_reported() -> None:
    job = Job(mesh_positions=("stage 0 of 2, mesh 0 (tp2)", "stage 1 of 2, mesh 1 (dp2)"))
    job.run(5)
    job.silent.add(1)
    job.run(15)
    assert job.coordinator.failure is not None
    assert job.coordinator.failure.headline() == (
        "h1: was lost: no word from its agent for 10 s; it held stage 1 of 2, mesh 1 (dp2)"
    )


def test_a_short_silence_does_no_harm() -> None:
    job = Job()
    job.silent.add(1)
    job.run(9)
    job.silent.clear()
    job.send(Hello, 1, PROGRESS)
    job.run(30)
    assert job.coordinator.phase is JobPhase.RUNNING


def test_pause_of_the_coordinator_does_not_time_out_hosts() -> None:
    job = Job()
    job.run(5)
    job.now += 500
    job.coordinator.tick(job.now)
    job.run(5)
    assert job.coordinator.phase is JobPhase.RUNNING


@pytest.mark.parametrize(
    "joined",
    [pytest.param(0, id="before-ranks-join"), pytest.param(1, id="after-ranks-have-joined")],
)
def test_pause_of_the_coordinator_does_not_time_out_absent_hosts(joined: int) -> None:
    """Their first messages could not be received meanwhile."""
    job = Job()
    job.silent.add(1)
    job.fields[0] = {"joined": joined}
    job.run(5)
    job.now += 500
    job.coordinator.tick(job.now)
    job.silent.clear()
    job.run(5)
    assert (job.coordinator.phase, job.order_types()) == (JobPhase.RUNNING, [])


def test_pause_of_the_coordinator_does_not_time_out_stacks() -> None:
    job = Job()
    job.run(5)
    job.moving = False
    job.run(51)
    assert job.order_types() == [DumpStacks]
    job.now += 500
    job.coordinator.tick(job.now)
    job.collect()
    assert job.order_types() == [DumpStacks]
    job.send_stacks(0, rank_progress("h0", 0))
    job.send_stacks(1, rank_progress("h1", 1, step=6))
    job.run(1)
    assert job.first_failed_rank == ("h1", 1)


def test_host_lost_after_a_pause_is_detected_in_time() -> None:
    """Its last message was received between the pause and the next tick."""
    job = Job()
    job.run(5)
    job.now += 500
    job.send(Heartbeat, 1, job.progress(1))
    job.silent.add(1)
    job.run(12)
    assert job.first_failed_rank == ("h1", None)


def test_absent_host_after_ranks_have_joined() -> None:
    """Its agent ended before it could send a message."""
    job = Job()
    job.silent.add(1)
    job.run(10)
    assert job.order_types() == []
    job.run(3)
    assert job.first_failed_rank == ("h1", None)


def test_host_that_never_connects() -> None:
    job = Job()
    job.silent.add(1)
    job.fields[0] = {"joined": 0}
    job.run(99)
    assert job.order_types() == []
    job.run(3)
    assert "did not report within 100 s" in str(job.coordinator.failure)


def test_restarts_are_counted_delayed_and_notified() -> None:
    job = Job(max_restarts=2)
    for attempt in range(2):
        job.run(5)
        job.send_failure(1, 1)
        for host in (0, 1):
            job.send_end(host)
        job.run(8)
        assert job.orders[-1] == (None, StartAttempt(attempt + 1))
        assert job.coordinator.failure is None
    job.run(5)
    job.send_end(0, 7)
    job.send_end(1, 7)
    job.run(1)
    assert job.order_types() == [
        EndAttempt,
        StartAttempt,
        EndAttempt,
        StartAttempt,
        EndAttempt,
        FinishJob,
    ]
    assert job.notified_events == ["restarted", "restarted", "failed"]
    assert job.coordinator.summary()["attempt"] == 3


def test_messages_of_an_earlier_attempt_are_ignored() -> None:
    job = Job(max_restarts=1)
    job.run(5)
    job.send_failure(1, 1)
    for host in (0, 1):
        job.send_end(host)
    job.run(5)
    job.send(AttemptEnded, 1, replace(PROGRESS, exit_code=1), attempt=0)
    job.run(5)
    assert (job.coordinator.attempt, job.coordinator.phase) == (1, JobPhase.RUNNING)


@pytest.mark.parametrize(
    ("joins", "starts"),
    [
        pytest.param([0], 0, id="never-joined"),
        pytest.param([1, 0], 2, id="a-false-start-is-forgiven-once"),
        pytest.param([1, 0, 0], 2, id="two-in-a-row-are-not"),
        pytest.param([1, 0, 1, 0], 4, id="unless-it-joined-between"),
    ],
)
def test_attempts_that_never_join_are_not_restarted_forever(joins: list[int], starts: int) -> None:
    job = Job(max_restarts=50)
    for joined in joins:
        for host in (0, 1):
            job.fields[host] = {"joined": joined}
        job.run(3)
        for host in (0, 1):
            job.send_end(host, joined=joined)
            job.fields[host] = {"joined": 0}
        job.run(70)
    assert job.order_types().count(StartAttempt) == starts


def test_no_restart_after_a_stop_nor_after_a_loss() -> None:
    job = Job(max_restarts=5)
    job.run(5)
    job.send(StopSignalled, 1, 15, None)
    for host in (0, 1):
        job.send_end(host, 143)
    job.run(5)
    assert job.order_types() == [StopJob, FinishJob]
    assert job.notified_events == ["stopped"]
    job = Job(max_restarts=5)
    job.silent.add(1)
    job.send(Hello, 1, replace(PROGRESS, joined=0))
    job.run(12)
    job.send_end(0)
    job.run(2)
    assert job.order_types() == [EndAttempt, FinishJob]


def job_with_spares(hosts: int, spares: int, **policy: Any) -> Job:
    """Return a running job whose last hosts are spares."""
    job = Job(hosts, spares=spares, on_bad_host="replace", **policy)
    for number in range(hosts - spares, hosts):
        job.fields[number] = dict(SPARE)
    job.run(5)
    assert job.order_types() == []
    return job


def test_spare_takes_the_place_of_a_lost_host() -> None:
    job = job_with_spares(4, 1)
    lose(job, 1, (0, 2))
    assert job.orders[-1] == (None, StartAttempt(1, (0, 3, 2)))
    assert job.notified_events == ["restarted"]
    assert job.remarks == ["h3 takes the place of h1"]
    summary = job.coordinator.summary()
    assert (summary["attempt"], summary["attempts"], summary["places"]) == (2, 2, [0, 3, 2])
    assert summary["restarts"][0]["failure"]["host"] == "h1"
    # A host that comes back is told to end, and learns why.
    job.orders.clear()
    job.silent.clear()
    job.fields[3] = {}
    job.run(1)
    ((host, order),) = job.orders
    assert host == 1
    assert isinstance(order, FinishJob)
    assert order.failure is not None
    assert "was lost: no word from its agent for 10 s" in order.failure.reason
    # The new host reconnects during the attempt.
    job.orders.clear()
    job.silent.add(1)
    job.send(Hello, 3, job.progress(3, **SPARE), attempt=0)
    job.run(1)
    assert job.orders == [(3, StartAttempt(1, (0, 3, 2)))]
    for number in (0, 2, 3):
        job.send_end(number, 0)
    job.run(1)
    assert (job.notified_events, job.coordinator.phase) == (
        ["restarted", "finished"],
        JobPhase.OVER,
    )


def test_silent_spare_is_not_chosen() -> None:
    job = job_with_spares(4, 2)
    job.silent.add(2)
    job.run(12)
    assert job.notified_events == [], "the loss of a spare ends nothing"
    lose(job, 1, (0,))
    assert job.orders[-1] == (None, StartAttempt(1, (0, 3)))


def test_each_lost_host_needs_a_spare() -> None:
    job = job_with_spares(4, 1)
    job.silent.update((1, 2))
    job.run(12)
    job.send_end(0)
    job.run(2)
    assert job.order_types()[-1] is FinishJob
    assert job.remarks == [
        "the job does not start again: 2 host(s) were lost, and 1 spare(s) are there"
    ]


@pytest.mark.parametrize(("max_restarts", "restarts"), [(0, 1), (1, 2)])
def test_replacements_are_no_restarts_of_max_restarts(max_restarts: int, restarts: int) -> None:
    job = job_with_spares(3, 1, max_restarts=max_restarts)
    lose(job, 1, (0,))
    job.fields[2] = {}
    for _ in range(2):
        job.run(5)
        job.send_failure(0, 0)
        for number in (0, 2):
            job.send_end(number)
        job.run(8)
    assert job.notified_events == ["restarted"] * restarts + ["failed"]


def test_waits_do_not_grow_with_replaced_hosts() -> None:
    job = job_with_spares(7, 5)
    for attempt in range(1, 6):
        victim = attempt
        job.silent.add(victim)
        job.run(12)
        job.send_end(0)
        job.run(3)
        assert job.orders[-1] == (None, StartAttempt(attempt, (0, attempt + 1)))
        job.fields[attempt + 1] = {}
        job.run(5)


@pytest.mark.parametrize(
    ("seconds_of_attempts", "waits"),
    [
        pytest.param((5, 5, 5, 5), (1, 2, 4, 8), id="failures-in-a-row"),
        pytest.param((5, 5, STEADY_SECONDS, 5), (1, 2, 1, 2), id="after-a-long-attempt"),
    ],
)
def test_waits_grow_with_failures_that_may_repeat(
    seconds_of_attempts: tuple[float, ...], waits: tuple[int, ...]
) -> None:
    job, measured = Job(1, max_restarts=9), []
    for attempt, seconds in enumerate(seconds_of_attempts):
        job.run(seconds)
        job.send_failure(0, 0)
        job.send_end(0)
        job.run(1)
        end = job.now
        while job.coordinator.attempt == attempt:
            job.run(1)
        measured.append(job.now - end)
        job.fields[0] = {}
    assert measured == list(waits)


def test_lost_spare_in_a_place_is_replaced_by_the_next_one() -> None:
    job = job_with_spares(4, 2)
    lose(job, 1, (0,))
    job.fields[2] = {}
    job.run(5)
    lose(job, 2, (0,))
    assert job.orders[-1] == (None, StartAttempt(2, (0, 3)))
    assert job.remarks == ["h2 takes the place of h1", "h3 takes the place of h2"]


def test_job_goes_on_without_a_lost_host() -> None:
    job = Job(4, on_bad_host="shrink", min_nnodes=2)
    job.run(5)
    lose(job, 1, (0, 2, 3))
    assert job.orders[-1] == (None, StartAttempt(1, (0, 2, 3)))
    lose(job, 3, (0, 2))
    assert job.orders[-1] == (None, StartAttempt(2, (0, 2)))
    assert job.remarks == [
        "the job goes on without h1: 3 host(s) are left",
        "the job goes on without h3: 2 host(s) are left",
    ]
    summary = job.coordinator.summary()
    assert (summary["places"], summary["attempts"]) == ([0, 2], 3)
    lose(job, 2, (0,))
    assert job.order_types()[-1] is FinishJob
    assert job.remarks[2:] == [
        "the job does not start again: 1 host(s) were lost, and 0 spare(s) are there; 1 of at "
        "least 2 host(s) are left (runner.nnodes)"
    ]


def job_without_h1(**policy: Any) -> Job:
    """Return a job that goes on without h1, which has a new agent."""
    job = Job(3, on_bad_host="shrink", min_nnodes=1, **policy)
    job.run(5)
    lose(job, 1, (0, 2))
    assert job.orders[-1] == (None, StartAttempt(1, (0, 2)))
    job.silent.discard(1)
    job.fields[1] = dict(SPARE)
    job.send(Hello, 1, job.progress(1), attempt=0)
    job.run(1)
    assert job.coordinator.summary()["hosts"]["1"] == "spare"
    return job


def test_job_is_restarted_for_a_host_that_has_come_back() -> None:
    job = job_without_h1(saves_when_stopped=True)
    job.run(8)
    assert PauseAttempt(1) not in [order for _, order in job.orders], "it may go again"
    job.run(4)
    assert job.orders[-1] == (None, PauseAttempt(1))
    # A rank that is stopped may report a failure, which is none.
    job.send_failure(2, 1)
    for number in (0, 2):
        job.send_end(number, 143)
    job.run(3)
    assert job.orders[-1] == (None, StartAttempt(2, (0, 2, 1)))
    assert job.notified_events == ["restarted", "restarted"]
    assert job.remarks[1:] == [
        "h1 is back, and joins the job when it saves a checkpoint and starts again",
        "h1 joins the job: 3 host(s)",
    ]
    summary = job.coordinator.summary()
    assert (summary["attempt"], summary["attempts"], summary["failure"]) == (3, 3, None)
    job.fields[1] = {}
    job.run(60)
    assert isinstance(job.orders[-1][1], StartAttempt), "it is not restarted again"


def test_program_that_saves_nothing_is_not_restarted_for_a_host() -> None:
    job = job_without_h1(max_restarts=1)
    job.run(40)
    assert not any(isinstance(order, PauseAttempt) for _, order in job.orders)
    job.send_failure(0, 0)
    for number in (0, 2):
        job.send_end(number)
    job.run(3)
    assert job.orders[-1] == (None, StartAttempt(2, (0, 2, 1)))
    assert job.remarks[-2:] == [
        "h1 is back, and joins the job when it fails",
        "h1 joins the job: 3 host(s)",
    ]


def test_host_lost_while_the_job_is_paused() -> None:
    job = job_without_h1(saves_when_stopped=True)
    job.run(12)
    assert job.orders[-1] == (None, PauseAttempt(1))
    job.send(Hello, 2, job.progress(2))
    job.collect()
    assert job.orders[-1] == (2, PauseAttempt(1)), "it may have missed the order"
    job.silent.add(2)
    job.send_end(0, 0)
    job.run(14)
    assert job.orders[-1] == (None, StartAttempt(2, (0, 1)))


def test_host_whose_agent_is_started_again_at_once() -> None:
    """Before its loss is noticed: its ranks have ended, and the others' with them."""
    job = Job(3, on_bad_host="shrink", min_nnodes=1)
    job.run(5)
    job.fields[1] = dict(SPARE)
    job.send(Hello, 1, job.progress(1))
    job.run(1)
    assert job.coordinator.failure is not None
    assert job.coordinator.failure.reason == "was lost: its agent has started again"
    for number in (0, 2):
        job.send_end(number)
    job.run(5)
    assert job.orders[-1] == (None, StartAttempt(1, (0, 2)))
    assert job.coordinator.summary()["hosts"]["1"] == "spare"


def test_scripts_of_a_whole_run_that_are_started_again() -> None:
    job = Job(2, on_bad_host="shrink", min_nnodes=1)
    job.fields[1] = dict(SPARE)
    job.send(Hello, 1, job.progress(1))
    job.run(1)
    assert job.orders == [(1, StartAttempt(0, (0, 1)))]


def test_spares_come_before_fewer_hosts() -> None:
    job = Job(4, on_bad_host="shrink", min_nnodes=1, spares=1)
    job.fields[3] = dict(SPARE)
    job.run(5)
    job.silent.update((1, 2))
    job.run(12)
    job.send_end(0)
    job.run(3)
    assert job.orders[-1] == (None, StartAttempt(1, (0, 3)))
    assert job.remarks == [
        "h3 takes the place of h1; the job goes on without h2: 2 host(s) are left"
    ]
    assert job.coordinator.summary()["replaced"] == {"1": 3}


def test_stop_without_a_request_is_a_final_failure() -> None:
    job = Job(max_restarts=5)
    job.run(5)
    cause = Failure("h1", None, None, "lost its script", "", Path("/o"))
    job.send(StopSignalled, 1, 15, cause)
    for host in (0, 1):
        job.send_end(host, 143)
    job.run(5)
    assert (job.order_types(), job.notified_events) == ([StopJob, FinishJob], ["failed"])
    assert job.first_failed_rank == ("h1", None)
    assert [order for _, order in job.orders] == [StopJob(signal.SIGTERM, cause), FinishJob(cause)]


def test_on_failure_leave_keeps_the_other_hosts_running() -> None:
    job = Job(on_failure="leave")
    job.run(5)
    job.send_failure(1, 1)
    job.send_end(1)
    job.run(30)
    assert job.order_types() == []
    assert job.first_failed_rank == ("h1", 1)
    job.send_end(0, 0)
    job.run(1)
    assert (job.order_types(), job.notified_events) == ([FinishJob], ["failed"])


def rank_progress(host: str, rank: int, **fields: Any) -> RankProgress:
    defaults = {"step": 7, "doing": "in training", "stopped": False, "answered": True, "stack": ""}
    return RankProgress(host, rank, log=Path("log"), **{**defaults, **fields})


def test_stall_requests_stacks_and_reports_the_straggler() -> None:
    job = Job()
    job.run(5)
    job.moving = False
    job.run(49)
    assert job.order_types() == []
    job.run(2)
    assert job.order_types() == [DumpStacks]
    job.send_stacks(0, rank_progress("h0", 0))
    job.send_stacks(1, rank_progress("h1", 1, step=6, stack="where"))
    job.run(1)
    assert job.order_types() == [DumpStacks, EndAttempt]
    assert job.first_failed_rank == ("h1", 1)
    assert job.coordinator.failure is not None
    assert "behind in training at step 6" in job.coordinator.failure.reason
    assert job.coordinator.failure.traceback == "where"
    assert job.notified_events == ["stalled"]


def test_stall_without_replies_from_hosts() -> None:
    job = Job()
    job.run(5)
    job.moving = False
    job.run(60)
    assert job.order_types() == [DumpStacks, EndAttempt]
    assert job.first_failed_rank == ("h0", None)


def test_stall_of_a_job_that_continues_is_reported_once() -> None:
    job = Job(on_failure="leave")
    job.run(5)
    for count in (1, 2):
        job.moving = False
        job.run(200)
        assert job.order_types() == [DumpStacks] * count
        assert job.notified_events == ["stalled"] * count
        job.moving = True
        job.run(1)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        pytest.param({"in_busy_activity": True}, {}, id="a-checkpoint"),
        pytest.param({"joined": 0}, {}, id="not-joined"),
        pytest.param({}, {"hang_detection_timeout": 0.0}, id="not-looked-for"),
    ],
)
def test_no_stall(fields: dict[str, Any], policy: dict[str, Any]) -> None:
    job = Job(**policy)
    job.fields[1] = fields
    job.run(5)
    job.moving = False
    job.run(1000)
    assert job.order_types() == []


def rank_exits(job: Job, host: int, *ranks: int, ago: float = 0.0) -> dict[str, Any]:
    """Return the fields of a host whose ranks end now, or have ended."""
    ended = job.clock[host] + job.now - ago
    exits = tuple(RankExit(rank, ended + n) for n, rank in enumerate(ranks))
    return {"nproc": 4, "joined": 4, "ended_ranks": min(len(exits), 4), "early_exits": exits}


def clock_of(time_of_exit: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_of_exit))


EARLY_EXITS: dict[str, tuple[tuple[int, ...], str]] = {
    "one": ((5,), "rank 5 ended with exit code 0 at {} while 7 ranks are still running"),
    "two": ((7, 5), "ranks 5 and 7 ended with exit code 0 from {} on while 6 ranks are still"),
    "all-of-a-host": ((4, 5, 6, 7), "ranks 4, 5, 6 and 7 ended with exit code 0 from {} on while"),
    "many": ((9, 6, 7, 5, 4), "ranks 5, 6, 7, 9 and others ended with exit code 0 from {} on"),
}


@pytest.mark.parametrize(("ranks", "text"), EARLY_EXITS.values(), ids=EARLY_EXITS)
def test_ranks_that_end_early_are_logged_once_and_explain_a_failure(
    ranks: tuple[int, ...], text: str
) -> None:
    job = Job()
    job.fields = {host: {"nproc": 4, "joined": 4} for host in (0, 1)}
    job.run(5)
    job.fields[1] = rank_exits(job, 1, *ranks)
    expected = text.format(clock_of(job.clock[1] + job.now))
    job.run(9)
    assert job.remarks == []
    job.run(60)
    (remark,) = job.remarks
    assert remark.startswith(expected)
    assert job.coordinator.summary()["early_exit"] == remark
    assert (job.order_types(), job.notified_events) == ([], [])
    job.moving = False
    job.run(60)
    assert job.coordinator.failure is not None
    stall, exit_line = job.coordinator.failure.reason.splitlines()
    assert stall.startswith("stalled: no rank has made progress")
    assert exit_line == f"before that, {remark.partition(' while ')[0]}"
    assert job.coordinator.summary()["early_exit"] == ""


def test_hosts_that_end_well_early_are_logged() -> None:
    job = Job()
    job.run(5)
    job.send_end(1, 0, **{**rank_exits(job, 1, 1), "nproc": 1})
    job.silent = {1}
    job.run(15)
    (remark,) = job.remarks
    assert remark.startswith("rank 1 ended with exit code 0 at ")
    assert remark.endswith(" while 1 rank is still running")
    job.send_end(0, 0)
    job.run(1)
    assert (job.order_types(), job.notified_events) == ([FinishJob], ["finished"])


def test_ranks_that_end_within_seconds_are_not_logged() -> None:
    job = Job()
    job.run(5)
    job.fields[1] = {**rank_exits(job, 1, 1), "nproc": 1}
    job.run(9)
    job.send_end(1, 0)
    job.send_end(0, 0)
    job.run(20)
    assert (job.remarks, job.notified_events) == ([], ["finished"])


def test_exits_after_a_failure_do_not_explain_it() -> None:
    job = Job(3, on_failure="leave")
    job.run(5)
    job.send_failure(2, 2)
    job.send_end(2)
    job.fields[1] = {**rank_exits(job, 1, 1), "nproc": 1}
    job.run(30)
    job.send_failure(2, 2, FailureKind.PROCESS_KILLED)
    assert job.coordinator.failure is not None
    assert (job.remarks, job.coordinator.failure.reason) == ([], "failed")


WORLD = RecordedGroup("0", "gloo", "default_pg", "0-1")


def recorded_rank(rank: int, name: str = "", *, request: str = "raw") -> RankProgress:
    """Return a rank that waits in all_reduce #2; with ``name``, in another operation."""
    has_failed = request == "failure"
    operation = RecordedOperation(0, 2, name or "all_reduce", "", 0, False, has_failed, 0.0, 60.0)
    return RankProgress(
        **{"host": f"h{rank}", "rank": rank, "step": 5, "doing": "", "stopped": False},
        **{"answered": True, "stack": "  in f", "log": Path(f"log{rank}")},
        record=FlightRecord(rank, request, 2, (WORLD,), (operation,)),
    )


def overdue_job(**policy: Any) -> Job:
    """Return a job whose rank 0 waits in a collective that rank 1 has not entered."""
    job = Job(**policy)
    job.run(5)
    job.fields[0]["overdue_since"] = 3.0
    job.run(2)
    assert job.order_types() == [DumpStacks]
    job.send_stacks(0, recorded_rank(0))
    job.send_stacks(1, replace(recorded_rank(1), record=None))
    job.run(2)
    return job


OVERDUE = (
    "rank 1 (h1) never entered all_reduce #2 of the default group; rank 0 has waited in it since "
)


def test_overdue_collective_is_explained_once_and_the_job_goes_on() -> None:
    job = overdue_job()
    (remark,) = job.remarks
    assert remark.startswith(OVERDUE)
    assert job.coordinator.summary()["hang"] == remark
    job.run(60)
    assert (job.order_types(), job.remarks) == ([DumpStacks], [remark])
    job.fields[0]["overdue_since"] = None
    job.run(1)
    assert (job.coordinator.summary()["hang"], job.remarks[1:]) == ("", ["the job goes on"])
    job.send_failure(0, 0)
    assert job.first_failed_rank == ("h0", 0)


@pytest.mark.parametrize(
    ("failed_rank", "first_failed_rank"),
    [pytest.param(0, 1, id="waiting"), pytest.param(1, 1, id="blamed")],
)
def test_rank_that_fails_in_a_hang_is_not_the_cause(
    failed_rank: int, first_failed_rank: int
) -> None:
    job = overdue_job()
    job.run(20)
    job.send_failure(failed_rank, failed_rank)
    assert job.first_failed_rank == (f"h{first_failed_rank}", first_failed_rank)
    assert job.coordinator.failure is not None
    is_cause = f"rank 1 (h1) {job.coordinator.failure.reason}".startswith(OVERDUE)
    # The rank that the others wait for fails for a reason of its own.
    assert is_cause is (failed_rank == 0)


def test_hang_is_the_cause_of_a_failure_before_its_explanation() -> None:
    """The failure is repeated with each heartbeat."""
    job = Job(on_failure="leave")
    job.run(5)
    job.fields[0]["overdue_since"] = 3.0
    job.run(1)
    failure = Failure("h0", 0, 1, "failed", "", Path("log"))
    report = FailureReport(failure, job.clock[0] + job.now, FailureKind.RANK_FAILED)
    job.fields[0]["failure_report"] = report
    job.run(1)
    assert job.coordinator.failure == failure
    job.send_stacks(0, recorded_rank(0))
    job.send_stacks(1, replace(recorded_rank(1), record=None))
    job.run(2)
    assert job.first_failed_rank == ("h1", 1)


def test_stall_is_explained_from_the_records() -> None:
    job = Job()
    job.run(5)
    job.moving = False
    job.run(53)
    assert job.order_types() == [DumpStacks]
    job.send_stacks(0, recorded_rank(0))
    job.send_stacks(1)  # its only rank has ended
    job.run(1)
    assert job.order_types() == [DumpStacks, EndAttempt]
    assert job.coordinator.failure is not None
    assert job.first_failed_rank == ("h1", 1)
    assert job.coordinator.failure.reason.startswith("never entered all_reduce #2")
    assert "(stalled: no rank has made progress for 5" in job.coordinator.failure.reason


def test_ranks_that_failed_in_different_operations_are_named() -> None:
    job = Job(max_restarts=1)
    job.run(5)
    for rank, name in enumerate(("all_reduce", "broadcast")):
        job.send_failure(rank, rank)
        job.send(LastRecords, rank, (recorded_rank(rank, name, request="failure"),))
        job.send_end(rank)
    job.run(1)
    remark = (
        "rank 1 (h1) called broadcast as #2 of the default group, where rank 0 called all_reduce"
    )
    assert [text.partition(", since")[0] for text in job.remarks] == [remark]
    assert job.coordinator.failure is not None
    assert job.coordinator.failure.reason.splitlines()[1].startswith(remark)
    job.run(10)
    job.send_failure(0, 0)
    assert job.coordinator.failure is not None
    assert job.coordinator.failure.reason == "failed"


def test_rank_that_had_ended_before_a_failed_collective_is_named() -> None:
    job = Job()
    job.run(5)
    job.send_failure(0, 0)
    job.send(LastRecords, 0, (recorded_rank(0, request="failure"),))
    job.send(LastRecords, 1, (), (1,))
    job.send_end(0)
    job.send_end(1)
    job.run(1)
    (remark,) = job.remarks
    assert remark == (
        "rank 1 (h1) ended with exit code 0 before the end of all_reduce #2 of the default group, "
        "in which rank 0 fails"
    )


def test_a_restart_forgets_early_exits() -> None:
    job = Job(max_restarts=1)
    job.fields[1] = rank_exits(job, 1, 5)
    job.run(12)
    assert len(job.remarks) == 1
    job.fields[1] = {}
    job.send_failure(0, 0)
    job.send_end(0)
    job.send_end(1, 0)
    job.run(10)
    assert job.coordinator.attempt == 1
    assert job.coordinator.summary()["early_exit"] == ""
    job.send_failure(0, 0)
    assert job.coordinator.failure is not None
    assert "before that" not in job.coordinator.failure.reason
    job.run(20)
    assert len(job.remarks) == 1


def test_a_checkpoint_that_never_ends_is_a_stall() -> None:
    job = Job()
    job.fields[1] = {"in_busy_activity": True}
    job.run(5)
    job.moving = False
    job.run(1820)
    assert DumpStacks in job.order_types()


@pytest.mark.parametrize(
    "fields",
    [pytest.param({"joined": 0}, id="none"), pytest.param({"nproc": 0, "joined": 0}, id="silent")],
)
def test_a_restart_whose_ranks_do_not_join(fields: dict[str, int]) -> None:
    job = Job(max_restarts=3)
    job.run(5)
    job.send_failure(0, 0)
    for host in (0, 1):
        job.send_end(host)
    job.fields[1] = dict(fields)
    job.run(50)
    job.moving = False
    job.run(110)
    assert job.coordinator.failure is not None
    assert job.coordinator.failure.host == "h1"
    assert "did not join within 100 s of a restart" in job.coordinator.failure.reason


def test_a_restart_that_ends_well_after_long_without_progress() -> None:
    job = Job(max_restarts=1, hang_detection_timeout=0.0)
    job.run(5)
    job.send_failure(0, 0)
    for host in (0, 1):
        job.send_end(host)
    job.run(5)
    job.moving = False
    job.run(110)
    for host in (0, 1):
        job.send_end(host, 0)
    job.run(1)
    assert (job.coordinator.attempt, job.notified_events) == (1, ["restarted", "finished"])


@pytest.mark.parametrize("last", [1, 0])
def test_stop_is_notified_once_all_hosts_have_ended(last: int) -> None:
    job = Job()
    job.run(5)
    job.send(StopSignalled, 0, 15, None)
    job.send_end(1 - last, 0)
    job.run(5)
    assert job.notified_events == []
    job.send_end(last, 0)
    job.run(1)
    assert (job.notified_events, job.coordinator.phase) == (["stopped"], JobPhase.OVER)


def test_stop_is_notified_when_host_0_ends_first() -> None:
    """Other hosts may have long grace periods, and host 0 does not wait for them."""
    job = Job()
    job.run(5)
    job.coordinator.complete_stop(job.now)
    assert job.coordinator.phase is JobPhase.RUNNING
    job.send(StopSignalled, 0, 15, None)
    job.send_end(0, 0)
    job.coordinator.complete_stop(job.now)
    job.collect()
    assert (job.notified_events, job.coordinator.phase) == (["stopped"], JobPhase.OVER)


FAILURES = st.builds(
    Failure,
    host=st.sampled_from(["h0", "h1", "h9"]),
    rank=st.none() | st.integers(0, 3),
    exit_code=st.none() | st.integers(-9, 9),
    reason=st.text(max_size=3),
    traceback=st.text(max_size=3),
    log=st.just(Path("log")),
)
REPORTS = st.builds(FailureReport, FAILURES, st.floats(-1e9, 1e9), st.sampled_from(FailureKind))
PROGRESS_VALUES = st.builds(
    HostProgress,
    status=st.sampled_from(HostStatus),
    joined=st.integers(-1, 2),
    nproc=st.integers(-1, 2),
    progress_count=st.integers(-2, 9),
    in_busy_activity=st.booleans(),
    has_run_long=st.booleans(),
    exit_code=st.none() | st.integers(-1, 2),
    failure_report=st.none() | REPORTS,
    ended_ranks=st.integers(-1, 3),
    early_exits=st.lists(
        st.builds(RankExit, st.integers(-1, 9), st.floats(-1e300, 1e300)), max_size=6
    ).map(tuple),
)
HEAD = (st.integers(-1, 3), st.integers(-1, 2), st.floats(-1e9, 1e9))
RANKS = st.builds(
    rank_progress, st.just("h0"), st.integers(-1, 3), step=st.none() | st.integers(0, 9)
)
HEALTH_EVENTS = st.builds(
    HealthEvent,
    st.sampled_from(["ready", "measured", "paired"]),
    address=st.sampled_from(["", "a"]),
    ranks=st.integers(-1, 2),
    devices=st.just(()),
    pairs=st.just(()) | st.just((PairMeasurement(7, (1.0, -1.0), "x"),)),
)
MESSAGES = st.one_of(
    *(st.builds(kind, *HEAD, PROGRESS_VALUES) for kind in (Hello, Heartbeat, AttemptEnded)),
    st.builds(RankFailed, *HEAD, REPORTS),
    st.builds(RankStacks, *HEAD, st.just(()) | RANKS),
    st.builds(HealthReply, *HEAD, st.integers(0, 4), st.none() | HEALTH_EVENTS),
    st.builds(StopSignalled, *HEAD, st.integers(-1, 99), st.none() | FAILURES),
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(-1, 3), MESSAGES, st.floats(0, 80)), max_size=20),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from(["stop", "replace", "shrink"]),
)
def test_arbitrary_messages_raise_nothing_and_changes_are_flagged(
    messages: list[tuple[int, HostMessage, float]],
    max_restarts: int,
    spares: int,
    on_bad_host: str,
) -> None:
    policy = {"spares": spares, "on_bad_host": on_bad_host, "health": "quick", "min_nnodes": 1}
    job = Job(2 + spares, max_restarts=max_restarts, **policy)
    previous: dict[str, Any] = {}
    for host, message, seconds in messages:
        job.coordinator.receive(host, message, job.now)
        job.now += seconds
        job.coordinator.tick(job.now)
        summary = json.loads(json.dumps(job.coordinator.summary()))
        assert job.coordinator.summary_changed or summary == previous
        previous, job.coordinator.summary_changed = summary, False
