"""What a run is doing now, as ``query`` tells it: made from the run's state, processes and the
events of its ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from flagscale.files import plain
from flagscale.launcher import failures
from flagscale.launcher.layout import latest_status
from flagscale.launcher.liveness.diagnosis import Failure, last_lines
from flagscale.launcher.state import Exit, HostState, RunState
from flagscale.status import Event, read_events, read_progress, status_files

_PACE_EVENTS = 20
_UNSETTLED = "the hosts are still finding out what failed first"


class Phase(str, Enum):
    """The state of a run."""

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
class Seen:
    """What somebody who was on a host saw there. ``alive`` is not empty if something of the run
    lives, and ``script`` if the host's script does; ``trouble``: why nothing was seen;
    ``last_line``: of output, where it was asked for; ``waits``: why a scheduler has not given the
    host yet, or again."""

    alive: str = ""
    last_line: str = ""
    trouble: str = ""
    waits: str = ""


@dataclass(frozen=True)
class HostRow:
    """One host of a snapshot. ``step`` and ``doing`` are those of its rank that is behind."""

    host: str
    phase: Phase
    ranks: int
    joined: int
    step: int | None = None
    doing: str = ""
    trouble: str = ""
    """Why the host could not be asked."""
    last_line: str = ""
    waits: str = ""
    """Why a scheduler has not given the host yet."""

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        del record["phase"]
        return {"host": self.host, "state": self.phase.value, **record}


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. ``since`` is when it came into its state, in Unix seconds; what is
    not known is None. ``eta_seconds`` is for a run that reports its progress and has a length."""

    run_id: str
    name: str
    phase: Phase
    since: float
    world_size: int
    joined: int
    exit_code: int | None = None
    step: int | None = None
    train_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    eta_seconds: float | None = None
    failure: Failure | None = None
    """The first failure. While the agents have not agreed on it, what ranks have said of their own
    is among the warnings."""
    hosts: tuple[HostRow, ...] = ()
    warnings: tuple[str, ...] = ()
    attempt: int = 1
    """Which start of the job this is, of ``attempts`` that there may be."""
    attempts: int = 1
    earlier: tuple[tuple[int, Failure], ...] = ()
    """What the attempts before this one failed by, each with its number."""
    events: Mapping[int, Sequence[Event]] = field(default_factory=dict, repr=False)
    """What the ranks of this attempt have reported; no part of what is told of a run."""

    def steps(self) -> str:
        """How far it is, for people: ``7/100``; empty where that is not known."""
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
        record["earlier"] = [{"attempt": n, **plain(f)} for n, f in self.earlier]
        return record


class EventReader:
    """The events of a run's ranks, read from where the last call ended."""

    def __init__(self, hosts: Sequence[HostState]) -> None:
        self._hosts = hosts
        self._offsets: dict[Path, int] = {}
        self._directories: dict[int, Path] = {}
        self.events: dict[int, list[Event]] = {}

    def refresh(self) -> dict[int, list[Event]]:
        """All events of the ranks in the latest attempt at the job."""
        for host in self._hosts:
            directory = latest_status(host.run_dir)
            if self._directories.setdefault(host.node_rank, directory) != directory:
                self._directories[host.node_rank] = directory
                for rank in host.ranks:
                    self.events.pop(rank, None)
            for path in status_files(directory):
                new, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
                if new:
                    self.events.setdefault(new[0].rank, []).extend(new)
        return self.events

    def attempts(self) -> set[int]:
        """The attempts at the job, from 1, whose events these are: hosts begin one in turn."""
        numbers = (directory.suffix[1:] for directory in self._directories.values())
        return {int(number or 0) + 1 for number in numbers}

    def ranks(self, event: str) -> set[int]:
        """The ranks that have reported this event."""
        return {
            rank for rank, rows in self.events.items() if any(row.event == event for row in rows)
        }


