"""What hosts are told and what they say: a line of JSON each. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.traffic.spec import Flow, Pattern, Probe


@dataclass(frozen=True)
class Order:
    """What one process on a host is for. It comes on stdin: the key shows in no process table."""

    role: Literal["flows", "probe"]
    number: int
    """The site's, in :attr:`.spec.Environment.hosts`."""
    key: str
    """Of the session, in hexadecimal digits."""
    seconds: float
    """After so long it ends, whatever happens."""
    lease: float
    """And after so long without a word."""
    port: int = 0
    """To be reached at; 0: a free one."""
    interface: str | None = None
    """Its packets leave by this one."""
    address: str = ""
    """By which flows reach this site: its datagrams have to come from there."""


@dataclass(frozen=True)
class Peer:
    """Where another site's process is reached."""

    address: str
    port: int


@dataclass(frozen=True)
class Word:
    """What a process is told later. ``go`` has the peers by site (port 0: none) and what to do with
    them; ``probe`` how many samples, and how long at most."""

    do: Literal["renew", "go", "burst", "pause", "resume", "probe", "end"]
    peers: tuple[Peer, ...] = ()
    flows: tuple[Flow, ...] = ()
    pattern: Pattern | None = None
    probe: Probe | None = None
    samples: int = 0
    seconds: float = 0.0
    held: bool = False
    """Flows send nothing before ``resume``."""


@dataclass(frozen=True)
class Said:
    """What a process says. ``ready``: where it is reached and told more; ``joined``: all its peers
    have answered; ``counts``: bytes by flow; ``samples``: seconds of operations; ``probed``: these
    were all that were asked for; ``failed``: why it ends."""

    event: Literal["ready", "joined", "counts", "samples", "probed", "failed"]
    text: str = ""
    pid: int = 0
    descriptor: int = 0
    pipe: str = ""
    port: int = 0
    congestion: str = ""
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()
    late: float = 0.0
    """Seconds that bursts were given up for, the path being too slow for the load."""
    samples: tuple[float, ...] = ()
