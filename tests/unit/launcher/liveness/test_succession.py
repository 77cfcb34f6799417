"""Tests of the succession of coordinators: agents whose hosts and links fail, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.succession_lab import END_SECONDS, TIMEOUT_SECONDS, SimulatedRun

from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import JobPhase

# Loss, election, end of the ranks, and the wait before a restart.
TAKEOVER_SECONDS = TIMEOUT_SECONDS + 12
FAILURE = Failure("h1", 1, 1, "failed", "trace", Path("log"))


def running_job(hosts: int = 4, spares: int = 1, **policy: object) -> SimulatedRun:
    run = SimulatedRun(hosts, spares, **policy)
    run.run(5)
    assert run.coordinators == [0]
    assert run.hosts_with_ranks(0) == set(range(hosts - spares))
    return run


def test_next_host_takes_over() -> None:
    run = running_job()
    run.agents[0].has_power_cut = True
    run.run(TAKEOVER_SECONDS)
    assert run.coordinators == [1]
    assert run.hosts_with_ranks(1) == {1, 2, 3}
    coordinator = run.agents[1].link.coordinator
    assert coordinator is not None
    summary = coordinator.summary()
    assert (summary["places"], summary["replaced"]) == ([3, 1, 2], {"0": 3})
    assert (summary["term"], summary["coordinator"], summary["attempt"]) == (1, 1, 2)
    assert run.remarks == [
        "h1 coordinates the run from now on, because h0 was lost",
        "h3 takes the place of h0",
    ]
    run.run(60)
    assert run.hosts_with_ranks(1) == {1, 2, 3}, "the job goes on"


def test_successor_that_is_lost_has_a_successor() -> None:
    run = running_job(6, 2)
    for lost, coordinator in ((0, 1), (1, 2)):
        run.agents[lost].has_power_cut = True
        run.run(TAKEOVER_SECONDS)
        assert run.coordinators == [coordinator]
    assert run.hosts_with_ranks(2) == {2, 3, 4, 5}
    state = run.agents[2].link.coordinator
    assert state is not None
    assert [restart["failure"]["host"] for restart in state.restarts] == ["h0", "h1"]


def test_candidate_that_is_lost_too_is_skipped() -> None:
    run = running_job(6, 2)
    run.agents[0].has_power_cut = run.agents[1].has_power_cut = True
    run.run(2 * TAKEOVER_SECONDS)
    assert run.coordinators == [2]
    assert run.hosts_with_ranks(1) == {2, 3, 4, 5}


def test_candidate_whose_port_is_in_use_is_skipped() -> None:
    run = running_job(6, 2)
    run.agents[0].has_power_cut = run.agents[1].has_used_port = True
    run.run(2 * TAKEOVER_SECONDS)
    assert run.coordinators == [2]
    assert run.hosts_with_ranks(1) == {1, 2, 3, 4}


def test_coordinator_that_is_cut_off_ends_its_ranks() -> None:
    run = running_job()
    run.isolate(0)
    run.run(TAKEOVER_SECONDS)
    assert run.coordinators == [1]
    assert not run.agents[0].has_ranks
    assert not run.agents[0].is_alive
    run.heal()
    run.run(60)
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([1], {1, 2, 3})


def test_coordinator_that_was_frozen_ends_its_ranks() -> None:
    run = running_job()
    run.agents[0].is_frozen = True
    run.run(TAKEOVER_SECONDS)
    assert run.coordinators == [1]
    run.agents[0].is_frozen = False
    run.run(TAKEOVER_SECONDS)
    assert not run.agents[0].is_alive
    coordinator = run.agents[0].link.coordinator
    assert coordinator is not None
    assert coordinator.failure is not None, "messages from before its end do not conclude the job"
    assert "has lost the contact to most of the run's hosts" in coordinator.failure.reason
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([1], {1, 2, 3})


def test_whole_run_that_was_frozen_goes_on() -> None:
    run = running_job()
    run.now += 500
    run.run(60)
    assert (run.coordinators, run.hosts_with_ranks(0)) == ([0], {0, 1, 2})


@pytest.mark.parametrize(
    ("hosts", "minority", "goes_on"),
    [
        pytest.param(2, (1,), (0,), id="two-agents"),
        pytest.param(4, (2, 3), (0, 1), id="half-with-the-coordinator"),
        pytest.param(5, (0, 1), (2, 3, 4), id="most-without-the-coordinator"),
        pytest.param(5, (3, 4), (0, 1, 2), id="most-with-the-coordinator"),
    ],
)
def test_one_part_of_a_partition_goes_on(
    hosts: int, minority: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    run = running_job(hosts, 0, on_bad_host="shrink", min_nnodes=1)
    run.isolate(*minority)
    run.run(3 * TAKEOVER_SECONDS)
    assert run.hosts_with_ranks(1) == {*goes_on}
    assert len(run.coordinators) == 1
    assert run.coordinators[0] in goes_on
    run.run(4 * TAKEOVER_SECONDS)
    assert [agent.number for agent in run.agents if agent.is_alive] == [*goes_on]


def test_only_host_that_trains_is_replaced() -> None:
    run = running_job(3, 2)
    run.agents[0].has_power_cut = True
    run.run(TAKEOVER_SECONDS)
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([1], {1})


def test_spare_that_is_lost_with_the_coordinator_is_not_chosen() -> None:
    run = running_job(6, 3)
    run.agents[0].has_power_cut = run.agents[3].has_power_cut = True
    run.run(TAKEOVER_SECONDS)
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([1], {1, 2, 4})


def test_two_agents_have_no_successor() -> None:
    run = running_job(2, 0, on_bad_host="shrink", min_nnodes=1)
    run.agents[0].has_power_cut = True
    run.run(TIMEOUT_SECONDS + 3)
    assert not run.agents[1].is_alive
    failure = run.agents[1].member.failure
    assert failure is not None
    assert "no other host takes over the run" in failure.reason


def test_host_without_contact_to_the_coordinator_alone_leaves_the_job() -> None:
    """The other hosts have contact to it, so that it has no majority."""
    run = running_job(5, 2)
    run.cut_links.add(frozenset((0, 1)))
    run.agents[1].clients[0] = False
    run.run(4 * TAKEOVER_SECONDS)
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([0], {0, 2, 3})
    assert not run.agents[1].is_alive


def test_sick_coordinator_hands_over_at_once() -> None:
    run = running_job(health="quick", max_restarts=1)
    coordinator = run.agents[0].link.coordinator
    assert coordinator is not None
    for agent in run.agents[:3]:
        agent.member.end_without_coordinator(FAILURE)
    coordinator._add_detected_failure(FailureReport(FAILURE, run.now, FailureKind.RANK_FAILED))
    run.run(END_SECONDS + 1)
    assert coordinator.phase is JobPhase.CHECKING
    coordinator._hardware_check = None
    coordinator._mark_sick(0, "its memory is broken")
    coordinator._hand_over(run.now)
    run.run(TIMEOUT_SECONDS / 2)
    assert not run.agents[0].is_alive
    assert (run.coordinators, run.hosts_with_ranks(1)) == ([1], {1, 2, 3})
    successor = run.agents[1].link.coordinator
    assert successor is not None
    assert successor.restarts[0]["failure"]["rank"] == 1, "the failure of the attempt is kept"
    assert successor.summary()["sick"] == {"0": "sick: its memory is broken"}
    assert "h1 coordinates the run from now on, because h0 is sick" in run.remarks


EVENTS = st.tuples(
    st.sampled_from(["cut", "isolate", "heal", "freeze", "thaw", "power"]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.floats(0, 3 * TIMEOUT_SECONDS),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, max_size=8), st.sampled_from(["replace", "shrink"]))
def test_no_two_coordinators_have_ranks_for_long(
    events: list[tuple[str, int, int, float]], on_bad_host: str
) -> None:
    run = SimulatedRun(5, 2, on_bad_host=on_bad_host, min_nnodes=1)
    run.run(5)
    for event, one, other, seconds in events:
        if event == "cut" and one != other:
            run.cut_links.add(frozenset((one, other)))
        elif event == "isolate":
            run.isolate(one, other)
        elif event == "heal":
            run.heal()
        elif event == "freeze":
            run.agents[one].is_frozen = True
        elif event == "thaw":
            run.agents[one].is_frozen = False
        elif event == "power":
            run.agents[one].has_power_cut = True
        run.run(seconds)  # checks this at every moment
    for agent in run.agents:
        agent.is_frozen = False
    run.run(12 * TIMEOUT_SECONDS)
    assert len(run.coordinators) <= 1
    followed = {*run.coordinators}
    assert all(a.link.leader in followed for a in run.agents if a.has_ranks), "no orphan is left"
