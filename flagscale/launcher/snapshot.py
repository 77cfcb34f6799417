"""Snapshot of a run for ``query``: from its state, its processes and the events of its ranks.

Runners collect a :class:`HostObservation` per host and call :func:`take_snapshot`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from flagscale.files import to_plain
from flagscale.launcher import failures
from flagscale.launcher.job_hosts import JobHosts, find_job_hosts, with_members
from flagscale.launcher.layout import latest_status_directory
from flagscale.launcher.liveness.diagnosis import Failure, last_lines
from flagscale.launcher.state import Exit, HostState, RunState
from flagscale.status import Event, list_status_files, read_events, read_progress

_SPEED_EVENTS = 20
_UNSETTLED = "the hosts are still determining the first failure"


class Phase(str, Enum):
    """Phase of a run."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    UNREACHABLE = "unreachable"

    @property
    def ended(self) -> bool:
        return self not in (Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.UNREACHABLE)


@dataclass(frozen=True)
class HostObservation:
    """Observation of one host.

    ``alive`` is not empty if any process of the run is alive, and is ``script`` if the host's
    script is. ``trouble`` is the reason if the host could not be observed. ``last_line`` is the
    last line of output, if requested. ``waits`` is the reason why a scheduler has not allocated the
    host yet.
    """

    alive: str = ""
    last_line: str = ""
    trouble: str = ""
    waits: str = ""


@dataclass(frozen=True)
class HostRow:
    """Row of one host in a snapshot. ``step`` and ``doing`` belong to its slowest rank."""

    host: str
    phase: Phase
    ranks: int
    joined: int
    step: int | None = None
    doing: str = ""
    trouble: str = ""
    """Reason why the host could not be queried."""
    last_line: str = ""
    waits: str = ""
    """Reason why a scheduler has not allocated the host yet."""

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        del record["phase"]
        return {"host": self.host, "state": self.phase.value, **record}


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment.

    ``since`` is the time at which it entered its phase, in Unix seconds. Unknown values are None.
    ``eta_seconds`` exists if the run reports its progress and has a length.
    """

    run_id: str
    name: str
    phase: Phase
    since: float
    world_size: int
    joined: int
    job: str = ""
    """Id of the scheduler's job, if there is one."""
    exit_code: int | None = None
    step: int | None = None
    train_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    """Last validation loss; the mean over the validation sets, if there are several."""
    task_scores: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation on tasks (``eval_tasks``), by name."""
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    memory_gib: float | None = None
    eta_seconds: float | None = None
    best_step: int | None = None
    """Step of the best checkpoint (``save_best``), ``best_loss`` its validation loss, or
    ``best_metric`` and ``best_value`` the metric that was evaluated instead, and
    ``best_checkpoint`` its directory."""
    best_loss: float | None = None
    best_metric: str | None = None
    best_value: float | None = None
    best_checkpoint: str | None = None
    end_detail: str | None = None
    """Reason why training completed before its last step."""
    failure: Failure | None = None
    """First failure. Until the agents have agreed on it, reports of ranks are among the warnings.
    """
    hosts: tuple[HostRow, ...] = ()
    warnings: tuple[str, ...] = ()
    attempt: int = 1
    """Number of this start of the job, from 1; there may be ``attempts``."""
    attempts: int = 1
    earlier: tuple[tuple[int, Failure], ...] = ()
    """Number and failure of each earlier attempt."""
    events: Mapping[int, Sequence[Event]] = field(default_factory=dict, repr=False)
    """Events that the ranks of this attempt have reported; not part of the output."""

    def format_steps(self) -> str:
        """Format the progress as ``7/100``; empty if unknown."""
        if self.step is None:
            return ""
        return f"{self.step}/{self.train_steps}" if self.train_steps else str(self.step)

    def to_json(self) -> dict[str, Any]:
        record = asdict(replace(self, events={}))
        del record["phase"], record["events"]
        record = {"state": self.phase.value, **record}
        record["since"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.since))
        record["hosts"] = [row.to_json() for row in self.hosts]
        if self.failure is not None:
            record["failure"]["log"] = str(self.failure.log)
        record["earlier"] = [{"attempt": n, **to_plain(f)} for n, f in self.earlier]
        return record


class EventReader:
    """Reader of the ranks' events, which continues where the last call ended."""

    def __init__(self, hosts: Sequence[HostState]) -> None:
        self._hosts = hosts
        self._offsets: dict[Path, int] = {}
        self._directories: dict[int, Path] = {}
        self.events: dict[int, list[Event]] = {}

    def follow(self, hosts: Sequence[HostState]) -> None:
        """Read the ranks of these hosts from now on: a spare may have replaced one."""
        if [host.run_dir for host in hosts] != [host.run_dir for host in self._hosts]:
            self._hosts, self._offsets, self._directories, self.events = hosts, {}, {}, {}

    def refresh(self) -> dict[int, list[Event]]:
        """Return all events of the ranks in the latest attempt."""
        for host in self._hosts:
            directory = latest_status_directory(host.run_dir)
            if self._directories.setdefault(host.node_rank, directory) != directory:
                self._directories[host.node_rank] = directory
                for rank in host.ranks:
                    self.events.pop(rank, None)
            for path in list_status_files(directory):
                new_events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
                if new_events:
                    self.events.setdefault(new_events[0].rank, []).extend(new_events)
        return self.events

    def attempts(self) -> set[int]:
        """Return the attempts, from 1, of the events; hosts begin an attempt in turn."""
        numbers = (directory.suffix[1:] for directory in self._directories.values())
        return {int(number or 0) + 1 for number in numbers}

    def ranks_with(self, event: str) -> set[int]:
        """Return the ranks that have reported this event."""
        return {
            rank for rank, rows in self.events.items() if any(row.event == event for row in rows)
        }


