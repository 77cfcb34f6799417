"""Which rank failed first, and why: what a run's files tell the launcher.

While the agents live they agree on the first failure of all hosts, and each writes it down
(``liveness``). Where none could, the hosts' own files have to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.launch.files import read_json
from flagscale.launch.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launch.liveness.diagnosis import (
    End,
    Failure,
    Report,
    TableEntry,
    Weight,
    choose_rank,
    describe_code,
    first_of,
    host_report,
    last_lines,
    last_traceback,
    parse_table,
    rank_log,
    rank_logs,
    read_tail,
)
from flagscale.launch.state import HostState, RunState
from flagscale.status import Event

__all__ = [
    "Failure",
    "TableEntry",
    "choose_rank",
    "describe_code",
    "first_failure",
    "job_record",
    "last_lines",
    "last_traceback",
    "parse_table",
    "rank_log",
    "rank_logs",
    "read_tail",
]


def job_record(hosts: Sequence[HostState]) -> dict[str, Any]:
    """What the coordinator says of the job: ``phase``, ``attempt`` from 1, ``attempts``,
    ``failure``, ``hosts`` and ``restarts``; empty where it has not said anything yet."""
    return (hosts and read_json(hosts[0].run_dir / LIVENESS_FILE)) or {}


def first_failure(state: RunState, events: Mapping[int, Sequence[Event]]) -> Failure | None:
    """The first failure of a run's hosts; None while there is none.

    ``events`` are the ranks' status events, by rank.
    """
    reports = [r for host in state.hosts if (r := _host_report(host, events)) is not None]
    agreed = _agreed(state.hosts)
    if agreed is not None:
        # The same rank may have ended meanwhile: its own host knows its exit code. And the script
        # of a host that was lost may know what became of its agent.
        killed = [h.name for h in state.hosts if _exit_record(h.run_dir).get("phase") == "agent"]
        same = [
            r.failure
            for r in reports
            if (r.failure.host, r.failure.rank) == (agreed.host, agreed.rank)
            and (agreed.rank is not None or agreed.host in killed)
        ]
        return same[0] if same and agreed.exit_code is None else agreed
    first = first_of(reports)
    return first.failure if first is not None else None


def _agreed(hosts: Sequence[HostState]) -> Failure | None:
    """The verdict of all agents together: of host 0, which heard of all of them, or else what
    another one saw of its end."""
    ended = [_exit_record(host.run_dir) for host in hosts]
    live = [job_record(hosts)] if ended and not ended[0] else []
    # An agent that was killed is the cause of what the others saw, and its own file says so.
    if any(record.get("phase") in ("agent", "before_start") for record in ended):
        live, ended = [], ended[:1]
    return next((f for r in (*ended, *live) if (f := Failure.from_record(r.get("failure")))), None)


def _exit_record(run_dir: Path) -> dict[str, Any]:
    return read_json(run_dir / EXIT_FILE) or {}


def _host_report(host: HostState, events: Mapping[int, Sequence[Event]]) -> Report | None:
    """What failed first on one host, from its own files."""
    ended = host.exit()
    if ended is None:
        return host_report(host, events, None)
    failed = any(event.event == "failed" for rank in host.ranks for event in events.get(rank, ()))
    if ended.code == 0 or (ended.signal is not None and not failed):
        return None
    if ended.phase == "before_start":
        how = ended.how or f"failed with exit code {ended.code}"
        reason = f"before_start {how}; the job was not started"
        shown = last_lines(host.output)
        failure = Failure(host.name, None, ended.code, reason, shown, host.output)
        return Report(failure, ended.ended, Weight.KILLED)
    if ended.phase == "agent" and len(host.ranks) and not failed:
        what = describe_code(ended.code)
        reason = f"lost its agent, which ended with {what}; what it watched was ended too"
        failure = Failure(host.name, None, ended.code, reason, "", host.output)
        return Report(failure, ended.ended, Weight.KILLED)
    return host_report(host, events, End(ended.code, ended.ended, ended.out_of_memory_kills))
