"""Status files, by which ranks report to the launcher: one JSON line per event, one file per rank.

The launcher sets ``FLAGSCALE_STATUS_DIR``; a rank appends to ``rank_<rank>.jsonl`` in it.
Without the variable (a user's own script, started by hand) nothing is written. The commands
``query``, ``logs`` and ``run`` read a job's progress from these files alone, so this module is
the only interface between training and launching. It uses the standard library alone.

Events and their fields, in addition to ``time`` (Unix seconds) and ``event``:

==========  ===============================================================================
started     rank, local_rank, world_size, host, pid, device: the process is up
joined      backend, seconds: every rank has joined the process group; place: in a
            heterogeneous job, a description of this rank's part for users; libraries: on one
            rank of a host, the versions of torch and of what it uses
ready       seconds: since the join; model, data and checkpoint are loaded, training begins
progress    step, train_steps, samples, loss, grad_norm, learning_rate, step_seconds,
            tokens_per_second, tokens_per_second_per_gpu, tflops_per_gpu, mfu, memory_gib;
            written by one rank per job
evaluation  step, loss; written by the same rank
tasks       step, seconds, scores: metrics of an evaluation on tasks by name; written by the
            same rank
checkpoint  step, path, seconds: a checkpoint is complete on disk; best, and either valid_loss
            or best_metric and best_value: its evaluation is the best so far
sections    step, steps: number of measured steps since the last report; data, forward, backward,
            optimizer, waiting (for others), other: mean seconds of a step of this rank
stragglers  step; stragglers: ranks that work longer in a step than equal ranks, each with rank,
            host, excess (fraction), cost (fraction of a step), section; messages: the same for
            users; written when they change, by the rank that writes progress
warning     message
failed      kind, message, traceback: this rank ends because of an exception
finished    step, reason: ``completed``, ``signal`` or ``exit-interval``; detail: why training
            completed before its last step
==========  ===============================================================================

Unknown values are omitted, never written as null.

In addition, ``rank_<rank>.place`` holds one line of JSON with the rank's ``step`` and activity
(``doing``), which is overwritten in place. It lets the launcher detect a hang and find the rank
that is behind, without a line per step. Activities that advance no step but may take long are
listed in :data:`BUSY_ACTIVITIES`, so that they are not mistaken for a hang.

For the ranks of a command, ``rank_<rank>.exit`` holds the exit code of a rank that has ended.
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
"""Number of earlier starts of the job, from 0: after a failure the whole job is started again."""
TRIALS_VARIABLE = "FLAGSCALE_TRIALS"
"""Directory of requests for further trials of ``action=auto_tune`` in the same processes."""
HOST_VARIABLE = "FLAGSCALE_HOST"
"""Name of the host, as in the hostfile."""

RUN_VARIABLES = (RUN_ID_VARIABLE, STATUS_DIR_VARIABLE, ATTEMPT_VARIABLE, HOST_VARIABLE)
"""Environment variables that identify the processes of a run."""

STARTING, TRAINING = "starting", "in training"
BETWEEN_TRIALS = "between trials"
"""Activity of a rank that waits for a further trial. Its step is the number of trials that it has
finished."""
BUSY_ACTIVITIES = (
    STARTING,
    BETWEEN_TRIALS,
    "scoring the reference",
    "evaluating",
    "saving a checkpoint",
    "ending",
)
"""Activities of a rank that advance no step."""

SECTIONS = ("data", "forward", "backward", "optimizer", "waiting", "other")
"""Sections of a step in a ``sections`` event."""

_PROGRESS_LINE_BYTES = 96

EVENTS = (
    "started",
    "joined",
    "ready",
    "progress",
    "evaluation",
    "tasks",
    "checkpoint",
    "sections",
    "stragglers",
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

    def get_number(self, name: str) -> Any:
        """Return a numeric field; None if it is missing or no number."""
        value = self.fields.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def get_numbers(self, name: str) -> dict[str, float]:
        """Return the numbers by name of a field; none if it is missing or has another form."""
        values = self.fields.get(name)
        if not isinstance(values, dict):
            return {}
        return {str(key): value for key, value in values.items() if type(value) in (int, float)}


class StatusWriter:
    """Appends a rank's events to its status file.

    Each line is written by a single ``write`` call, so readers that follow the file never see a
    partial line, and a killed rank loses no event that it has reported.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._events_descriptor: int | None = None
        self._progress_descriptor: int | None = None
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / f"rank_{rank}.jsonl"
        self._events_descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._progress_descriptor = os.open(
            progress_path(directory, rank), os.O_WRONLY | os.O_CREAT, 0o600
        )

    @classmethod
    def from_environment(cls, rank: int) -> StatusWriter:
        """Return the writer for the directory in ``FLAGSCALE_STATUS_DIR``; without it, nothing is
        written.
        """
        directory = os.environ.get(STATUS_DIR_VARIABLE)
        return cls(Path(directory) if directory else None, rank)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Write errors are ignored: a full disk must not end a training run.

        Raises :class:`ValueError` for an unknown event.
        """
        if event not in EVENTS:
            raise ValueError(f"unknown status event {event!r}")
        if self._events_descriptor is None:
            return
        known_fields = {name: value for name, value in fields.items() if value is not None}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **known_fields})
        try:
            os.write(self._events_descriptor, line.encode() + b"\n")
        except OSError:
            return

    def write_progress(self, step: int, doing: str = TRAINING) -> None:
        """Record this rank's step and its activity: :data:`TRAINING` or one of
        :data:`BUSY_ACTIVITIES`.

        Call it at every step: it costs one small write to a file in memory.
        """
        if self._progress_descriptor is None:
            return
        line = json.dumps({"step": step, "doing": doing}).encode().ljust(_PROGRESS_LINE_BYTES - 1)
        try:
            os.pwrite(self._progress_descriptor, line[: _PROGRESS_LINE_BYTES - 1] + b"\n", 0)
        except OSError:
            return


class Progress(NamedTuple):
    """Step and activity of a rank."""

    step: int
    doing: str


def read_progress(directory: Path, rank: int) -> Progress | None:
    """Return the progress of a rank from its status directory; None if it has not reported any."""
    try:
        record = json.loads(progress_path(directory, rank).read_bytes())
        step, doing = record["step"], record["doing"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Progress(step, doing) if type(step) is int and isinstance(doing, str) else None


def progress_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's progress file."""
    return directory / f"rank_{rank}.place"


