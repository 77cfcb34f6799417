"""Hosts of a run by their part in the job, and what commands show of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.launcher.failures import find_coordinator, read_job_record
from flagscale.launcher.job_hosts import find_job_hosts
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE, STATUS_DIRECTORY
from flagscale.launcher.log_query import select_hosts
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.snapshot import EventReader, HostObservation, Phase, take_snapshot
from flagscale.launcher.state import HostState, RunState
from flagscale.status import StatusWriter


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """A run on h0 and h1 with two ranks each, and the spares h2 and h3."""
    hosts = tuple(
        HostState(
            node_rank=number,
            name=f"h{number}",
            nproc=2 if number < 2 else 0,
            first_rank=2 * number,
            run_dir=tmp_path / f"h{number}",
            script=tmp_path / "s.sh",
            output=tmp_path / f"output{number}",
            pid_file=tmp_path / "pid",
        )
        for number in range(4)
    )
    for host in hosts:
        (host.run_dir / STATUS_DIRECTORY).mkdir(parents=True)
    return RunState(
        "r",
        name="n",
        exp_dir=tmp_path,
        started=0.0,
        world_size=4,
        external=False,
        stop_grace=1.0,
        runner=RunnerHandle("ssh"),
        hosts=hosts,
    )


def write_job(
    state: RunState, places: Any, replaced: Any = None, sick: Any = None, **statuses: str
) -> None:
    hosts = {name.removeprefix("h"): status for name, status in statuses.items()}
    record = {"phase": "running", "attempt": 2, "attempts": 2, "hosts": hosts, "places": places}
    record |= {"sick": sick} if sick is not None else {}
    record |= {"replaced": replaced} if replaced is not None else {}
    (state.hosts[0].run_dir / LIVENESS_FILE).write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("places", "successors", "statuses", "members", "replaced", "spares"),
    [
        pytest.param(None, None, {}, {"h0": 0, "h1": 2}, {}, ["h2", "h3"], id="no-record"),
        pytest.param([0, 1], {}, {}, {"h0": 0, "h1": 2}, {}, ["h2", "h3"], id="none-replaced"),
        pytest.param(
            [0, 2],
            {"1": 2},
            {"h1": "lost"},
            {"h0": 0, "h2": 2},
            {"h1": "h2"},
            ["h3"],
            id="replaced",
        ),
        pytest.param(
            [0, 3],
            {"1": 2, "2": 3},
            {"h1": "lost", "h2": "lost"},
            {"h0": 0, "h3": 2},
            {"h1": "h2", "h2": "h3"},
            [],
            id="spare-lost-in-its-turn",
        ),
        pytest.param(
            [0], {}, {"h1": "lost"}, {"h0": 0}, {"h1": ""}, ["h2", "h3"], id="fewer-hosts"
        ),
        pytest.param([0, 9], {}, {}, {"h0": 0, "h1": 2}, {}, ["h2", "h3"], id="damaged-number"),
        pytest.param("x", "x", {}, {"h0": 0, "h1": 2}, {}, ["h2", "h3"], id="damaged"),
    ],
)
def test_parts_of_hosts(
    state: RunState,
    places: Any,
    successors: Any,
    statuses: dict[str, str],
    members: dict[str, int],
    replaced: dict[str, str],
    spares: list[str],
) -> None:
    write_job(state, places, successors, **statuses)
    job_hosts = find_job_hosts(state)
    assert {host.name: host.first_rank for host in job_hosts.members} == members
    assert {host.nproc for host in job_hosts.members} == {2}
    assert job_hosts.replaced == replaced
    assert [host.name for host in job_hosts.spares] == spares


def test_hosts_with_an_unknown_number_of_ranks(state: RunState) -> None:
    plain = replace(state, hosts=state.hosts[:2])
    assert find_job_hosts(plain) == (plain.hosts, {}, (), {})
    unknown = replace(plain, hosts=tuple(replace(host, nproc=0) for host in plain.hosts))
    assert find_job_hosts(unknown).members == unknown.hosts


def test_snapshot_of_a_job_that_goes_on_without_a_host(state: RunState) -> None:
    smaller = replace(state, hosts=state.hosts[:2])
    write_job(smaller, [0], h1="lost")
    join(smaller, 0, (0, 1), "status.1")
    snapshot = take_snapshot(smaller, {0: HostObservation(alive="script")})
    assert (snapshot.phase, snapshot.joined, snapshot.world_size) == (Phase.RUNNING, 2, 2)
    assert [(row.host, row.trouble) for row in snapshot.hosts] == [("h0", ""), ("h1", "lost")]


def test_record_of_the_newest_coordinator_counts(state: RunState) -> None:
    hosts = tuple(
        replace(host, run_dir=host.run_dir.parent / f"host_{host.node_rank}_{host.name}" / "r")
        for host in state.hosts
    )
    for host in hosts:
        (host.run_dir / STATUS_DIRECTORY).mkdir(parents=True)
    state = replace(state, hosts=hosts)
    write_job(state, [0, 1])
    record = {"phase": "running", "term": 1, "coordinator": 1, "places": [2, 1]}
    record |= {"hosts": {"0": "lost"}, "replaced": {"0": 2}}
    (hosts[1].run_dir / LIVENESS_FILE).write_text(json.dumps(record))
    job_hosts = find_job_hosts(state)
    assert {host.name: host.first_rank for host in job_hosts.members} == {"h2": 0, "h1": 2}
    assert job_hosts.replaced == {"h0": "h2"}
    assert find_coordinator(job_hosts.members, read_job_record(job_hosts.members)).name == "h1"


def join(state: RunState, host: int, ranks: tuple[int, ...], directory: str) -> None:
    for rank in ranks:
        StatusWriter(state.hosts[host].run_dir / directory, rank).write("joined", backend="gloo")


def test_snapshot_counts_the_ranks_of_the_hosts_in_the_job(state: RunState) -> None:
    alive = HostObservation(alive="script")
    lost = HostObservation(trouble="no answer")
    observations = {0: alive, 1: alive, 2: alive, 3: alive}
    reader = EventReader(state.hosts)
    write_job(state, [0, 1])
    join(state, 0, (0, 1), "status")
    join(state, 1, (2, 3), "status")
    before = take_snapshot(state, observations, reader)
    assert (before.phase, before.joined) == (Phase.RUNNING, 4)
    assert [(row.host, row.doing) for row in before.hosts[2:]] == [
        ("h2", "waiting as a spare"),
        ("h3", "waiting as a spare"),
    ]
    write_job(state, [0, 2], {"1": 2}, h1="lost")
    join(state, 0, (0, 1), "status.1")
    observations[1] = lost
    during = take_snapshot(state, observations, reader)
    assert (during.phase, during.joined) == (Phase.STARTING, 2)
    join(state, 2, (2, 3), "status.1")
    after = take_snapshot(state, observations, reader)
    assert (after.phase, after.joined) == (Phase.RUNNING, 4)
    rows = {row.host: (row.phase, row.joined, row.trouble) for row in after.hosts}
    assert rows["h2"] == (Phase.RUNNING, 2, "")
    assert rows["h1"] == (Phase.LOST, 0, "lost; h2 has taken its place")


def test_sick_hosts_are_shown_with_the_reason(state: RunState) -> None:
    reasons = {"1": "sick: GPU 3: slow", "3": "sick: hot"}
    write_job(state, [0, 2], {"1": 2}, reasons, h1="sick", h3="sick")
    rows = {row.host: row.trouble for row in take_snapshot(state, {}).hosts}
    assert rows["h1"] == "sick: GPU 3: slow; h2 has taken its place"
    assert rows["h3"] == "sick: hot"
    assert find_job_hosts(state).spares == ()


def test_run_completes_without_the_replaced_host(state: RunState) -> None:
    write_job(state, [0, 2], {"1": 2}, h1="lost")
    for number, code in ((0, 0), (1, 1), (2, 0), (3, 0)):
        record = {"code": code, "phase": "job", "signal": None, "ended": 5.0}
        (state.hosts[number].run_dir / EXIT_FILE).write_text(json.dumps(record))
    snapshot = take_snapshot(state, {})
    assert (snapshot.phase, snapshot.exit_code) == (Phase.COMPLETED, 0)


def test_lines_of_a_rank_are_on_both_hosts(state: RunState) -> None:
    write_job(state, [0, 2], {"1": 2}, h1="lost")
    assert select_hosts(state, None, 3) == (1, 2)
    assert select_hosts(state, None, 1) == (0,)
