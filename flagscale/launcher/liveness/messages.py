"""Messages of hosts, orders of the coordinator, and their encoding.

The sender has proven that it has the run's secret, but its messages are still validated: anything
that is not exactly one of these is ignored, so that the worst a message can do is report something
false.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from flagscale.files import stored_as, to_plain
from flagscale.flight_records import FlightRecord
from flagscale.health.messages import HealthCommand, HealthEvent
from flagscale.launcher.liveness.diagnosis import Failure, FailureReport
from flagscale.launcher.liveness.protocol import MAX_FRAME_BYTES
from flagscale.records import from_record

# A host's failure is forwarded to all others, in a frame in which its characters may take three
# times as much space.
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES // 4
# Frames of a stack which show that the rank waits for another one, in a collective or a barrier.
_WAITING_FRAMES = re.compile(
    r"torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph\.py"
    r"| in (\w*barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|recv\w*)$",
    re.MULTILINE,
)


class JobPhase(str, Enum):
    """Phase of the job."""

    RUNNING = "running"
    ENDING = "ending"
    CHECKING = "checking"
    """The attempt has failed, and the hardware of the hosts is being measured."""
    WAITING = "waiting"
    STOPPING = "stopping"
    OVER = "over"


class HostStatus(str, Enum):
    """Status of a host in the current attempt."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    SPARE = "spare"
    """It waits until it takes the place of another host."""
    SICK = "sick"
    """Its hardware is sick: it has left the job."""


FINAL_STATUSES = (HostStatus.FINISHED, HostStatus.FAILED, HostStatus.LOST, HostStatus.SICK)
"""Statuses of a host whose part of the attempt is over."""


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank.

    Attributes:
        host: Name of its host.
        rank: Its global rank.
        step: Training step; None if the rank reports none.
        doing: Activity that the rank has reported, such as saving a checkpoint.
        stopped: True if the process is stopped, by SIGSTOP or a debugger.
        answered: True if it wrote its stack on request.
        stack: The Python stack that it wrote; empty if it did not.
        log: The rank's log.
        place: Place of the stack in the user's program (:func:`.hang.find_user_frame`).
        record: Digest of its flight recorder; None if it did not answer or records nothing.
    """

    host: str
    rank: int
    step: int | None
    doing: str
    stopped: bool
    answered: bool
    stack: str
    log: Path
    place: str = ""
    record: FlightRecord | None = None

    @property
    def waits(self) -> bool:
        """True if the stack shows that the rank waits for another one."""
        return bool(_WAITING_FRAMES.search(self.stack))


@dataclass(frozen=True)
class RankExit:
    """End of a rank with exit code 0. ``time`` is in Unix seconds of its host's clock."""

    rank: int
    time: float


@dataclass(frozen=True)
class HostProgress:
    """Progress of a host in its attempt.

    Some fields have other names in messages, so that agents of other versions can read them.
    """

    status: HostStatus
    joined: int
    """Number of ranks that have joined the process group."""
    nproc: int
    """Number of ranks of this host; 0 if unknown."""
    progress_count: int = field(metadata=stored_as("moves"))
    """Counter that changes whenever a rank has made progress."""
    in_busy_activity: bool = field(metadata=stored_as("busy"))
    """True if a rank is in one of :data:`flagscale.status.BUSY_ACTIVITIES`, such as evaluation,
    which may take long without a new step."""
    has_run_long: bool = field(metadata=stored_as("lived"))
    """True if a program that reports no status has run too long to be a failed start."""
    exit_code: int | None = field(metadata=stored_as("ended"))
    """Exit code of the attempt; None while it runs."""
    failure_report: FailureReport | None = field(metadata=stored_as("report"))
    """Failure on this host, if any is known."""
    ended_ranks: int = 0
    """Number of ranks that have ended although the attempt was not being ended."""
    early_exits: tuple[RankExit, ...] = ()
    """First of them that ended with exit code 0 and did not report the end of their work."""
    overdue_since: float | None = None
    """Unix seconds at which a rank called an operation that should have ended; None if no rank
    waits for so long."""


