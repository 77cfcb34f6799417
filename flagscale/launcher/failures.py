"""Which rank failed first, and why: what a run's files tell the launcher.

While the agents live they agree on the first failure of all hosts, and each writes it down
(``liveness``). Where none could, the hosts' own files have to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.files import read_json
from flagscale.launcher.layout import LIVENESS_FILE
from flagscale.launcher.liveness import diagnosis
from flagscale.launcher.liveness.diagnosis import Failure, Report, Severity
from flagscale.launcher.liveness.messages import OVER, JobPhase
from flagscale.launcher.state import Exit, HostState, RunState
from flagscale.records import from_record
from flagscale.status import Event

_WITHOUT_AGENT = ("agent", "before_start")
"""How a host has ended whose agent did not see its end."""


def job_record(hosts: Sequence[HostState]) -> dict[str, Any]:
    """What the coordinator says of the job: ``phase``, ``attempt`` from 1, ``attempts``,
    ``failure``, ``hosts`` and ``restarts``; empty where it has not said anything yet."""
    return (hosts and read_json(hosts[0].run_dir / LIVENESS_FILE)) or {}


def earlier_failures(hosts: Sequence[HostState]) -> tuple[tuple[int, Failure], ...]:
    """What the attempts failed by that were followed by another one, each with its number from
    1."""
    restarts = job_record(hosts).get("restarts", [])
    found = ((n, from_record(Failure, r.get("failure"))) for n, r in enumerate(restarts, 1))
    return tuple((attempt, failure) for attempt, failure in found if failure is not None)


def first_failure(state: RunState, events: Mapping[int, Sequence[Event]]) -> Failure | None:
    """The first failure of a run's hosts; None while there is none.

    ``events`` are the ranks' status events, by rank.
    """
    reports = [r for host in state.hosts if (r := _host_report(host, events)) is not None]
    agreed = _agreed(state.hosts)
    if agreed is not None:
        return _completed(agreed, reports, state.hosts)
    first = diagnosis.first_of(reports)
    return first.failure if first is not None else None


def _completed(agreed: Failure, reports: Sequence[Report], hosts: Sequence[HostState]) -> Failure:
    """The verdict of the agents, with what is known of the same failure since."""
    if agreed.exit_code is not None:
        return agreed
    same = (r.failure for r in reports if r.failure.host == agreed.host)
    if agreed.rank is None:
        # The script of a host that was lost may know what became of its agent.
        killed = [h.name for h in hosts if h.exit_record().get("phase") in _WITHOUT_AGENT]
        found = (f for f in same if f.rank is None and f.host in killed)
    else:
        # The same exception, with the exit code that its host has seen meanwhile. How the agents
        # ended a rank that held up the others says nothing of why.
        said = agreed.headline()
        found = (f for f in same if f.rank == agreed.rank and f.headline().startswith(said))
    return next(found, agreed)


def job_code(state: RunState, exits: Sequence[Exit | None], failure: Failure | None) -> int | None:
    """The job's exit code, as far as it is known: of the host that failed first, else of the first
    that ended with one that isn't 0. The others were told to end, and may have done so sooner.
    None while no host has ended."""
    first = failure.host if failure is not None else None
    pairs = zip(state.hosts, exits, strict=True)
    ends = [(host.name != first, end.ended, end.code) for host, end in pairs if end is not None]
    return next((code for *_, code in sorted(ends) if code), 0) if ends else None


def is_settled(hosts: Sequence[HostState]) -> bool:
    """Whether the agents have agreed on the first failure. Before, as long as they live, another
    host's report may name a rank that failed earlier: one that was killed says nothing itself,
    and the exceptions of those that lost it are heard of first."""
    if not hosts or hosts[0].exit_record():
        return True
    job = job_record(hosts)
    phase = job.get("phase", JobPhase.RUNNING)
    if phase != JobPhase.RUNNING:
        return bool(phase != JobPhase.ENDING)
    # Where a failed job is left alone, others may live on for long: how the host that the failure
    # is of has ended is enough.
    failure = from_record(Failure, job.get("failure"))
    states = job.get("hosts", {})
    return failure is not None and any(
        states.get(str(host.node_rank)) in OVER for host in hosts if host.name == failure.host
    )


def _agreed(hosts: Sequence[HostState]) -> Failure | None:
    """The verdict of all agents together: of host 0, which heard of all of them, or else what
    another one saw of its end."""
    ended = [host.exit_record() for host in hosts]
    live = [job_record(hosts)] if ended and not ended[0] else []
    # An agent that was killed is the cause of what the others saw, and its own file says so.
    if any(record.get("phase") in _WITHOUT_AGENT for record in ended):
        live, ended = [], ended[:1]
    return next((f for r in (*ended, *live) if (f := from_record(Failure, r.get("failure")))), None)


def _host_report(host: HostState, events: Mapping[int, Sequence[Event]]) -> Report | None:
    """What failed first on one host, from its own files."""
    ended = host.exit()
    if ended is None:
        return diagnosis.host_report(host, events, None)
    failed = any(event.event == "failed" for rank in host.ranks for event in events.get(rank, ()))
    if ended.code == 0 or (ended.signal is not None and not failed):
        return None
    if ended.phase == "before_start":
        how = ended.how or f"failed with exit code {ended.code}"
        reason = f"before_start {how}; the job was not started"
        shown = diagnosis.last_lines(host.output)
    elif ended.phase == "agent" and len(host.ranks) and not failed:
        what = diagnosis.describe_code(ended.code)
        reason = f"lost its agent, which ended with {what}; what it watched was ended too"
        shown = ""
    else:
        end = diagnosis.End(ended.code, ended.ended, ended.out_of_memory_kills)
        return diagnosis.host_report(host, events, end)
    failure = Failure(host.name, None, ended.code, reason, shown, host.output)
    return Report(failure, ended.ended, Severity.KILLED)
