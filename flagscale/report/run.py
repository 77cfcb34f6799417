"""Data of a run for its page, collected once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flagscale.errors import FlagscaleError
from flagscale.files import read_json
from flagscale.launcher import runs, snapshot
from flagscale.launcher.launch_record import LaunchRecord, read_launch_record
from flagscale.launcher.layout import Layout
from flagscale.launcher.snapshot import HostObservation, Phase, Snapshot
from flagscale.launcher.state import RunState, reload_state
from flagscale.report import history, setting
from flagscale.report.history import Attempt
from flagscale.report.record import RunRecord, collect_record
from flagscale.report.setting import RunSettings
from flagscale.report.timeline import TimelineEvent, list_events

CONTAINER_IMAGE = "experiment.runner.slurm.container.image"
"""Key of the configuration that names a container's image."""


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
    launch: LaunchRecord | None = None
    """Record of the start; None for a run of an older version."""
    record: RunRecord = field(default_factory=RunRecord)
    runs: Sequence[RunReport] = ()
    """All runs of the directory, oldest first, if this is their story (:mod:`.story`)."""
    label: str = ""
    """Name on a page with others; by default the name of the experiment."""

    @property
    def end_time(self) -> float | None:
        """Time at which the run ended, in Unix seconds; None while it runs."""
        return self.snapshot.since if self.snapshot.phase.ended else None


def collect_run(state: RunState) -> RunReport:
    """Collect the data of a run.

    Its hosts are queried unless it is known to have ended: its end is registered, or another run
    was started in its directory since.
    """
    state, now, query_error = reload_state(state), time.time(), ""
    layout = Layout(state.exp_dir)
    entry = runs.read_entry(state.run_id)
    ended = entry.ended if entry is not None else None
    if ended is not None:
        current = snapshot.take_snapshot(state, {})
        current = replace(current, phase=Phase(ended.phase), since=ended.since)
    elif (read_json(layout.state) or {}).get("run_id", state.run_id) != state.run_id:
        current = snapshot.take_snapshot(state, {})
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
    launch = read_launch_record(layout, state.run_id)
    settings = setting.read_settings(state)
    image = settings.options.get(CONTAINER_IMAGE, "")
    return RunReport(
        state=state,
        snapshot=replace(current, events={}),
        attempts=attempts,
        settings=settings,
        timeline=list_events(state, current, attempts),
        collected_at=now,
        config=entry.config if entry is not None else "",
        query_error=query_error,
        registered_failures=ended.failures if ended is not None else (),
        launch=launch,
        record=collect_record(state, launch, attempts, image),
    )


def make_labels(run_reports: Sequence[RunReport]) -> list[str]:
    """Return a distinct label for each run."""
    labels = [run.label or run.state.name for run in run_reports]
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{label} {_distinct_name(run)}"
        for label, run in zip(labels, run_reports, strict=True)
    ]


def _distinct_name(run: RunReport) -> str:
    return str(run.state.exp_dir) if run.runs else run.state.run_id


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
