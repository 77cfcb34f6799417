"""Tests of the succession of coordinators: agents whose hosts and links fail, without processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.election_model import NOW, OPERATIONS, ElectionModel, describe_loss
from support.liveness_job import PROGRESS
from support.succession_lab import END_SECONDS, TICK_SECONDS, TIMEOUT_SECONDS, SimulatedRun

from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import (
    Departure,
    Hello,
    JobPhase,
    JobState,
    JobStateAccepted,
)
from flagscale.launcher.liveness.succession import Candidacy, CoordinatorSearch, SharedState

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
    assert "this host does not follow a successor" in failure.reason


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
        agent.member.end_ranks_until_successor(FAILURE)
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


# -- rules ----------------------------------------------------------------------------------------


def job_state(**fields: Any) -> JobState:
    state = JobState(1, 9, 0, ((0, 1, 2, 3),), 0, (0, 1, 2))
    return replace(state, **fields)


def hello(host: int, state: JobState | None, attempt: int = 0) -> Hello:
    return Hello(host, attempt, NOW, PROGRESS, state)


def stand(number: int, state: JobState, *voters: int) -> Candidacy:
    candidacy = Candidacy(number, state, 0, describe_loss, NOW, TIMEOUT_SECONDS, 2.0)
    for voter in voters:
        candidacy.receive(voter, hello(voter, state), NOW)
    candidacy.tick(NOW)
    return candidacy


def accept(candidacy: Candidacy, *hosts: int) -> None:
    assert candidacy.proposal is not None
    for host in hosts:
        reply = JobStateAccepted(host, 0, NOW, *candidacy.proposal.version)
        candidacy.receive(host, reply, NOW)


def search_with(number: int, state: JobState) -> CoordinatorSearch:
    search = CoordinatorSearch(number, 6)
    assert search.accept(state, state.coordinator)
    return search


def test_proposal_is_dropped_for_a_state_that_was_accepted_in_the_meantime() -> None:
    """Host 2 has gone back to the coordinator, accepted a state, and lost it again."""
    candidacy = stand(1, job_state(), 2, 3)
    overtaken = candidacy.proposal
    assert overtaken is not None
    newer = job_state(revision=10, places=(3, 1, 2))
    voter = search_with(2, newer)
    assert not voter.accept(overtaken, 1), "it would forget the state"
    candidacy.receive(2, hello(2, newer), NOW)
    assert candidacy.proposal is None
    accept_late = JobStateAccepted(3, 0, NOW, *overtaken.version)
    candidacy.receive(3, accept_late, NOW)
    assert not candidacy.is_elected
    candidacy.tick(NOW)
    proposal = candidacy.proposal
    assert proposal is not None
    assert (proposal.term, proposal.origin, proposal.places) == (3, (1, 10), (3, 1, 2))
    assert voter.accept(proposal, 1)
    accept(candidacy, 2)
    assert not candidacy.is_elected
    accept(candidacy, 3)
    assert candidacy.is_elected


def test_vote_for_another_candidate_is_no_newer_state() -> None:
    """Host 3 has accepted a proposal that continues an older state than that of host 2."""
    vote = job_state(term=2, origin_term=1, coordinator=1)
    newer = job_state(revision=10)
    candidacy = stand(3, vote)
    for voter in (2, 4):
        candidacy.receive(voter, hello(voter, newer), NOW)
    candidacy.receive(1, hello(1, vote), NOW)
    candidacy.tick(NOW)
    proposal = candidacy.proposal
    assert proposal is not None
    assert (proposal.term, proposal.origin) == (3, (1, 10))


def test_candidate_that_was_not_elected_is_no_predecessor() -> None:
    departure = Departure(0, describe_loss(0))
    vote = job_state(term=2, origin_term=1, coordinator=1, departures=(departure,))
    candidacy = stand(3, vote, 1, 2)
    assert candidacy.proposal is not None
    assert candidacy.proposal.departures == (departure,)


def test_loss_of_a_coordinator_that_others_have_followed_is_its_own() -> None:
    """Host 3 has seen the loss of host 0, and hears of host 1, which has coordinated since."""
    departures = (Departure(0, describe_loss(0)),)
    later = job_state(term=2, revision=12, coordinator=1, departures=departures)
    candidacy = stand(3, job_state())
    for voter in (1, 2):
        candidacy.receive(voter, hello(voter, later), NOW)
    candidacy.tick(NOW)
    assert candidacy.proposal is not None
    hosts = [(d.host, d.loss.host) for d in candidacy.proposal.departures]
    assert hosts == [(0, "h0"), (1, "h1")]


def test_host_that_has_left_the_job_proposes_nothing() -> None:
    candidacy = stand(1, job_state())
    later = job_state(revision=10, departures=(Departure(1, describe_loss(1)),))
    for voter in (2, 3):
        candidacy.receive(voter, hello(voter, later), NOW)
    candidacy.tick(NOW)
    assert candidacy.proposal is None
    assert "without it" in candidacy.obstacle


def test_candidate_proposes_nothing_after_its_time() -> None:
    candidacy = stand(1, job_state())
    late = NOW + 2 * TIMEOUT_SECONDS + 1
    for voter in (2, 3):
        candidacy.receive(voter, hello(voter, job_state()), late)
    candidacy.tick(late)
    assert candidacy.proposal is None
    assert "no contact to more than half" in candidacy.obstacle


def test_pause_of_a_candidate_does_not_count() -> None:
    candidacy = stand(1, job_state())
    late = NOW + 5 * TIMEOUT_SECONDS
    candidacy.extend(5 * TIMEOUT_SECONDS, late)
    candidacy.tick(late)
    assert not candidacy.obstacle


def test_agent_that_was_started_again_has_no_vote() -> None:
    candidacy = stand(1, job_state(), 2, 3)
    candidacy.receive(3, hello(3, None), NOW)
    accept(candidacy, 2, 3)
    assert not candidacy.is_elected
    assert candidacy.proposal is not None
    assert not CoordinatorSearch(3, 6).accept(candidacy.proposal, 1)


def test_number_of_a_later_attempt_is_not_used_again() -> None:
    candidacy = stand(1, job_state(), 2, 3)
    candidacy.receive(3, hello(3, job_state(), attempt=4), NOW)
    candidacy.tick(NOW)
    assert candidacy.proposal is not None
    assert (candidacy.proposal.term, candidacy.proposal.attempt) == (3, 4)


def test_candidates_have_a_vote_in_each_electorate() -> None:
    """Host 0 has come back, and is in the new electorate only: it votes, but is no candidate."""
    joint = job_state(coordinator=1, electorates=((1, 2, 3), (0, 1, 2, 3)))
    assert search_with(2, joint).list_candidates() == [2, 3]
    assert search_with(0, joint).list_candidates() == [2, 3]
    assert search_with(5, joint).find_obstacle() == "it has no vote"


def test_changed_electorate_is_in_force_alone_without_another_message() -> None:
    shared = SharedState(JobState(0, 0, 0, ((0, 1),), 0, (0, 1)))
    assert shared.update([0], shared.state)
    assert shared.state.electorates == ((0, 1), (0,))
    assert shared.is_accepted, "this host is half of each"
    assert shared.update([0], shared.state)
    assert shared.state.electorates == ((0,),)
    assert not shared.update([0], shared.state)


# -- links ----------------------------------------------------------------------------------------


def test_candidate_that_is_stopped_stops_the_job() -> None:
    run = running_job()
    run.agents[0].has_power_cut = True
    candidate = run.agents[1]
    while candidate.link._candidacy is None:
        run.run(TICK_SECONDS)
    candidate.member.stop()
    run.run(2)
    coordinator = candidate.link.coordinator
    assert coordinator is not None
    assert coordinator.phase in (JobPhase.STOPPING, JobPhase.OVER)
    run.run(TAKEOVER_SECONDS)
    assert not any(agent.is_alive for agent in run.agents)


def test_coordinator_that_only_accepts_connections_is_lost() -> None:
    run = running_job()
    run.agents[0].is_frozen = True
    deadline = run.now + TAKEOVER_SECONDS
    while run.now < deadline:
        if 0 in run.agents[3].clients:
            run.agents[3].link.send_hello(0, run.now)
        run.run(1)
    assert run.agents[3].link.followed_host == 1


def test_candidate_that_was_paused_takes_over() -> None:
    run = running_job(4, 1)
    run.agents[0].has_power_cut = True
    candidate = run.agents[1]
    while candidate.link._candidacy is None:
        run.run(TICK_SECONDS)
    for agent in run.agents[1:]:  # a pause of all, as of a machine with several agents
        agent.inbox.clear()
    run.now += 3 * TIMEOUT_SECONDS
    run.run(TAKEOVER_SECONDS)
    assert run.coordinators == [1]


@pytest.mark.parametrize(
    ("hosts", "lost", "notifying"),
    [
        pytest.param(5, (0, 1, 2), [3], id="first-that-is-left"),
        pytest.param(2, (0,), [1], id="two-agents"),
        pytest.param(5, (0, 1, 2, 3), [], id="only-one-left"),
    ],
)
def test_first_remaining_host_notifies_of_the_end(
    hosts: int, lost: tuple[int, ...], notifying: list[int]
) -> None:
    run = running_job(hosts, 0, on_bad_host="shrink", min_nnodes=1)
    for number in lost:
        run.agents[number].has_power_cut = True
    run.run(6 * TIMEOUT_SECONDS)
    assert not any(agent.is_alive for agent in run.agents)
    assert [agent.number for agent in run.agents if agent.link.notices] == notifying


def test_host_that_is_cut_off_does_not_notify() -> None:
    run = running_job(5, 0, on_bad_host="shrink", min_nnodes=1)
    run.isolate(1)
    run.run(6 * TIMEOUT_SECONDS)
    assert run.coordinators == [0]
    assert not run.agents[1].is_alive
    assert not run.agents[1].link.notices


# -- whole runs -----------------------------------------------------------------------------------

STEPS = st.tuples(
    st.sampled_from([*OPERATIONS]), st.integers(0, 4), st.sets(st.integers(0, 4), min_size=1)
)


@settings(max_examples=300, deadline=None)
@given(st.integers(3, 5), st.lists(STEPS, min_size=10, max_size=40))
def test_no_accepted_state_is_forgotten(hosts: int, steps: list[tuple[str, int, set[int]]]) -> None:
    model = ElectionModel(hosts)
    for operation, actor, receivers in steps:
        model.perform(operation, actor, {number % hosts for number in receivers})


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
    orphans = [a for a in run.agents if a.has_ranks and a.link.followed_host not in followed]
    assert not orphans