def take_snapshot(
    state: RunState,
    observations: Mapping[int, HostObservation],
    reader: EventReader | None = None,
    *,
    with_lines: bool = False,
) -> Snapshot:
    """Take a snapshot of a run.

    Args:
        state: State of the run.
        observations: Observations of hosts by node rank.
        reader: Reader of the ranks' events, to continue an earlier one.
        with_lines: Whether to include the last line of each host's output.
    """
    job_hosts = find_job_hosts(state)
    run, state = state, with_members(state, job_hosts)
    reader = reader or EventReader(state.hosts)
    reader.follow(state.hosts)
    # Exits are read first: a run that ends in between appears alive once more, never lost.
    exits = [host.exit() for host in state.hosts]
    events = reader.refresh()
    joined = reader.ranks_with("joined")
    all_joined = (state.external and not events) or len(joined) >= state.world_size
    rows = []
    for host, ended in zip(state.hosts, exits, strict=True):
        observation = observations.get(host.node_rank, HostObservation())
        # An earlier exit of a host that waits again belongs to a start that no longer counts.
        phase = (
            Phase.PENDING
            if observation.waits
            else _host_phase(state, ended, all_joined, observation)
        )
        rows.append(_host_row(host, phase, observation, joined, with_lines))
    phase = _run_phase([row.phase for row in rows])
    rows += _rows_beside_job(run, job_hosts, observations, phase)
    # The agents that will agree on the first failure are alive, because the script of the
    # coordinating host reports the end of its agent. This is checked before the verdict is read,
    # which may become final in between.
    coordinator = failures.read_job_record(run.hosts).get("coordinator", 0)
    observation = observations.get(coordinator, HostObservation())
    agents_can_agree = phase is Phase.RUNNING and observation.alive == "script"
    is_unsettled = agents_can_agree and not failures.is_settled(state.hosts)
    may_have_failed = phase in (Phase.FAILED, Phase.RUNNING)
    failure = failures.find_first_failure(state, events) if may_have_failed else None
    warnings = _collect_warnings(events)
    warnings += _list_stragglers(events)
    if failure is not None and is_unsettled:
        warnings.append(f"{failure.headline()}; {_UNSETTLED}")
        failure = None
    job_record = failures.read_job_record(state.hosts)
    if not phase.ended and job_record.get("early_exit"):
        warnings.append(str(job_record["early_exit"]))
    if not phase.ended and job_record.get("hang"):
        warnings.append(str(job_record["hang"]))
    return Snapshot(
        run_id=state.run_id,
        name=state.name,
        phase=phase,
        since=_phase_start(state, phase, events, exits),
        world_size=state.world_size,
        joined=len(joined),
        job=state.job,
        exit_code=failures.compute_job_code(state, exits, failure),
        failure=failure,
        hosts=tuple(rows),
        warnings=tuple(warnings),
        attempt=int(job_record.get("attempt", 1)),
        attempts=int(job_record.get("attempts", 1)),
        earlier=failures.list_earlier_failures(state.hosts),
        events=events,
        **_training_metrics(events, phase),
        **_best_checkpoint(events),
        end_detail=_end_detail(events),
    )


