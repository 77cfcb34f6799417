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
    """Data of a run at the time ``taken`` (Unix seconds).

    ``config`` is the YAML it was started from. ``trouble`` is the reason if its hosts could not be
    queried. ``told`` has the registered failures, with attempt numbers, if the run's files are
    gone.
    """

    state: RunState
    snapshot: Snapshot
    attempts: Sequence[Attempt]
    setting: RunSettings
    happened: Sequence[TimelineEvent]
    collected_at: float
    config: str = ""
    trouble: str = ""
    registered_failures: Sequence[tuple[int, str]] = ()

    @property
    def ended(self) -> float | None:
        return self.snapshot.since if self.snapshot.phase.ended else None


def collect_run(state: RunState) -> RunReport:
    """Collect the data of a run. Its hosts are queried unless it is known to have ended."""
    state, now, trouble = reload_state(state), time.time(), ""
    entry = runs.read_entry(state.run_id)
    ended = entry.ended if entry is not None else None
    if ended is not None:
        current = snapshot.take_snapshot(state, {})
        current = replace(current, phase=Phase(ended.phase), since=ended.since)
    else:
        try:
            current = runs.query_run(state)
        except FlagscaleError as error:
            trouble = error.message
            silent = {host.node_rank: HostObservation(trouble=trouble) for host in state.hosts}
            current = snapshot.take_snapshot(state, silent)
        # With a scheduler, hosts have names after they are allocated.
        state = reload_state(state)
    attempts = history.read_attempts(state, current.events)
    return RunReport(
        state=state,
        snapshot=replace(current, events={}),
        attempts=attempts,
        setting=setting.read_settings(state),
        happened=list_events(state, current, attempts),
        collected_at=now,
        config=entry.config if entry is not None else "",
        trouble=trouble,
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
    of_rank = {
        event.rank: str(event.get("device", ""))
        for attempt in run.attempts[-1:]
        for event in attempt.of("started")
    }
    devices = {}
    for host in run.state.hosts:
        kinds = Counter(of_rank[rank].partition(":")[0] for rank in host.ranks if rank in of_rank)
        devices[host.node_rank] = ", ".join(
            f"{count} x {kind}" for kind, count in kinds.items() if kind
        )
    return devices


def find_backend(run: RunReport) -> str:
    """Return the communication backend that the ranks joined through."""
    joined = (e for attempt in run.attempts[-1:] for e in attempt.of("joined"))
    return next((str(event.get("backend", "")) for event in joined), "")
