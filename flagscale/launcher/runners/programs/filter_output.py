"""Filter of a host's output on the host, so that only the requested lines travel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.hosts.connection import HostConnection
from flagscale.hosts.errors import HostError
from flagscale.hosts.program import build_program, read_source, run_program
from flagscale.launcher import log_lines

_TIMEOUT_SECONDS = 600.0
_BODY = Path(__file__).with_name("filter_output.sh")
_SOURCE = Path(log_lines.__file__)


@dataclass(frozen=True)
class FilterRequest:
    """Request for the lines of one host's output, which :func:`.log_lines.main` reads as JSON.

    Attributes:
        path: The output on the host.
        set_aside: Where it is after a later run has started.
        index: Its index of times.
        host: Name of the host in labels.
        rank: Only this rank's lines.
        pattern: Only lines in which this regular expression is found.
        level: Only messages of this level, or a worse one.
        since: Only lines since this time, in seconds since the epoch, unless there is an offset.
        count: Only this many last lines.
        offset: Where to continue; None to begin.
        messages: Messages that had not ended there.
        final: Whether an unfinished line counts.
        max_bytes: Limit of one reply; the next request continues.
    """

    path: str
    set_aside: str
    index: str
    host: str
    rank: int | None = None
    pattern: str | None = None
    level: str | None = None
    since: float | None = None
    count: int | None = None
    offset: int | None = None
    messages: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    max_bytes: int = 16 << 20


@dataclass(frozen=True)
class FilteredLines:
    """Reply of a host: the next lines, and where to continue.

    Attributes:
        lines: Labelled lines.
        offset: Offset behind the last line that was read.
        messages: Messages that have not ended there.
        has_more: More lines are there already.
        has_times: False if the output has no index of times, so that ``since`` had no effect.
    """

    lines: tuple[str, ...]
    offset: int
    messages: Mapping[str, Any]
    has_more: bool
    has_times: bool


class NoPythonError(HostError, summary="cannot filter its output"):
    """A host has no Python that can run the filter."""


def filter_output(connection: HostConnection, request: FilterRequest, python: str) -> FilteredLines:
    """Return the lines of a request.

    Args:
        connection: Connection to the host.
        request: What to return.
        python: Python of the run's ranks, tried first.

    Raises:
        NoPythonError: The host has no Python.
    """
    program = render_filter(request, python)
    output = run_program(connection, program, _TIMEOUT_SECONDS)
    if output.get("filtered") != "yes":
        raise NoPythonError(connection.name, "no Python there can filter the output")
    (chunk,) = output.chunks
    return FilteredLines(
        tuple(chunk.data.decode("utf-8").split("\n")[:-1]),
        chunk.offset,
        json.loads(output.get("messages")),
        has_more=output.get("more") == "yes",
        has_times=output.get("times") == "yes",
    )


def render_filter(request: FilterRequest, python: str) -> str:
    """Return the program for one host."""
    variables = {
        "filter_request": json.dumps(vars(request)),
        "pythons": [*filter(None, [python]), "python3", "python"],
    }
    return build_program(_BODY, variables, _filter_function())


def _filter_function() -> str:
    """Return the bash function ``filter_program``, which runs the filter with ``$python``.

    The working directory is the root, because a program on stdin imports from the working
    directory first and no module of the user is there.
    """
    return (
        'filter_program() {\n    (cd /; exec "$python" -S - "$@")'
        f" <<'END_OF_FILTER'\n{read_source(_SOURCE)}END_OF_FILTER\n}}"
    )
