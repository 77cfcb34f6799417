"""Records of the latest collectives of a rank, by which the launcher explains a hang.

A rank keeps its latest operations in torch's flight recorder. On request it writes a digest of them
to ``rank_<rank>.flight`` in its status directory, and, if it is asked for them, all of its entries
to ``rank_<rank>`` in the directory ``flight`` next to it, for ``torchfrtrace``. A request is a line
in the named pipe ``rank_<rank>.ask``, which a thread of the rank reads
(:mod:`flagscale.flight_reporter`). A rank that hangs answers as well, unless its process is stopped
or native code holds Python's interpreter lock.

This module is the interface between both sides. It uses the standard library alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.files import stored_as, to_plain, write_atomic
from flagscale.records import from_record

FLIGHT_DIRECTORY = "flight"
"""Directory of the raw entries, next to the status directory; a restart has its own."""
RAW_PREFIX = "rank_"
"""Prefix of the files in it; ``torchfrtrace -p`` needs it."""
RAW_REQUEST = "raw"
"""Beginning of a request for the raw entries as well."""
FAILURE_REQUEST = "failure"
"""Request that a rank's last digest has, which it writes without one when it fails."""
_MAX_DIGEST_BYTES = 1 << 18
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class RecordedGroup:
    """A process group. ``ranks`` are global, as :func:`format_ranks` writes them."""

    name: str
    backend: str
    description: str
    ranks: str


@dataclass(frozen=True)
class RecordedOperation:
    """A collective or a message of a rank. Its keys in files and messages are short.

    Attributes:
        group: Index of the group in :attr:`FlightRecord.groups`.
        sequence: Number in the group, from 1. Messages are counted apart.
        name: Name without the backend, such as ``all_reduce``.
        inputs: Sizes and types of the input tensors, such as ``[4, 8] Float``.
        elements: Number of elements of the inputs.
        started: False if the device has not started it, as far as the backend records that.
        ended: True if it is over for this rank.
        time: Unix seconds of the call.
        timeout: Seconds; 0 if unknown.
        peer: Global rank at the other end of a message; None for a collective.
        sends: True for a message from this rank.
    """

    group: int = field(metadata=stored_as("g"))
    sequence: int = field(metadata=stored_as("n"))
    name: str = field(metadata=stored_as("op"))
    inputs: str = field(metadata=stored_as("in"))
    elements: int = field(metadata=stored_as("el"))
    started: bool = field(metadata=stored_as("st"))
    ended: bool = field(metadata=stored_as("end"))
    time: float = field(metadata=stored_as("t"))
    timeout: float = field(metadata=stored_as("to"))
    peer: int | None = field(default=None, metadata=stored_as("p"))
    sends: bool = field(default=False, metadata=stored_as("s"))


@dataclass(frozen=True)
class FlightRecord:
    """Digest of a rank's flight recorder.

    Attributes:
        rank: Global rank.
        request: The request that it answers.
        count: Number of operations since the start; grows whenever the rank calls one.
        groups: Groups of the operations.
        operations: The latest operations, oldest first: of every group, and those that are pending.
        stack: Python stack of the main thread in faulthandler's format, innermost frame first.
    """

    rank: int
    request: str
    count: int
    groups: tuple[RecordedGroup, ...]
    operations: tuple[RecordedOperation, ...]
    stack: str = ""


def request_path(status_directory: Path, rank: int) -> Path:
    """Return the named pipe of a rank."""
    return status_directory / f"rank_{rank}.ask"


def digest_path(status_directory: Path, rank: int) -> Path:
    """Return the file of a rank's digest."""
    return status_directory / f"rank_{rank}.flight"


def raw_path(status_directory: Path, rank: int) -> Path:
    """Return the file of a rank's raw entries."""
    return flight_directory(status_directory) / f"{RAW_PREFIX}{rank}"


def flight_directory(status_directory: Path) -> Path:
    """Return the directory of the raw entries that belongs to an attempt's status directory."""
    _, dot, attempt = status_directory.name.partition(".")
    return status_directory.parent / f"{FLIGHT_DIRECTORY}{dot}{attempt}"


def send_request(status_directory: Path, rank: int, request: str) -> bool:
    """Ask a rank for its digest, and for its raw entries if it begins with :data:`RAW_REQUEST`.

    Returns:
        False if no thread of the rank reads requests.
    """
    try:
        pipe = os.open(request_path(status_directory, rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(pipe, f"{request}\n".encode())
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def read_digest(status_directory: Path, rank: int, request: str = "") -> FlightRecord | None:
    """Return a rank's last digest; None if it has written none, or none for this request."""
    try:
        data = digest_path(status_directory, rank).read_bytes()
        record = from_record(FlightRecord, json.loads(data[:_MAX_DIGEST_BYTES]))
    except (OSError, ValueError, RecursionError):
        return None
    if record is None or record.rank != rank or request not in ("", record.request):
        return None
    return record


def write_digest(status_directory: Path, record: FlightRecord) -> None:
    """Write a rank's digest; errors are ignored."""
    with suppress(OSError):
        text = json.dumps(to_plain(record), separators=(",", ":"))
        write_atomic(digest_path(status_directory, record.rank), text, durable=False)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``0-3,8,12-20/4`` for ascending ranks: ranges, and ranges with a stride."""
    return ",".join(_iter_ranges(sorted(set(ranks))))


def _iter_ranges(ranks: Sequence[int]) -> Iterator[str]:
    start = 0
    while start < len(ranks):
        end, stride = start, 0
        while end + 1 < len(ranks) and stride in (0, ranks[end + 1] - ranks[end]):
            stride = ranks[end + 1] - ranks[end]
            end += 1
        if stride > 1 and end - start == 1:
            end = start  # two ranks are no range: the second one may begin another
        if end == start:
            yield str(ranks[start])
        else:
            yield f"{ranks[start]}-{ranks[end]}" + (f"/{stride}" if stride > 1 else "")
        start = end + 1


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that :func:`format_ranks` wrote; malformed parts are left out."""
    ranks: list[int] = []
    for part in text.split(",") if text else []:
        span, _, stride = part.partition("/")
        first, dash, last = span.partition("-")
        with suppress(ValueError):
            if int(last or first) - int(first) < _MAX_RANKS:
                ranks += range(int(first), int(last if dash else first) + 1, int(stride or 1))
    return tuple(ranks)
