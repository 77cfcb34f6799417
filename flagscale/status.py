"""How a rank tells the launcher what it is doing: one JSON line an event, one file a rank.

The launcher sets ``FLAGSCALE_STATUS_DIR``; a rank appends to ``rank_<rank>.jsonl`` in it. Without
the variable (a script of the user's own, started by hand) nothing is written. The files are the
only thing ``query``, ``logs`` and ``run`` read to know how far a job is, so this module is all
that training and launching share. It imports the standard library alone.

Events and their fields, beside ``time`` (Unix seconds) and ``event``:

==========  ===============================================================================
started     rank, local_rank, world_size, host, pid, device: the process is up
joined      backend, seconds: the process group exists and every rank was heard; place: of a
            job whose ranks are unlike, what this one holds, for people
ready       seconds: since the join; model, data and checkpoint are there, training begins
progress    step, train_steps, samples, loss, grad_norm, learning_rate, step_seconds,
            tokens_per_second, tflops_per_gpu, mfu, memory_gib; written by one rank a job
evaluation  step, loss; written by the same rank
checkpoint  step, path, seconds: a checkpoint is whole on disk
warning     message
failed      kind, message, traceback: this rank ends because of an exception
finished    step, reason: ``completed``, ``signal`` or ``exit-interval``
==========  ===============================================================================

A field that is not known is left out, never written as null.

Beside its events a rank says how far it is: ``rank_<rank>.place`` holds one line of JSON, ``step``
and ``doing``, written over in place. That is how the launcher tells a job that hangs, and the rank
that is behind, without a line for every step. What moves no step but may take long is told by one
of :data:`BUSY`, so that it is not taken for a hang.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

STATUS_DIR_VARIABLE = "FLAGSCALE_STATUS_DIR"
RUN_ID_VARIABLE = "FLAGSCALE_RUN_ID"
ATTEMPT_VARIABLE = "FLAGSCALE_ATTEMPT"
"""How often the job was started before, from 0: after a failure it is started again as a whole."""

RUN_VARIABLES = (RUN_ID_VARIABLE, STATUS_DIR_VARIABLE, ATTEMPT_VARIABLE)
"""What the processes of a run carry."""

STEP = "in training"
BUSY = ("starting", "evaluating", "saving a checkpoint", "ending")
"""What a rank may be doing that moves no step."""

_PROGRESS_BYTES = 96

EVENTS = (
    "started",
    "joined",
    "ready",
    "progress",
    "evaluation",
    "checkpoint",
    "warning",
    "failed",
    "finished",
)


@dataclass(frozen=True)
class Event:
    """One line of a rank's status file."""

    rank: int
    time: float
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def number(self, name: str) -> Any:
        """A number; None where there is none, whatever a program has written in its place."""
        found = self.fields.get(name)
        return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


class StatusWriter:
    """Appends a rank's events. Each line is written by one ``write`` call, so readers that
    follow the file never see half of one, and a killed rank loses nothing it has reported."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._descriptor: int | None = None
        self._progress: int | None = None
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / f"rank_{rank}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._progress = os.open(progress_file(directory, rank), os.O_WRONLY | os.O_CREAT, 0o600)

    @classmethod
    def from_environment(cls, rank: int) -> StatusWriter:
        directory = os.environ.get(STATUS_DIR_VARIABLE)
        return cls(Path(directory) if directory else None, rank)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. A full disk must not end a training run, so it is not an error."""
        if event not in EVENTS:
            raise ValueError(f"unknown status event {event!r}")
        if self._descriptor is None:
            return
        known = {name: value for name, value in fields.items() if value is not None}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **known})
        try:
            os.write(self._descriptor, line.encode() + b"\n")
        except OSError:
            return

    def write_progress(self, step: int, doing: str = STEP) -> None:
        """Say which step this rank is at and what it is doing: :data:`STEP` or one of
        :data:`BUSY`. Costs one small write to a file in memory, so call it at every step."""
        if self._progress is None:
            return
        line = json.dumps({"step": step, "doing": doing}).encode().ljust(_PROGRESS_BYTES - 1)
        try:
            os.pwrite(self._progress, line[: _PROGRESS_BYTES - 1] + b"\n", 0)
        except OSError:
            return


class Progress(NamedTuple):
    """The step that a rank is at, and what it is doing there."""

    step: int
    doing: str


def read_progress(directory: Path, rank: int) -> Progress | None:
    """How far a rank says it is, in its status directory; None if it has not said."""
    try:
        record = json.loads(progress_file(directory, rank).read_bytes())
        step, doing = record["step"], record["doing"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Progress(step, doing) if type(step) is int and isinstance(doing, str) else None


def progress_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.place"


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Events of one status file from byte ``offset`` on, and the offset to go on from.

    An unfinished last line is left for the next call; a damaged line is skipped.
    """
    rank = int(path.stem.removeprefix("rank_"))
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for record in _records(whole.splitlines()):
        try:
            events.append(Event(rank, float(record.pop("time")), record.pop("event"), record))
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
    return events, offset + len(whole)


def _records(lines: Sequence[bytes]) -> Iterator[Any]:
    """What each line holds, without those that are damaged. Of a long run there are hundreds of
    thousands: as one list they are read in half the time."""
    with suppress(ValueError, RecursionError):
        found = json.loads(b"[%b]" % b",".join(lines))
        if len(found) == len(lines) and {*map(type, found)} == {dict}:
            yield from found
            return
    for line in lines:
        with suppress(ValueError, RecursionError):
            yield json.loads(line)


def status_files(directory: Path) -> Iterator[Path]:
    """The status files of a directory, by rank."""
    found = [p for p in directory.glob("rank_*.jsonl") if p.stem.removeprefix("rank_").isdigit()]
    yield from sorted(found, key=lambda p: int(p.stem.removeprefix("rank_")))
