"""Tests of the detection of hangs, and of the selection of the rank that is to blame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.flight_records import FlightRecord, RecordedGroup, RecordedOperation
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.hang_detector import (
    STACK_TIMEOUT_SECONDS,
    HangAction,
    HangDetector,
    find_straggler,
    stalled_report,
)
from flagscale.launcher.liveness.job import JobHost, Notice
from flagscale.launcher.liveness.messages import DumpStacks, LastRecords, RankProgress, RankStacks
from flagscale.launcher.liveness.options import Policy
from flagscale.launcher.liveness.places import Places

IN_COLLECTIVE = 'File "/v/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'
IN_LOADER = 'File "/v/torch/utils/data/dataloader.py", line 1200 in _try_get_data'


def rank_progress(rank: int, step: int | None = 5, **fields: Any) -> RankProgress:
    defaults: dict[str, Any] = {"host": "h", "log": Path("log"), "stack": IN_COLLECTIVE}
    defaults |= {"doing": "in training", "stopped": False, "answered": True}
    return RankProgress(rank=rank, step=step, **{**defaults, **fields})


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


# -- detector --------------------------------------------------------------------------------

WORLD = RecordedGroup("0", "gloo", "default_pg", "0-1")
STALL_SECONDS = 50.0
START_SECONDS = 100.0


def recorded_rank(rank: int, name: str = "all_reduce", *, failed: bool = False) -> RankProgress:
    """Return a rank that waits in operation #2, or has failed in it."""
    operation = RecordedOperation(0, 2, name, "", 0, False, failed, 0.0, 60.0)
    request = "failure" if failed else "raw"
    record = FlightRecord(rank, request, 2, (WORLD,), (operation,))
    return rank_progress(rank, host=f"h{rank}", record=record)


class Attempt:
    """An attempt of two hosts with one running rank each, and its detector."""

    def __init__(self, number: int = 0) -> None:
        self.now = 1000.0
        self.number = number
        self.requests = 0
        self.hosts = [JobHost(f"h{n}", joined=1, nproc=1) for n in range(2)]
        self.active = {0, 1}
        self.create_detector()

    def create_detector(self) -> None:
        policy = Policy(
            max_restarts=0,
            on_failure="stop",
            lost_host_timeout=10.0,
            start_timeout=START_SECONDS,
            hang_detection_timeout=STALL_SECONDS,
        )
        places = Places(policy, self.hosts)
        self.detector = HangDetector(policy, places, self.number, Path("out"), self.now)

    def tick(self, seconds: float, *, ranks_have_joined: bool = True) -> list[HangAction]:
        self.now += seconds
        active_hosts = {number: self.hosts[number] for number in sorted(self.active)}
        actions = self.detector.tick(active_hosts, self.now, ranks_have_joined=ranks_have_joined)
        for order in actions:
            if isinstance(order, DumpStacks):
                self.requests += 1
                assert order == DumpStacks(self.number, self.requests)
        return actions

    def requests_stacks(self, seconds: float) -> bool:
        """Return True if an order for stacks is the only action after some seconds."""
        return [type(action) for action in self.tick(seconds)] == [DumpStacks]

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.detector.extend_timeouts(lambda start: min(start + seconds, self.now))

    def reply(self, host: int, *ranks: RankProgress) -> None:
        message = RankStacks(host, self.number, self.now, ranks, self.requests)
        self.detector.receive(host, message)

    def send_last_records(self, host: int, *ranks: RankProgress, finished: bool = False) -> None:
        finished_ranks = (host,) if finished else ()
        message = LastRecords(host, self.number, self.now, ranks, finished_ranks)
        self.detector.receive(host, message)

    def explain_failure_after_end(self) -> Notice | None:
        """Let rank 0 fail in a collective after the end of rank 1, and return the explanation."""
        self.send_last_records(0, recorded_rank(0, failed=True))
        self.send_last_records(1, finished=True)
        return self.detector.explain_failed_collective()

    def explain_overdue(self) -> str:
        """Let rank 0 wait in a collective that rank 1 has not entered, and return the remark."""
        self.hosts[0].overdue_since = 3.0
        assert self.requests_stacks(1)
        self.reply(0, recorded_rank(0))
        self.reply(1, rank_progress(1, host="h1"))
        (notice,) = self.tick(1)
        assert isinstance(notice, Notice)
        return notice.remark

    def fail(self, rank: int, seconds_ago: float = 0.0) -> FailureReport:
        """Return the report of a rank that has failed."""
        failure = Failure(f"h{rank}", rank, 1, "failed", "", Path("log"))
        return FailureReport(failure, self.now - seconds_ago, FailureKind.RANK_FAILED)


