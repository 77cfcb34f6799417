"""What agents say to each other: a dataclass for each message of a host and each order of the
coordinator, and how they become bytes.

Who speaks has proven that it knows the run's secret, but its words are still judged: what is not
exactly one of these is passed over, so that no message can do more than say something false.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from flagscale.files import plain
from flagscale.launcher.liveness.diagnosis import Failure, Report
from flagscale.launcher.liveness.protocol import MAX_FRAME_BYTES
from flagscale.records import from_record

# A host's failure goes on to all others, in a frame in which its letters may take thrice the room.
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES // 4
# In a stack: this rank is in a collective or at a barrier, so it waits for another one.
_WAITS = re.compile(
    r"torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph\.py"
    r"| in (\w*barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|recv\w*)$",
    re.MULTILINE,
)


class JobPhase(str, Enum):
    """What the job is doing."""

    RUNNING = "running"
    ENDING = "ending"
    WAITING = "waiting"
    STOPPING = "stopping"
    OVER = "over"


class HostStatus(str, Enum):
    """What a host does in this attempt at the job."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"


OVER = (HostStatus.FINISHED, HostStatus.FAILED, HostStatus.LOST)
"""Of a host whose part of the attempt is over."""


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is. ``answered`` says whether it wrote its stack when asked to."""

    host: str
    rank: int
    step: int | None
    doing: str
    stopped: bool
    answered: bool
    stack: str
    log: Path

    @property
    def waits(self) -> bool:
        return bool(_WAITS.search(self.stack))


@dataclass(frozen=True)
class Position:
    """How far a host is in its attempt."""

    status: HostStatus
    joined: int
    nproc: int
    moves: int
    """Changes whenever a rank has got on."""
    busy: bool
    """Whether a rank does what moves no step."""
    lived: bool
    """Whether a program that reports nothing has run long enough to be no false start."""
    ended: int | None
    """The exit code, once there is one."""
    report: Report | None
    """What failed here, as far as is known."""


@dataclass(frozen=True)
class FromHost:
    """What a host sends. ``sent`` is in Unix seconds of its own clock."""

    host: int
    attempt: int
    sent: float


@dataclass(frozen=True)
class Hello(FromHost):
    """The first word on a connection: all that the coordinator may have missed."""

    position: Position


@dataclass(frozen=True)
class Beat(FromHost):
    """Said again and again."""

    position: Position


@dataclass(frozen=True)
class Ended(FromHost):
    """Nothing of the attempt is left on the host."""

    position: Position


@dataclass(frozen=True)
class Reported(FromHost):
    """A rank says that it failed; how it ended comes later."""

    report: Report


@dataclass(frozen=True)
class Stacks(FromHost):
    """The answer to :class:`DumpStacks`."""

    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True)
class Stopping(FromHost):
    """The host was told to stop the job by a signal. ``failure``: why, where nobody asked for
    that."""

    signal: int
    failure: Failure | None


@dataclass(frozen=True)
class Order:
    """What the coordinator tells one host, or all. ``failure`` is the job's first, as known."""


@dataclass(frozen=True)
class KeepAlive(Order):
    """Nothing but that the coordinator is there."""


@dataclass(frozen=True)
class StartAttempt(Order):
    attempt: int


@dataclass(frozen=True)
class EndAttempt(Order):
    """End it at once: it has failed."""

    attempt: int
    failure: Failure | None


@dataclass(frozen=True)
class DumpStacks(Order):
    """Say where each rank is, and by which stack."""

    attempt: int


@dataclass(frozen=True)
class StopJob(Order):
    """End the job in order; it is not started again."""

    signal: int
    failure: Failure | None


@dataclass(frozen=True)
class FinishJob(Order):
    """All is over: nothing will be started any more."""

    failure: Failure | None


_Said = TypeVar("_Said", FromHost, Order)


def encode(message: FromHost | Order) -> bytes:
    """A message as JSON, with its class as ``kind``."""
    record = {"kind": type(message).__name__, **plain(message)}
    return json.dumps(record, separators=(",", ":")).encode()


def decode(family: type[_Said], payload: bytes) -> _Said | None:
    """What :func:`encode` made of a message of this family; None for any other bytes."""
    if issubclass(family, FromHost) and len(payload) > MAX_MESSAGE_BYTES:
        return None
    try:
        record: Any = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    kind = record.get("kind") if isinstance(record, dict) else None
    found = next((one for one in family.__subclasses__() if one.__name__ == kind), None)
    return from_record(found, record) if found is not None else None