def _rows_beside_job(
    state: RunState,
    job_hosts: JobHosts,
    observations: Mapping[int, HostObservation],
    job_phase: Phase,
) -> Iterator[HostRow]:
    """Yield the rows of spares and of replaced hosts, which the run's own phase does not show."""
    for host in job_hosts.spares:
        observation = observations.get(host.node_rank, HostObservation())
        ended = host.exit()
        phase = job_phase if ended is not None or observation.alive else Phase.LOST
        doing = "waiting as a spare" if not job_phase.ended else ""
        yield HostRow(host.name, phase, 0, 0, doing=doing, trouble=observation.trouble)
    for host in state.hosts:
        if host.name in job_hosts.replaced:
            spare = job_hosts.replaced[host.name]
            trouble = job_hosts.reasons.get(host.name, "lost")
            trouble += f"; {spare} has taken its place" if spare else ""
            yield HostRow(host.name, Phase.LOST, 0, 0, trouble=trouble)


def _host_row(
    host: HostState, phase: Phase, observation: HostObservation, joined: set[int], with_line: bool
) -> HostRow:
    status = latest_status_directory(host.run_dir)
    slowest = min(filter(None, (read_progress(status, rank) for rank in host.ranks)), default=None)
    return HostRow(
        host=host.name,
        phase=phase,
        ranks=host.nproc,
        joined=len(joined.intersection(host.ranks)),
        step=slowest.step if slowest else None,
        doing=slowest.doing if slowest else "",
        trouble=observation.trouble,
        last_line=observation.last_line or (_last_line(host) if with_line else ""),
        waits=observation.waits,
    )


def _last_line(host: HostState) -> str:
    return next(filter(str.strip, reversed(last_lines(host.output).splitlines())), "")


def _host_phase(
    state: RunState, ended: Exit | None, all_joined: bool, observation: HostObservation
) -> Phase:
    if ended is not None:
        if ended.signal is not None and ended.phase == "job":
            return Phase.STOPPED
        if ended.code and state.stop_requested is not None:
            # A host that was cut off when the others were stopped ends because it has lost them.
            ended_by_stop = ended.lost_peer and ended.ended >= state.stop_requested
            if not ended.failed or ended_by_stop:
                return Phase.STOPPED
        return Phase.FAILED if ended.code else Phase.COMPLETED
    if observation.trouble:
        return Phase.UNREACHABLE
    if observation.alive:
        return Phase.RUNNING if all_joined else Phase.STARTING
    return Phase.STOPPED if state.stop_requested is not None else Phase.LOST


def _run_phase(phases: Sequence[Phase]) -> Phase:
    """Return the phase of a run: that of its worst host."""
    order = (
        *(Phase.FAILED, Phase.LOST, Phase.UNREACHABLE),
        *(Phase.STOPPED, Phase.PENDING, Phase.STARTING, Phase.RUNNING),
    )
    return next((phase for phase in order if phase in phases), Phase.COMPLETED)


