"""Task, commands and events of the traffic's workers. Standard library alone: hosts read it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.traffic.spec import Flow, Pattern, Probe


@dataclass(frozen=True)
class WorkerSettings:
    """Argument of a worker: which host it serves, and how it is reached there."""

    role: Literal["flows", "probe"]
    number: int
    """Index of the host in :attr:`.spec.Environment.hosts`."""
    key: str
    """Key of the session, in hexadecimal digits."""
    seconds: float
    """Longest life of the worker."""
    lease: float
    """Longest time without a command, in seconds."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    interface: str | None = None
    """Interface that its packets leave by; None: as the host routes."""
    address: str = ""
    """Address at which flows reach this host. Datagrams are answered from it."""


@dataclass(frozen=True)
class Peer:
    """Address of another host's worker."""

    address: str
    port: int


@dataclass(frozen=True)
class TrafficCommand:
    """A command to a worker.

    ``start`` has the peers by host (port 0: none) and what to do with them; ``burst`` a new
    pattern; ``probe`` the number of samples and the longest time for them.
    """

    action: Literal["start", "burst", "pause", "resume", "probe"]
    peers: tuple[Peer, ...] = ()
    flows: tuple[Flow, ...] = ()
    pattern: Pattern | None = None
    probe: Probe | None = None
    samples: int = 0
    seconds: float = 0.0
    paused: bool = False
    """If set, ``start`` makes flows send nothing before ``resume``."""


@dataclass(frozen=True)
class TrafficEvent:
    """An event of a worker.

    ``ready``: it listens on ``port``; ``joined``: all its peers have answered the handshake;
    ``counts``: bytes by flow; ``samples``: seconds of operations; ``probed``: no more samples
    follow.
    """

    event: Literal["ready", "joined", "counts", "samples", "probed"]
    port: int = 0
    congestion: str = ""
    """Congestion control of the host's kernel."""
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()
    late: float = 0.0
    """Seconds of bursts that were dropped because the path is too slow for the load."""
    samples: tuple[float, ...] = ()
