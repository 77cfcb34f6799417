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
    host_index: int
    """Index in :attr:`.spec.Environment.hosts`."""
    session_key: str
    """Secret key of the session's handshakes and tallies (:mod:`.handshake`), in hexadecimal
    digits.
    """
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

    - ``start``: ``peers`` by the index of their host (port 0: no worker there). A worker of flows
      gets ``flows`` with their ``pattern``, one of the probe gets ``probe``;
    - ``burst``: the new ``pattern``;
    - ``pause`` and ``resume``: none;
    - ``sample``, to host 0's worker of the probe: take ``samples`` samples, but stop after
      ``seconds``, with at least one sample.
    """

    action: Literal["start", "burst", "pause", "resume", "sample"]
    peers: tuple[Peer, ...] = ()
    flows: tuple[Flow, ...] = ()
    pattern: Pattern | None = None
    probe: Probe | None = None
    samples: int = 0
    seconds: float = 0.0
    paused: bool = False
    """For ``start``: flows send nothing before ``resume``."""


@dataclass(frozen=True)
class TrafficEvent:
    """An event of a worker.

    - ``ready``: the worker listens on ``port``;
    - ``joined``: all its peers have answered the handshake;
    - ``counts``: ``sent``, ``received`` and ``dropped_seconds``, all since the start;
    - ``samples``: more ``samples``;
    - ``sampled``: the last ``sample`` command is complete.
    """

    event: Literal["ready", "joined", "counts", "samples", "sampled"]
    port: int = 0
    congestion: str = ""
    """Congestion control of the host's kernel."""
    sent: tuple[tuple[int, int], ...] = ()
    """Pairs (index of a flow, bytes), of the flows that this host sends."""
    received: tuple[tuple[int, int], ...] = ()
    """The same of the flows that this host receives."""
    dropped_seconds: float = 0.0
    """Time of the flows' schedules whose bursts were dropped because the path is too slow for the
    load, summed over the flows that this host sends.
    """
    samples: tuple[float, ...] = ()
    """Durations of operations of the probe."""
