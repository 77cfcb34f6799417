"""Hosts that a run's job is on now: spares take the places of lost and of sick hosts.

The coordinator records the places (``places`` in its record of the job). The state of a run has all
of its hosts, spares last and without ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flagscale.launcher.failures import read_job_record
from flagscale.launcher.liveness.messages import HostStatus
from flagscale.launcher.state import HostState, RunState

_LEFT_STATUSES = (HostStatus.LOST, HostStatus.SICK)


class JobHosts(NamedTuple):
    """Hosts of a run by their part in the job."""

    members: tuple[HostState, ...]
    """Hosts with ranks, by node rank of the job."""
    replaced: dict[str, str]
    """Hosts that have left the job, with the names of the spares that took their places; empty if
    none did."""
    spares: tuple[HostState, ...]
    """Hosts that wait."""
    reasons: dict[str, str]
    """Hosts that have left the job because they are sick, with what is wrong with them."""


def name_hosts_of_ranks(state: RunState) -> dict[int, str]:
    """Return the names of the hosts on which ranks run, or ran at the end, by rank."""
    return {rank: host.name for host in find_job_hosts(state).members for rank in host.ranks}


def find_job_hosts(state: RunState) -> JobHosts:
    """Return the hosts of a run by their part in the job."""
    planned = [host for host in state.hosts if host.nproc]
    # Without spares, all hosts have ranks, or their numbers are not known.
    if len(planned) in (0, len(state.hosts)):
        return JobHosts(state.hosts, {}, (), {})
    by_number = {host.node_rank: host for host in state.hosts}
    record = read_job_record(state.hosts)
    places = record.get("places")
    if not isinstance(places, list) or not _are_valid(places, len(planned), by_number):
        places = [host.node_rank for host in planned]
    members = tuple(
        replace(by_number[number], first_rank=host.first_rank, nproc=host.nproc)
        for number, host in zip(places, planned, strict=True)
    )
    replaced = {
        host.name: member.name
        for host, member in zip(planned, members, strict=True)
        if member.name != host.name
    }
    in_job = {host.node_rank for host in members}
    statuses = record.get("hosts", {})
    for host in state.hosts:
        # A spare that was lost in its turn is no member any more, and waits for nothing.
        has_left = statuses.get(str(host.node_rank)) in _LEFT_STATUSES
        if has_left and host.node_rank not in in_job:
            replaced.setdefault(host.name, "")
    spares = tuple(
        host for host in state.hosts if host.node_rank not in in_job and host.name not in replaced
    )
    sick = record.get("sick", {})
    reasons = {
        host.name: str(sick[str(host.node_rank)])
        for host in state.hosts
        if isinstance(sick, dict) and str(host.node_rank) in sick
    }
    return JobHosts(members, replaced, spares, reasons)


def select_job_members(state: RunState) -> RunState:
    """Return the state with the hosts that have ranks alone, by node rank."""
    return replace(state, hosts=find_job_hosts(state).members)


def _are_valid(places: list[object], count: int, by_number: dict[int, HostState]) -> bool:
    are_numbers = all(type(number) is int and number in by_number for number in places)
    return are_numbers and len(places) == len(set(places)) == count