def test_stall_is_notified_before_it_ends_the_attempt() -> None:
    attempt = Attempt(number=3)
    assert attempt.tick(STALL_SECONDS) == []
    assert attempt.requests_stacks(1)
    attempt.reply(0, rank_progress(0, host="h0"))
    assert attempt.tick(1) == []
    attempt.reply(1, rank_progress(1, 4, host="h1"))
    notice, report = attempt.tick(1)
    assert isinstance(report, FailureReport)
    assert notice == Notice("stalled", 3, report.failure)
    assert (report.failure.host, report.failure.rank, report.time) == ("h1", 1, attempt.now)


def test_progress_takes_back_the_request_of_a_stall() -> None:
    attempt = Attempt()
    assert attempt.requests_stacks(STALL_SECONDS + 1)
    attempt.reply(0, rank_progress(0))
    attempt.reply(1, rank_progress(1))
    attempt.detector.record_progress(attempt.now)
    assert attempt.tick(STALL_SECONDS) == []
    assert attempt.requests_stacks(1)
    assert attempt.tick(STACK_TIMEOUT_SECONDS) == [], "earlier replies do not count"


def test_busy_host_gets_more_time() -> None:
    attempt = Attempt()
    attempt.hosts[1].in_busy_activity = True
    assert attempt.tick(STALL_SECONDS + 1) == []
    attempt.active.discard(1)
    assert attempt.requests_stacks(0)


def test_replies_of_hosts_that_have_ended_are_not_awaited() -> None:
    attempt = Attempt()
    attempt.tick(STALL_SECONDS + 1)
    attempt.reply(0, rank_progress(0, host="h0"))
    attempt.active.discard(1)
    assert len(attempt.tick(0)) == 2


@pytest.mark.parametrize(
    ("number", "joined_before", "is_late"),
    [
        pytest.param(0, True, False, id="first-start"),
        pytest.param(1, False, False, id="never-joined"),
        pytest.param(1, True, True, id="restart"),
    ],
)
def test_only_a_restart_has_to_join_in_time(
    number: int, joined_before: bool, is_late: bool
) -> None:
    attempt = Attempt(number)
    attempt.hosts[1].joined = 0
    assert attempt.tick(START_SECONDS, ranks_have_joined=joined_before) == []
    actions = attempt.tick(1, ranks_have_joined=joined_before)
    assert [
        action.failure.headline() for action in actions if isinstance(action, FailureReport)
    ] == (["h1: has ranks that did not join within 100 s of a restart"] if is_late else [])
    assert len(actions) == is_late


def test_stall_is_reported_once_until_there_is_progress() -> None:
    """The job continues with ``on_failure: leave``."""
    attempt = Attempt()
    for _ in range(2):
        assert attempt.requests_stacks(STALL_SECONDS + 1)
        assert len(attempt.tick(STACK_TIMEOUT_SECONDS + 1)) == 2
        for _ in range(5):
            assert attempt.tick(STALL_SECONDS) == []
        attempt.detector.record_progress(attempt.now)


def test_late_start_is_reported_once() -> None:
    attempt = Attempt(1)
    attempt.hosts[1].joined = 0
    assert len(attempt.tick(START_SECONDS + 1)) == 1
    assert attempt.tick(1) == []


def test_attempt_without_active_hosts_is_no_late_start() -> None:
    attempt = Attempt(1)
    attempt.active.clear()
    assert attempt.tick(START_SECONDS + 1) == []


def test_late_reply_to_an_earlier_request_does_not_count() -> None:
    attempt = Attempt()
    assert attempt.requests_stacks(STALL_SECONDS + 1)
    attempt.detector.record_progress(attempt.now)
    assert attempt.requests_stacks(STALL_SECONDS + 1)
    for host in range(2):
        reply = RankStacks(host, 0, attempt.now, (rank_progress(host),), attempt.requests - 1)
        attempt.detector.receive(host, reply)
    assert attempt.tick(1) == []


