"""Hosts that a run's job is on now: spares take the places of hosts that leave it, or nobody does.

The coordinator records the places (``places`` in its record of the job). The state of a run has all
of its hosts, spares last and without ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flagscale.launcher.failures import read_job_record
from flagscale.launcher.liveness.messages import HostStatus
from flagscale.launcher.state import HostState, RunState

_LEFT = (HostStatus.LOST, HostStatus.SICK)


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
    if not planned:  # the numbers of ranks are not known
        return JobHosts(state.hosts, {}, (), {})
    by_number = {host.node_rank: host for host in state.hosts}
    record = read_job_record(state.hosts)
    places = record.get("places")
    if places is None and len(planned) == len(state.hosts):  # no host can be replaced
        return JobHosts(state.hosts, {}, (), {})
    if not isinstance(places, list) or not _are_valid(places, len(planned), by_number):
        places = [host.node_rank for host in planned]
    # A job that goes on without a host has fewer places than planned.
    members = tuple(
        replace(by_number[number], first_rank=host.first_rank, nproc=host.nproc)
        for number, host in zip(places, planned, strict=False)
    )
    statuses, successors = _read_section(record, "hosts"), _read_section(record, "replaced")
    names, in_job = {host.node_rank: host.name for host in state.hosts}, set(places)
    replaced = {
        host.name: names.get(successors.get(str(host.node_rank), -1), "")
        for host in state.hosts
        if host.node_rank not in in_job
        and (str(host.node_rank) in successors or statuses.get(str(host.node_rank)) in _LEFT)
    }
    spares = tuple(
        host for host in state.hosts if host.node_rank not in in_job and host.name not in replaced
    )
    sick = _read_section(record, "sick")
    reasons = {
        host.name: str(sick[str(host.node_rank)])
        for host in state.hosts
        if str(host.node_rank) in sick
    }
    return JobHosts(members, replaced, spares, reasons)


def select_job_members(state: RunState) -> RunState:
    """Return the state with the hosts that have ranks alone, by node rank, and with their ranks."""
    return with_members(state, find_job_hosts(state))


def with_members(state: RunState, job_hosts: JobHosts) -> RunState:
    """Return the state with the hosts of the job that have ranks, and with their ranks."""
    members = job_hosts.members
    count = sum(host.nproc for host in members)
    return replace(state, hosts=members, world_size=count or state.world_size)


def _read_section(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def _are_valid(places: list[object], count: int, by_number: dict[int, HostState]) -> bool:
    are_numbers = all(type(number) is int and number in by_number for number in places)
    return are_numbers and 0 < len(places) == len(set(places)) <= count