def _phase_start(
    state: RunState,
    phase: Phase,
    events: Mapping[int, Sequence[Event]],
    exits: Sequence[Exit | None],
) -> float:
    if phase is Phase.RUNNING:
        joined = (row.time for rows in events.values() for row in rows if row.event == "joined")
        return max(joined, default=state.started)
    if phase.ended:
        ends = (end.ended for end in exits if end is not None)
        return max(ends, default=state.stop_requested or state.started)
    return state.started


def _training_metrics(events: dict[int, list[Event]], phase: Phase) -> dict[str, Any]:
    """Return the latest training metrics, and the remaining time at the recent speed."""
    rows = _sorted_events(events, "progress")
    metrics: dict[str, Any] = {
        "validation_loss": _validation_loss(events),
        "task_scores": _task_scores(events),
    }
    if not rows:
        return metrics
    latest = rows[-1]
    step, train_steps = latest.get_number("step"), latest.get_number("train_steps")
    metrics |= {"step": step, "train_steps": train_steps}
    metrics |= {
        name: latest.get_number(name)
        for name in ("loss", "tokens_per_second", "tokens_per_second_per_gpu", "memory_gib")
    }
    recent = rows[-_SPEED_EVENTS:]
    steps = (step or 0) - (recent[0].get_number("step") or 0)
    if phase is Phase.RUNNING and train_steps and step and steps > 0:
        seconds_per_step = (latest.time - recent[0].time) / steps
        metrics["eta_seconds"] = round(seconds_per_step * max(0, train_steps - step), 1)
    return metrics


def _validation_loss(events: dict[int, list[Event]]) -> float | None:
    """Return the last validation loss: the mean over the sets of the last evaluation."""
    rows = _sorted_events(events, "evaluation")
    steps = (row.get_number("step") for row in rows)
    last_step = max((step for step in steps if step is not None), default=None)
    losses = [
        loss
        for row in rows
        if row.get_number("step") == last_step and (loss := row.get_number("loss")) is not None
    ]
    return sum(losses) / len(losses) if losses else None


def _task_scores(events: dict[int, list[Event]]) -> dict[str, float]:
    """Return the scores of the last evaluation on tasks."""
    rows = _sorted_events(events, "tasks")
    return rows[-1].get_numbers("scores") if rows else {}


def _best_checkpoint(events: dict[int, list[Event]]) -> dict[str, Any]:
    """Return the fields of the last checkpoint that was reported as the best one."""
    checkpoints = [row for row in _sorted_events(events, "checkpoint") if row.get("best")]
    if not checkpoints:
        return {}
    best = checkpoints[-1]
    return {
        "best_step": best.get_number("step"),
        "best_loss": best.get_number("valid_loss"),
        "best_metric": best.get("best_metric"),
        "best_value": best.get_number("best_value"),
        "best_checkpoint": None if best.get("path") is None else str(best.get("path")),
    }


def _end_detail(events: dict[int, list[Event]]) -> str | None:
    details = [row.get("detail") for row in _sorted_events(events, "finished")]
    return next((str(detail) for detail in details if detail), None)


def _sorted_events(events: dict[int, list[Event]], event: str) -> list[Event]:
    """Return the events of a type from all ranks, oldest first."""
    rows = [row for rows in events.values() for row in rows if row.event == event]
    return sorted(rows, key=lambda row: row.time)


def _list_stragglers(events: dict[int, list[Event]]) -> list[str]:
    """Return the sentences about the current stragglers."""
    rows = _sorted_events(events, "stragglers")
    messages = rows[-1].get("messages") if rows else None
    return [str(message) for message in messages] if isinstance(messages, list) else []


def _collect_warnings(events: dict[int, list[Event]]) -> list[str]:
    """Return the warnings of the ranks, each once."""
    rows = _sorted_events(events, "warning")
    return list(dict.fromkeys(str(row.get("message", "")) for row in rows))
