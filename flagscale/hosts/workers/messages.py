"""Lines of JSON on a worker's control channel. Standard library alone.

The worker sends events on stdout, one :class:`WorkerLine` per line. Commands reach it as
:class:`ControllerLine` per line, through a pipe that the worker itself holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ControlEndpoint:
    """Address of a worker's command pipe on its host: ``/proc/<pid>/fd/<descriptor>``."""

    pid: int
    descriptor: int
    pipe: str
    """Target of that link, such as ``pipe:[4711]``: it identifies the pipe."""


@dataclass(frozen=True)
class WorkerLine:
    """A line from a worker. Exactly one field is set."""

    endpoint: ControlEndpoint | None = None
    """The worker reads commands from now on."""
    event: str = ""
    """An event of the worker's own, as JSON."""
    failure: str = ""
    """The reason why the worker ends."""


@dataclass(frozen=True)
class ControllerLine:
    """A line to a worker: renew its lease, end it, or a command of the client's."""

    kind: Literal["renew", "end", "command"]
    command: str = ""
    """The command as JSON."""