@pytest.mark.parametrize(
    ("rank", "headline"),
    [
        pytest.param(
            rank_progress(0, host="h0"),
            "h1: stalled: no rank has made progress for 60 s, and this host's agent did not report "
            "the stacks of its ranks, unlike those of other hosts",
            id="running",
        ),
        pytest.param(
            rank_progress(0, host="h0", stopped=True),
            "h0: rank 0 stalled: no rank has made progress for 60 s, and this one is behind in "
            "training at step 5; its process is stopped (SIGSTOP)",
            id="stopped",
        ),
    ],
)
def test_host_that_reports_no_stacks_is_to_blame_unless_a_rank_is_stopped(
    rank: RankProgress, headline: str
) -> None:
    attempt = Attempt()
    assert attempt.requests_stacks(STALL_SECONDS + 1)
    attempt.reply(0, rank)
    _, report = attempt.tick(STACK_TIMEOUT_SECONDS + 1)
    assert isinstance(report, FailureReport)
    assert report.failure.headline() == headline


def test_end_of_all_hosts_is_not_the_end_of_an_overdue_collective() -> None:
    attempt = Attempt()
    attempt.explain_overdue()
    attempt.active.clear()
    assert attempt.tick(1) == []


def test_pause_extends_the_time_without_progress() -> None:
    attempt = Attempt()
    assert attempt.tick(STALL_SECONDS) == []
    attempt.pause(500)
    assert attempt.tick(0) == []
    assert attempt.requests_stacks(1)


@pytest.mark.parametrize(
    "is_overdue", [pytest.param(False, id="stall"), pytest.param(True, id="overdue-collective")]
)
def test_pause_extends_the_time_for_stacks(is_overdue: bool) -> None:
    attempt = Attempt()
    attempt.hosts[0].overdue_since = 3.0 if is_overdue else None
    assert attempt.requests_stacks(1 if is_overdue else STALL_SECONDS + 1)
    attempt.reply(0, recorded_rank(0))
    attempt.pause(500)
    assert attempt.tick(STACK_TIMEOUT_SECONDS) == []
    assert [action.event for action in attempt.tick(1) if isinstance(action, Notice)] == [
        "hang" if is_overdue else "stalled"
    ]


def test_overdue_collective_is_explained_until_it_ends() -> None:
    attempt = Attempt()
    remark = attempt.explain_overdue()
    assert remark.startswith("rank 1 (h1) never entered all_reduce #2 of the default group")
    assert attempt.detector.hang_remark == remark
    assert attempt.tick(1) == []
    attempt.hosts[0].overdue_since = None
    assert attempt.tick(1) == [Notice("hang", 0, remark="the job goes on")]
    assert attempt.detector.hang_remark == ""
    assert attempt.detector.find_cause_of(attempt.fail(0)) is None
    assert attempt.tick(1) == []


def test_next_overdue_collective_is_explained_anew() -> None:
    attempt = Attempt()
    remark = attempt.explain_overdue()
    attempt.hosts[0].overdue_since = 90.0
    going_on, order = attempt.tick(1)
    assert going_on == Notice("hang", 0, remark="the job goes on")
    assert isinstance(order, DumpStacks)
    assert attempt.detector.find_cause_of(attempt.fail(0)) is None
    attempt.reply(0, recorded_rank(0))
    attempt.reply(1, rank_progress(1, host="h1"))
    assert attempt.tick(1) == [Notice("hang", 0, remark=remark)]


def test_host_that_becomes_overdue_later_waits_in_the_same_collective() -> None:
    attempt = Attempt()
    remark = attempt.explain_overdue()
    attempt.hosts[1].overdue_since = 30.0
    assert attempt.tick(1) == []
    attempt.active.discard(0)
    assert attempt.tick(1) == []
    assert attempt.detector.hang_remark == remark


def test_pause_after_a_request_does_not_hide_the_cause_of_a_failure() -> None:
    attempt = Attempt()
    attempt.hosts[0].overdue_since = 3.0
    assert attempt.requests_stacks(1)
    failure = attempt.fail(0)
    attempt.pause(500)
    attempt.reply(0, recorded_rank(0))
    attempt.reply(1, rank_progress(1, host="h1"))
    assert len(attempt.tick(1)) == 1
    assert attempt.detector.find_cause_of(failure) is not None