def take(
    state: RunState,
    seen: Mapping[int, Seen],
    reader: EventReader | None = None,
    *,
    with_lines: bool = False,
) -> Snapshot:
    """The run now. ``seen`` is what the hosts were seen to do, by node rank."""
    reader = reader or EventReader(state.hosts)
    # Exits first: a run that ends in between then shows as alive once more, never as lost.
    exits = [host.exit() for host in state.hosts]
    events = reader.refresh()
    joined = reader.ranks("joined")
    everybody = (state.external and not events) or len(joined) >= state.world_size
    rows = []
    for host, ended in zip(state.hosts, exits, strict=True):
        look = seen.get(host.node_rank, Seen())
        # How one that waits has ended before is of a start that does not count any more.
        phase = Phase.PENDING if look.waits else _phase(state, ended, everybody, look)
        rows.append(_row(host, phase, look, joined, with_lines))
    phase = _overall([row.phase for row in rows])
    # Those who will agree on the first failure are alive: the script of the first host tells what
    # became of its agent. Looked at before the verdict is read, which may become final in between.
    agreeing = phase is Phase.RUNNING and seen.get(0, Seen()).alive == "script"
    unsettled = agreeing and not failures.is_settled(state.hosts)
    may_have_failed = phase in (Phase.FAILED, Phase.RUNNING)
    failure = failures.first_failure(state, events) if may_have_failed else None
    warnings = _warnings(events)
    if failure is not None and unsettled:
        warnings.append(f"{failure.headline()}; {_UNSETTLED}")
        failure = None
    job = failures.job_record(state.hosts)
    return Snapshot(
        run_id=state.run_id,
        name=state.name,
        phase=phase,
        since=_since(state, phase, events, exits),
        world_size=state.world_size,
        joined=len(joined),
        exit_code=failures.job_code(state, exits, failure),
        failure=failure,
        hosts=tuple(rows),
        warnings=tuple(warnings),
        attempt=int(job.get("attempt", 1)),
        attempts=int(job.get("attempts", 1)),
        earlier=failures.earlier_failures(state.hosts),
        events=events,
        **_progress(events, phase),
    )


def _row(host: HostState, phase: Phase, seen: Seen, joined: set[int], with_line: bool) -> HostRow:
    status = latest_status(host.run_dir)
    behind = min(filter(None, (read_progress(status, rank) for rank in host.ranks)), default=None)
    return HostRow(
        host=host.name,
        phase=phase,
        ranks=host.nproc,
        joined=len(joined.intersection(host.ranks)),
        step=behind.step if behind else None,
        doing=behind.doing if behind else "",
        trouble=seen.trouble,
        last_line=seen.last_line or (_last_line(host) if with_line else ""),
        waits=seen.waits,
    )


def _last_line(host: HostState) -> str:
    return next(filter(str.strip, reversed(last_lines(host.output).splitlines())), "")


def _phase(state: RunState, ended: Exit | None, everybody: bool, seen: Seen) -> Phase:
    if ended is not None:
        if ended.signal is not None and ended.phase == "job":
            return Phase.STOPPED
        if ended.code and state.stop_requested is not None and not ended.failed:
            return Phase.STOPPED
        return Phase.FAILED if ended.code else Phase.COMPLETED
    if seen.trouble:
        return Phase.UNREACHABLE
    if seen.alive:
        return Phase.RUNNING if everybody else Phase.STARTING
    return Phase.STOPPED if state.stop_requested is not None else Phase.LOST


def _overall(phases: Sequence[Phase]) -> Phase:
    """A run is what its worst host is."""
    order = (
        *(Phase.FAILED, Phase.LOST, Phase.UNREACHABLE),
        *(Phase.STOPPED, Phase.PENDING, Phase.STARTING, Phase.RUNNING),
    )
    return next((phase for phase in order if phase in phases), Phase.COMPLETED)


def _since(
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


def _progress(events: dict[int, list[Event]], phase: Phase) -> dict[str, Any]:
    """The last known figures of training, and the time to its end at the recent pace."""
    rows = [row for rows in events.values() for row in rows if row.event == "progress"]
    if not rows:
        return {}
    rows.sort(key=lambda row: row.time)
    last = rows[-1]
    step, total = last.number("step"), last.number("train_steps")
    found = {"step": step, "train_steps": total}
    found |= {name: last.number(name) for name in ("loss", "tokens_per_second", "memory_gib")}
    recent = rows[-_PACE_EVENTS:]
    steps = (step or 0) - (recent[0].number("step") or 0)
    if phase is Phase.RUNNING and total and step and steps > 0:
        pace = (last.time - recent[0].time) / steps
        found["eta_seconds"] = round(pace * max(0, total - step), 1)
    return found


def _warnings(events: dict[int, list[Event]]) -> list[str]:
    """What ranks warned of, each once, however many ranks said so."""
    rows = [row for rows in events.values() for row in rows if row.event == "warning"]
    rows.sort(key=lambda row: row.time)
    return list(dict.fromkeys(str(row.get("message", "")) for row in rows))
