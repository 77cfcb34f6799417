"""First failure of a run, derived from the files of the run.

Used by snapshots (``query``), by waiting for a start and by the exit code of a foreground run.
While the agents are alive, they agree on the first failure of all hosts, and each of them records
it (``liveness``). If no agent recorded one, the files of each host are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flagscale.launcher.liveness import diagnosis
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.job_record import read_newest_job_record
from flagscale.launcher.liveness.messages import FINAL_STATUSES, JobPhase
from flagscale.launcher.state import Exit, HostState, RunState
from flagscale.records import from_record
from flagscale.status import Event

_WITHOUT_AGENT = ("agent", "before_start")
"""Phases of a host's end that its agent did not record."""


def read_job_record(hosts: Sequence[HostState]) -> dict[str, Any]:
    """Return the coordinator's record of the job, or {}.

    It has ``phase``, ``attempt`` from 1, ``attempts``, ``failure``, ``early_exit``, ``hosts`` and
    ``restarts``.
    """
    return read_newest_job_record(hosts[0].run_dir) if hosts else {}


def find_coordinator(hosts: Sequence[HostState], job_record: Mapping[str, Any]) -> HostState:
    """Return the host that coordinates the job, or the first of these if it is not among them."""
    number = job_record.get("coordinator", 0)
    return next((host for host in hosts if host.node_rank == number), hosts[0])


def list_earlier_failures(hosts: Sequence[HostState]) -> tuple[tuple[int, Failure], ...]:
    """Return number (from 1) and failure of each attempt that was followed by another one."""
    restarts = read_job_record(hosts).get("restarts", [])
    numbers = (r.get("attempt", n) + 1 for n, r in enumerate(restarts))
    records = (from_record(Failure, r.get("failure")) for r in restarts)
    failures = zip(numbers, records, strict=True)
    return tuple((attempt, failure) for attempt, failure in failures if failure is not None)


def find_first_failure(state: RunState, events: Mapping[int, Sequence[Event]]) -> Failure | None:
    """Return the first failure of a run's hosts, or None. ``events`` are status events by rank."""
    reports = [r for host in state.hosts if (r := _diagnose_host(host, events)) is not None]
    agreed_failure = _read_agreed_failure(state.hosts)
    if agreed_failure is not None:
        return _add_later_information(agreed_failure, reports, state.hosts)
    first = diagnosis.find_cause(reports)
    return first.failure if first is not None else None


def _add_later_information(
    agreed_failure: Failure, reports: Sequence[FailureReport], hosts: Sequence[HostState]
) -> Failure:
    """Complete the failure that the agents agreed on with later information about it."""
    if agreed_failure.exit_code is not None:
        return agreed_failure
    failures = (r.failure for r in reports if r.failure.host == agreed_failure.host)
    if agreed_failure.rank is None:
        # The script of a lost host may have recorded the end of its agent.
        killed = [h.name for h in hosts if h.exit_record().get("phase") in _WITHOUT_AGENT]
        matches = (f for f in failures if f.rank is None and f.host in killed)
    else:
        # The same exception, with the exit code that its host has recorded meanwhile. The way in
        # which the agents ended a rank that blocked the others does not explain the failure.
        headline = agreed_failure.headline()
        matches = (
            replace(f, reason=_add_missing_lines(f.reason, agreed_failure.reason))
            for f in failures
            if f.rank == agreed_failure.rank and f.headline().startswith(headline)
        )
    return next(matches, agreed_failure)


def _add_missing_lines(reason: str, agreed_reason: str) -> str:
    """Return a reason with the lines below the first one that only the agents' reason has."""
    lines = reason.splitlines()
    lines += [line for line in agreed_reason.splitlines()[1:] if line not in lines]
    return "\n".join(lines)


def compute_job_code(
    state: RunState, exits: Sequence[Exit | None], failure: Failure | None
) -> int | None:
    """Return the job's exit code, or None while no host has ended.

    It is the code of the host that failed first, otherwise the first code that is not 0. The other
    hosts were ended as a consequence, possibly earlier.
    """
    failed_host = failure.host if failure is not None else None
    pairs = zip(state.hosts, exits, strict=True)
    exit_codes = [
        (host.name != failed_host, end.ended, end.code) for host, end in pairs if end is not None
    ]
    return next((code for *_, code in sorted(exit_codes) if code), 0) if exit_codes else None


def is_settled(hosts: Sequence[HostState]) -> bool:
    """Return whether the agents have agreed on the first failure.

    Until then, another host's report may name a rank that failed earlier: a killed rank reports
    nothing itself, so exceptions of the ranks that lost it arrive first.
    """
    if not hosts:
        return True
    job = read_job_record(hosts)
    if find_coordinator(hosts, job).exit_record():
        return True
    phase = job.get("phase", JobPhase.RUNNING)
    if phase != JobPhase.RUNNING:
        return bool(phase != JobPhase.ENDING)
    # With on_failure: leave, other hosts may live on for long. It is enough that the failed host
    # has ended.
    failure = from_record(Failure, job.get("failure"))
    states = job.get("hosts", {})
    return failure is not None and any(
        states.get(str(host.node_rank)) in FINAL_STATUSES
        for host in hosts
        if host.name == failure.host
    )


def _read_agreed_failure(hosts: Sequence[HostState]) -> Failure | None:
    """Return the failure that all agents agreed on: from the coordinator's record, otherwise from
    another host's.
    """
    if not hosts:
        return None
    job = read_job_record(hosts)
    coordinator = find_coordinator(hosts, job)
    exit_records = [h.exit_record() for h in sorted(hosts, key=lambda h: h is not coordinator)]
    live_records = [job] if not exit_records[0] else []
    # A killed agent is the cause of the other hosts' observations, and its own file records it.
    if any(record.get("phase") in _WITHOUT_AGENT for record in exit_records):
        live_records, exit_records = [], exit_records[:1]
    return next(
        (
            f
            for r in (*exit_records, *live_records)
            if (f := from_record(Failure, r.get("failure")))
        ),
        None,
    )


def _diagnose_host(host: HostState, events: Mapping[int, Sequence[Event]]) -> FailureReport | None:
    """Return the first failure on one host, from its own files."""
    ended = host.exit()
    if ended is None:
        return diagnosis.diagnose_host(host, events, None)
    failed = any(event.event == "failed" for rank in host.ranks for event in events.get(rank, ()))
    if ended.code == 0 or (ended.signal is not None and not failed):
        return None
    if ended.phase == "before_start":
        description = ended.how or f"failed with exit code {ended.code}"
        reason = f"before_start {description}; the job was not started"
        output = diagnosis.last_lines(host.output)
    elif ended.phase == "agent" and len(host.ranks) and not failed:
        end_description = diagnosis.describe_code(ended.code)
        reason = (
            f"lost its agent, which ended with {end_description}; the processes that it supervised "
            "were ended too"
        )
        output = ""
    else:
        end = diagnosis.TorchrunExit(ended.code, ended.ended, ended.out_of_memory_kills)
        return diagnosis.diagnose_host(host, events, end)
    failure = Failure(
        host.name, rank=None, exit_code=ended.code, reason=reason, traceback=output, log=host.output
    )
    return FailureReport(failure, ended.ended, FailureKind.PROCESS_KILLED)
