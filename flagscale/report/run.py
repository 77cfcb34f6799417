"""Data of a run for its page, collected once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flagscale.errors import FlagscaleError
from flagscale.launcher import runs, snapshot
from flagscale.launcher.snapshot import HostObservation, Phase, Snapshot
from flagscale.launcher.state import RunState, reload_state
from flagscale.report import history, setting
from flagscale.report.history import Attempt
from flagscale.report.setting import RunSettings
from flagscale.report.timeline import TimelineEvent, list_events


@dataclass(frozen=True)
class RunReport:
    """Data of a run at the time ``collected_at`` (Unix seconds).

    ``config`` is the YAML it was started from. ``query_error`` is the reason if its hosts could not
    be queried. ``registered_failures`` has the failures in the registry of runs, with attempt
    numbers, if the run's files no longer exist.
    """

    state: RunState
    snapshot: Snapshot
    attempts: Sequence[Attempt]
    settings: RunSettings
    timeline: Sequence[TimelineEvent]
    collected_at: float
    config: str = ""
    query_error: str = ""
    registered_failures: Sequence[tuple[int, str]] = ()

    @property
    def end_time(self) -> float | None:
        """Time at which the run ended, in Unix seconds; None while it runs."""
        return self.snapshot.since if self.snapshot.phase.ended else None


def collect_run(state: RunState) -> RunReport:
    """Collect the data of a run. Its hosts are queried unless it is known to have ended."""
    state, now, query_error = reload_state(state), time.time(), ""
    entry = runs.read_entry(state.run_id)
    ended = entry.ended if entry is not None else None
    if ended is not None:
        current = snapshot.take_snapshot(state, {})
        current = replace(current, phase=Phase(ended.phase), since=ended.since)
    else:
        try:
            current = runs.query_run(state)
        except FlagscaleError as error:
            query_error = error.message
            unreachable_hosts = {
                host.node_rank: HostObservation(trouble=query_error) for host in state.hosts
            }
            current = snapshot.take_snapshot(state, unreachable_hosts)
        # With a scheduler, hosts have names after they are allocated.
        state = reload_state(state)
    attempts = history.read_attempts(state, current.events)
    return RunReport(
        state=state,
        snapshot=replace(current, events={}),
        attempts=attempts,
        settings=setting.read_settings(state),
        timeline=list_events(state, current, attempts),
        collected_at=now,
        config=entry.config if entry is not None else "",
        query_error=query_error,
        registered_failures=ended.failures if ended is not None else (),
    )


def make_labels(run_reports: Sequence[RunReport]) -> list[str]:
    """Return a distinct label for each run."""
    names = Counter(run.state.name for run in run_reports)
    return [
        run.state.name if names[run.state.name] == 1 else f"{run.state.name} {run.state.run_id}"
        for run in run_reports
    ]


def list_devices(run: RunReport) -> Mapping[int, str]:
    """Return the devices of each host by node rank, as reported in the last attempt."""
    device_by_rank = {
        event.rank: str(event.get("device", ""))
        for attempt in run.attempts[-1:]
        for event in attempt.events_of_kind("started")
    }
    devices = {}
    for host in run.state.hosts:
        kinds = Counter(
            device_by_rank[rank].partition(":")[0] for rank in host.ranks if rank in device_by_rank
        )
        devices[host.node_rank] = ", ".join(
            f"{count} x {kind}" for kind, count in kinds.items() if kind
        )
    return devices


def find_backend(run: RunReport) -> str:
    """Return the communication backend of the last attempt; empty if no rank reported one."""
    joined = (e for attempt in run.attempts[-1:] for e in attempt.events_of_kind("joined"))
    return next((str(event.get("backend", "")) for event in joined), "")