def test_overdue_collective_without_an_explanation_is_not_asked_for_again() -> None:
    attempt = Attempt()
    attempt.hosts[0].overdue_since = 3.0
    assert attempt.requests_stacks(1)
    attempt.reply(0)
    attempt.reply(1)
    assert attempt.tick(1) == []
    assert attempt.tick(1) == []


def test_stall_takes_over_the_request_of_an_overdue_collective() -> None:
    attempt = Attempt()
    assert attempt.tick(STALL_SECONDS) == []
    attempt.hosts[0].overdue_since = 3.0
    assert attempt.requests_stacks(0)
    assert attempt.requests_stacks(1)
    attempt.reply(0, recorded_rank(0))
    attempt.reply(1)
    notice, report, order = attempt.tick(1)
    assert isinstance(notice, Notice)
    assert isinstance(report, FailureReport)
    assert report.failure.headline().startswith("h1: rank 1 never entered all_reduce #2")
    # The job continues with on_failure: leave.
    assert isinstance(order, DumpStacks)


def test_failure_in_an_overdue_collective_is_its_consequence() -> None:
    attempt = Attempt()
    assert attempt.detector.find_cause_of(attempt.fail(0)) is None
    attempt.explain_overdue()
    cause = attempt.detector.find_cause_of(attempt.fail(0))
    assert cause is not None
    assert (cause.failure.host, cause.failure.rank) == ("h1", 1)
    assert cause.failure.reason.endswith("(the others timed out)")
    # The rank that the others wait for fails for a reason of its own.
    assert attempt.detector.find_cause_of(attempt.fail(1)) is None


def test_failure_before_an_overdue_collective_is_no_consequence_of_it() -> None:
    attempt = Attempt()
    attempt.explain_overdue()
    assert attempt.detector.find_cause_of(attempt.fail(0, seconds_ago=1)) is not None
    assert attempt.detector.find_cause_of(attempt.fail(0, seconds_ago=2)) is None


def test_failed_collective_is_explained_from_last_records() -> None:
    attempt = Attempt()
    assert attempt.detector.explain_failed_collective() is None
    attempt.send_last_records(0, recorded_rank(0, failed=True))
    assert attempt.detector.explain_failed_collective() is None
    attempt.send_last_records(1, recorded_rank(1, "broadcast", failed=True))
    notice = attempt.detector.explain_failed_collective()
    assert notice is not None
    assert notice.remark.startswith("rank 1 (h1) called broadcast as #2 of the default group")
    assert attempt.detector.failure_remark == notice.remark


def test_explained_hang_needs_no_second_explanation() -> None:
    attempt = Attempt()
    attempt.explain_overdue()
    assert attempt.explain_failure_after_end() is None
    assert attempt.detector.failure_remark == ""


def test_rank_that_has_ended_is_named_with_its_host() -> None:
    attempt = Attempt()
    notice = attempt.explain_failure_after_end()
    assert notice is not None
    assert notice.remark.startswith("rank 1 (h1) ended with exit code 0 before the end of")


def test_rank_that_has_ended_is_named_with_the_host_that_reported_its_end() -> None:
    """Not with a host that is derived from numbers of ranks: hosts may not have reported them."""
    attempt = Attempt()
    attempt.hosts = [replace(host, nproc=0) for host in attempt.hosts]
    attempt.hosts.append(JobHost("h2"))
    attempt.create_detector()
    notice = attempt.explain_failure_after_end()
    assert notice is not None
    assert notice.remark.startswith("rank 1 (h1) ended with exit code 0 before the end of")


def test_rank_of_an_unknown_host_is_named_without_one() -> None:
    attempt = Attempt()
    attempt.hosts = [JobHost(f"h{n}", nproc=int(n > 0), overdue_since=3.0) for n in range(3)]
    attempt.create_detector()
    attempt.tick(1)
    attempt.reply(0, recorded_rank(0))
    attempt.reply(1)
    (notice,) = attempt.tick(1)
    assert isinstance(notice, Notice)
    assert notice.remark.startswith("rank 1 never entered all_reduce #2")
    cause = attempt.detector.find_cause_of(attempt.fail(0))
    assert cause is not None
    assert cause.failure.headline().startswith("rank 1 never entered all_reduce #2")