@dataclass(frozen=True)
class Departure:
    """Host that the job does not use any more. ``sickness`` is empty if it was lost."""

    host: int
    loss: Failure
    sickness: str = ""


@dataclass(frozen=True)
class JobState:
    """State of the job that another host needs to continue as the coordinator.

    Attributes:
        term: Number of the election that the coordinator has won, or a candidate wants to win.
        revision: Number of changes of the state. Of two states of coordinators, the one with the
            higher term is newer, and in one term the one with the higher revision.
        coordinator: Number of the host that coordinates the job, or wants to.
        electorates: Sets of hosts, each of which has to agree to a new coordinator by a majority:
            one, or more while the set changes.
        attempt: Attempt that was ordered to start last.
        places: Number of the host at each node rank.
        departures: Hosts that have left the job.
        successors: Hosts whose places spares have taken, with these.
        restarts: Number (from 0) and failure of each attempt that another one followed, without
            tracebacks.
        replacements: Attempts that started because a host had left, or had come back.
        failed_starts_in_a_row: Last attempts that ended before their ranks had joined.
        ranks_have_joined: True if the ranks have joined in any attempt.
        start_succeeded: True if they have joined in the last one.
        failure: First failure of the attempt that has ended, if its coordinator hands over.
        origin_term: Term of the state that a candidate's proposal continues, with the revision of
            that state; None if a coordinator shares this state.
    """

    term: int
    revision: int
    coordinator: int
    electorates: tuple[tuple[int, ...], ...]
    attempt: int
    places: tuple[int, ...]
    departures: tuple[Departure, ...] = ()
    successors: tuple[tuple[int, int], ...] = ()
    restarts: tuple[tuple[int, Failure | None], ...] = ()
    replacements: int = 0
    failed_starts_in_a_row: int = 0
    ranks_have_joined: bool = False
    start_succeeded: bool = False
    failure: Failure | None = None
    origin_term: int | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Term and revision, which identify the state."""
        return self.term, self.revision

    @property
    def origin(self) -> tuple[int, int]:
        """Version of the coordinator's state that this one is, or continues: the higher one is
        newer.
        """
        return self.term if self.origin_term is None else self.origin_term, self.revision


@dataclass(frozen=True)
class HostMessage:
    """Message of a host. ``sent`` is in Unix seconds of the host's clock."""

    host: int
    attempt: int
    sent: float


@dataclass(frozen=True)
class Hello(HostMessage):
    """First message on a connection, with everything that the coordinator may have missed.

    ``job_state`` is the newest state of the job that the host has accepted, if it has a vote.
    """

    progress: HostProgress = field(metadata=stored_as("position"))
    job_state: JobState | None = None


@dataclass(frozen=True)
class Heartbeat(HostMessage):
    """Periodic message with a host's progress."""

    progress: HostProgress = field(metadata=stored_as("position"))


@dataclass(frozen=True)
class AttemptEnded(HostMessage):
    """Notice that no process of the attempt is left on the host."""

    progress: HostProgress = field(metadata=stored_as("position"))


@dataclass(frozen=True)
class RankFailed(HostMessage):
    """Failure of a rank, sent as soon as its status shows it; its exit code follows later."""

    failure_report: FailureReport = field(metadata=stored_as("report"))


@dataclass(frozen=True)
class RankStacks(HostMessage):
    """Reply to the :class:`DumpStacks` with this ``request``."""

    ranks: tuple[RankProgress, ...]
    request: int


@dataclass(frozen=True)
class LastRecords(HostMessage):
    """Flight records that the ranks of a host wrote when they failed.

    ``finished_ranks`` are those that ended with exit code 0, as far as that is known.
    """

    ranks: tuple[RankProgress, ...]
    finished_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class HealthReply(HostMessage):
    """Reply to the :class:`MeasureHealth` with this ``step``.

    ``event`` is None if the host cannot be measured; ``problem`` is the reason.
    """

    step: int
    event: HealthEvent | None
    problem: str = ""


@dataclass(frozen=True)
class StopSignalled(HostMessage):
    """Notice that a signal stops the job on this host.

    ``failure`` is the cause if the stop was not requested by a user.
    """

    signal: int
    failure: Failure | None


