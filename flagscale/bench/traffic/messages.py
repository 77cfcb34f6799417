"""Messages between a traffic session and its workers: settings, commands and events.

Imported on the hosts too, with the standard library alone. Times are in seconds, and a flow is
named by its index in :attr:`.spec.Environment.flows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.traffic.spec import Flow, Pattern, Probe


@dataclass(frozen=True)
class WorkerSettings:
    """Argument of a worker: its host, its role, and the address at which others connect to it."""

    role: Literal["flows", "probe"]
    number: int
    """Index of the host in :attr:`.spec.Environment.hosts`."""
    key: str
    """Key of the session, in hexadecimal digits."""
    seconds: float
    """Time after which the worker ends."""
    lease: float
    """Time without a command or renewal after which the worker ends."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    interface: str | None = None
    """Network interface for outgoing packets; None: by the host's routes."""
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

    Fields by action:

    - ``start``: ``peers`` by the index of their host (port 0: no worker there), and either
      ``flows`` with their ``pattern``, or the ``probe``;
    - ``burst``: the new ``pattern``;
    - ``probe``: the number of ``samples``, and ``seconds`` after which there may be fewer.
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

    - ``ready``: the worker listens on ``port``;
    - ``joined``: all its peers have answered the handshake;
    - ``counts``: ``sent`` and ``received`` bytes by flow since the start, and ``late``;
    - ``samples``: durations of the probe's operations;
    - ``probed``: no more samples follow.
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
