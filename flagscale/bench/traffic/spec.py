"""What traffic is: sites, flows, their pattern, and the probe that feels them. Standard library
alone: hosts read it too.

Sizes are bytes, times seconds, rates bit/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Law = Literal["constant", "exponential", "pareto"]
"""How sizes and gaps are distributed; see :mod:`.laws`."""
Between = Literal["pairs", "ring", "all"]
Kind = Literal["ring", "echo"]
KINDS: tuple[Kind, ...] = ("ring", "echo")
LAWS: tuple[Law, ...] = ("constant", "exponential", "pareto")
BETWEEN: tuple[Between, ...] = ("pairs", "ring", "all")

SMALLEST_BURST, LARGEST_BURST = 1 << 10, 64 << 20
"""Bytes. Beyond these a burst is no burst on any path that calibration knows."""


@dataclass(frozen=True)
class Site:
    """A host that traffic touches. ``via``, ``user``, ``port`` and ``proxy`` are how it is reached
    (:class:`~flagscale.hosts.executor.Endpoint`)."""

    name: str
    addr: str
    """Where the other sites reach it: the probe's path, and the flows' where these have none."""
    flow_addr: str | None = None
    """Where flows reach it instead: another network than the probe's, for a control."""
    via: str = "ssh"
    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class Flow:
    """Bytes from one site to another, by their numbers in :attr:`Environment.hosts`."""

    source: int
    target: int


@dataclass(frozen=True)
class Pattern:
    """What each flow sends: bursts at times that are drawn in advance, so that one that is held up
    does not lower the load."""

    rate: float
    """The path's own, bit/s."""
    load: float
    """Of each flow on average, bit/s; below ``rate``."""
    burst: float
    """Mean bytes of a burst."""
    transport: Literal["tcp", "udp"] = "tcp"
    bursts: Law = "exponential"
    gaps: Law = "exponential"
    peak: float | None = None
    """The most within a burst, bit/s. None: TCP as fast as it goes, UDP ``rate``."""
    seed: int = 0

    @property
    def gap(self) -> float:
        """Mean seconds between the end of a burst at ``rate`` and the next one."""
        return 8 * self.burst * (1 / self.load - 1 / self.rate)


@dataclass(frozen=True)
class Probe:
    """What feels the traffic: messages over TCP between the sites, one operation at a time."""

    kind: Kind = "ring"
    """``ring``: those of a ring all_reduce among all sites, without its sums. ``echo``: to the
    second site and back."""
    size: int = 256 << 10
    """Bytes of the tensor, or of the message. The same traffic gives a large one a small ratio."""

    @property
    def words(self) -> str:
        """Such as ``ring of 256 KiB``."""
        return f"{self.kind} of {binary(self.size)}"


@dataclass(frozen=True)
class Found:
    """What a probe felt. Times in seconds."""

    samples: int
    median: float
    p99: float
    ratio: float
    """p99 ÷ p50."""
    low: float
    high: float
    """The 95 % interval of the ratio, by a bootstrap of blocks."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def words(self) -> str:
        """Such as ``1.52 [1.44, 1.60], 800 samples``."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}], {self.samples} samples"


@dataclass(frozen=True)
class Environment:
    """Traffic that can be played, and what it was found to do to the probe."""

    hosts: tuple[Site, ...]
    flows: tuple[Flow, ...]
    pattern: Pattern
    probe: Probe = Probe()
    target: float | None = None
    """The ratio that was asked for; None: nothing was calibrated."""
    tolerance: float = 0.0
    found: Found | None = None
    """With the traffic, when it was calibrated."""
    idle: Found | None = None
    """Without it."""
    congestion: tuple[tuple[str, str], ...] = ()
    """Of each host the kernel's congestion control."""
    date: str = ""

    @property
    def reached(self) -> bool:
        """Whether what was found is the target, within its tolerance."""
        if self.target is None or self.found is None:
            return False
        return abs(self.found.ratio - self.target) <= self.tolerance

    def with_burst(self, burst: float) -> Environment:
        """The same with other bursts; nothing is known of it yet."""
        return replace(self, pattern=replace(self.pattern, burst=burst), found=None)

    def over(self, addresses: Mapping[str, str]) -> Environment:
        """The same flows over another network, by host; the probe stays where it is. For a control
        with traffic on a link that is not connected to the measured one."""
        return replace(
            self,
            hosts=tuple(
                replace(s, flow_addr=addresses.get(s.name, s.flow_addr)) for s in self.hosts
            ),
            found=None,
        )


def default_tolerance(target: float) -> float:
    """0.1 at 1.5, 0.2 at 3: a fifteenth."""
    return round(target / 15, 3)


def flows_between(count: int, between: Between) -> tuple[Flow, ...]:
    """Flows among ``count`` sites, both ways: of neighbours two by two (the last of an odd number
    with the first), around a ring, or of every two."""
    if between == "all":
        return tuple(Flow(a, b) for a in range(count) for b in range(count) if a != b)
    if between == "ring":
        return tuple(Flow(a, (a + 1) % count) for a in range(count))
    pairs = [(a, (a + 1) % count) for a in range(0, count, 2)]
    return tuple(flow for a, b in pairs for flow in (Flow(a, b), Flow(b, a)))


def binary(size: float) -> str:
    """Such as ``256 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def bits(rate: float) -> str:
    """Such as ``250 Mbit/s``."""
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} Gbit/s"


def names(environment: Environment, flows: Sequence[Flow] | None = None) -> list[str]:
    """The flows, such as ``h00 → h01``."""
    hosts = environment.hosts
    chosen = environment.flows if flows is None else flows
    return [f"{hosts[flow.source].name} → {hosts[flow.target].name}" for flow in chosen]