@dataclass(frozen=True)
class JobStateAccepted(HostMessage):
    """Reply to :class:`ShareJobState`: the host follows no coordinator of an earlier term."""

    term: int
    revision: int


@dataclass(frozen=True)
class Order:
    """Order of the coordinator to one host or to all. ``failure`` is the job's first failure so
    far.
    """


@dataclass(frozen=True)
class KeepAlive(Order):
    """Heartbeat of the coordinator."""


@dataclass(frozen=True)
class ShareJobState(Order):
    """Keep this state of the job, and reply with :class:`JobStateAccepted`."""

    job_state: JobState


@dataclass(frozen=True)
class HandOver(Order):
    """Turn to the next host, because the coordinator leaves the job for the reason ``loss``."""

    loss: Failure


@dataclass(frozen=True)
class StartAttempt(Order):
    """Start the attempt with this number, counted from 0.

    ``places`` has the number of the host at each node rank, once a host has left the job; empty
    before. The number of a host is its node rank in the plan.
    """

    attempt: int
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class EndAttempt(Order):
    """End the attempt at once, because it has failed."""

    attempt: int
    failure: Failure | None


@dataclass(frozen=True)
class PauseAttempt(Order):
    """End the attempt in order, so that ranks save a checkpoint. Another attempt follows."""

    attempt: int


@dataclass(frozen=True)
class DumpStacks(Order):
    """Reply with the progress and the stack of each rank, in :class:`RankStacks`.

    ``request`` numbers these orders in an attempt.
    """

    attempt: int
    request: int


@dataclass(frozen=True)
class MeasureHealth(Order):
    """Measure the hardware, and reply with :class:`HealthReply`.

    ``command`` is None in the first order of a check, which starts its worker on the host.
    """

    step: int
    command: HealthCommand | None


@dataclass(frozen=True)
class EndHealthCheck(Order):
    """End the worker of the hardware check."""


@dataclass(frozen=True)
class StopJob(Order):
    """End the job in order, without a restart."""

    signal: int
    failure: Failure | None


@dataclass(frozen=True)
class FinishJob(Order):
    """The job is over: nothing will be started again."""

    failure: Failure | None


_WIRE_NAMES: dict[type[HostMessage | Order], str] = {
    Hello: "Hello",
    Heartbeat: "Beat",
    AttemptEnded: "Ended",
    RankFailed: "Reported",
    RankStacks: "Stacks",
    LastRecords: "LastRecords",
    HealthReply: "HealthReply",
    StopSignalled: "Stopping",
    JobStateAccepted: "JobStateAccepted",
    ShareJobState: "ShareJobState",
    HandOver: "HandOver",
    KeepAlive: "KeepAlive",
    StartAttempt: "StartAttempt",
    EndAttempt: "EndAttempt",
    PauseAttempt: "PauseAttempt",
    DumpStacks: "DumpStacks",
    MeasureHealth: "MeasureHealth",
    EndHealthCheck: "EndHealthCheck",
    StopJob: "StopJob",
    FinishJob: "FinishJob",
}
"""``kind`` of each message in its encoding."""
_CLASSES_BY_WIRE_NAME = {name: kind for kind, name in _WIRE_NAMES.items()}
_Message = TypeVar("_Message", HostMessage, Order)


def encode(message: HostMessage | Order) -> bytes:
    """Encode a message as JSON."""
    record = {"kind": _WIRE_NAMES[type(message)], **to_plain(message)}
    return json.dumps(record, separators=(",", ":")).encode()


def decode(base_class: type[_Message], payload: bytes) -> _Message | None:
    """Decode a message of a family; None for any other bytes."""
    if issubclass(base_class, HostMessage) and len(payload) > MAX_MESSAGE_BYTES:
        return None
    try:
        record: Any = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    name = record.get("kind") if isinstance(record, dict) else None
    message_class = _CLASSES_BY_WIRE_NAME.get(name) if isinstance(name, str) else None
    if message_class is None or not issubclass(message_class, base_class):
        return None
    return from_record(message_class, record)