def write_exit_code(rank: int, code: int) -> None:
    """Record the exit code of an ended rank in the directory in ``FLAGSCALE_STATUS_DIR``, if any.
    Write errors are ignored.
    """
    directory = os.environ.get(STATUS_DIR_VARIABLE)
    if directory:
        with suppress(OSError):
            _exit_code_path(Path(directory), rank).write_text(f"{code}\n", encoding="ascii")


def read_exit_code(directory: Path, rank: int) -> int | None:
    """Return the exit code of a rank from its status directory; None if none is recorded."""
    try:
        return int(_exit_code_path(directory, rank).read_bytes())
    except (OSError, ValueError):
        return None


def _exit_code_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.exit"


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events of a status file from byte ``offset`` on, and the offset of the next read.

    An unfinished last line is left for the next call. A corrupt line is skipped.
    """
    rank = int(path.stem.removeprefix("rank_"))
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete_lines = data[: data.rfind(b"\n") + 1]
    events = []
    for record in _parse_lines(complete_lines.splitlines()):
        try:
            events.append(Event(rank, float(record.pop("time")), record.pop("event"), record))
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
    return events, offset + len(complete_lines)


def _parse_lines(lines: Sequence[bytes]) -> Iterator[Any]:
    """Yield the JSON value of each line, without corrupt lines.

    A long run has hundreds of thousands of lines. Parsing them as one list takes half the time.
    """
    with suppress(ValueError, RecursionError):
        records = json.loads(b"[%b]" % b",".join(lines))
        if len(records) == len(lines) and {*map(type, records)} == {dict}:
            yield from records
            return
    for line in lines:
        with suppress(ValueError, RecursionError):
            yield json.loads(line)


def list_status_files(directory: Path) -> Iterator[Path]:
    """Yield the status files of a directory, ordered by rank."""
    paths = [p for p in directory.glob("rank_*.jsonl") if p.stem.removeprefix("rank_").isdigit()]
    yield from sorted(paths, key=lambda p: int(p.stem.removeprefix("rank_")))
