"""Traffic as dataclasses: hosts, flows, their pattern, and the probe that measures them.
Standard library alone: hosts read it too.

Sizes are in bytes, times in seconds, rates in bit/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Distribution = Literal["constant", "exponential", "pareto"]
"""Distribution of sizes and gaps; see :mod:`.distributions`."""
FlowLayout = Literal["pairs", "ring", "all"]
ProbeKind = Literal["ring", "echo"]
PROBE_KINDS: tuple[ProbeKind, ...] = ("ring", "echo")
DISTRIBUTIONS: tuple[Distribution, ...] = ("constant", "exponential", "pareto")
FLOW_LAYOUTS: tuple[FlowLayout, ...] = ("pairs", "ring", "all")

SMALLEST_BURST, LARGEST_BURST = 1 << 10, 64 << 20
"""Limits of a burst in bytes, on any path that calibration supports."""


@dataclass(frozen=True)
class TrafficHost:
    """A host with flows or a part of the probe. ``via``, ``user``, ``port`` and ``proxy``
    describe the connection to it (:class:`~flagscale.hosts.connection.Endpoint`).
    """

    name: str
    addr: str
    """Address for the probe, and for flows without an address of their own."""
    flow_addr: str | None = None
    """Address for flows on another network than the probe's, as a control."""
    via: str = "ssh"
    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class Flow:
    """Bytes from one host to another, by their indices in :attr:`Environment.hosts`."""

    source: int
    target: int


@dataclass(frozen=True)
class Pattern:
    """Bursts that each flow sends. Their times are drawn in advance, so that a delayed burst
    does not reduce the load.
    """

    rate: float
    """Rate of the path."""
    load: float
    """Mean rate of each flow; below ``rate``."""
    burst: float
    """Mean size of a burst."""
    transport: Literal["tcp", "udp"] = "tcp"
    bursts: Distribution = "exponential"
    gaps: Distribution = "exponential"
    peak: float | None = None
    """Highest rate within a burst. None: unlimited for TCP, ``rate`` for UDP."""
    seed: int = 0

    @property
    def gap(self) -> float:
        """Mean time between the end of a burst at ``rate`` and the next one."""
        return 8 * self.burst * (1 / self.load - 1 / self.rate)


@dataclass(frozen=True)
class Probe:
    """Messages over TCP between the hosts that measure the traffic's effect, one operation at a
    time.
    """

    kind: ProbeKind = "ring"
    """``ring``: the messages of a ring all_reduce among all hosts, without computing sums.
    ``echo``: to the second host and back.
    """
    size: int = 256 << 10
    """Size of the tensor or message. The same traffic gives a larger size a smaller ratio."""

    @property
    def label(self) -> str:
        """Such as ``ring of 256 KiB``."""
        return f"{self.kind} of {format_bytes(self.size)}"


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe; times in seconds."""

    samples: int
    median: float
    p99: float
    ratio: float
    """p99 ÷ p50."""
    low: float
    high: float
    """95 % interval of the ratio, by a block bootstrap."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def label(self) -> str:
        """Such as ``1.52 [1.44, 1.60], 800 samples``."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}], {self.samples} samples"


@dataclass(frozen=True)
class Environment:
    """Traffic that can be played, and its measured effect on the probe. Stored as JSON."""

    hosts: tuple[TrafficHost, ...]
    flows: tuple[Flow, ...]
    pattern: Pattern
    probe: Probe = Probe()
    target: float | None = None
    """Requested ratio; None if nothing was calibrated."""
    tolerance: float = 0.0
    found: ProbeResult | None = None
    """Result of the probe with the traffic when it was calibrated."""
    idle: ProbeResult | None = None
    """Result of the probe without traffic."""
    congestion: tuple[tuple[str, str], ...] = ()
    """Congestion control of each host's kernel."""
    date: str = ""

    @property
    def reached(self) -> bool:
        """True if the result is the target, within the tolerance."""
        if self.target is None or self.found is None:
            return False
        return abs(self.found.ratio - self.target) <= self.tolerance

    def on_network(self, addresses: Mapping[str, str]) -> Environment:
        """Return the same flows over another network, by host name; the probe stays where it is.
        Used as a control: traffic on a link that is not connected to the measured one.
        """
        return replace(
            self,
            hosts=tuple(
                replace(s, flow_addr=addresses.get(s.name, s.flow_addr)) for s in self.hosts
            ),
            found=None,
        )


def default_tolerance(target: float) -> float:
    """Return a fifteenth of the target: 0.1 at 1.5, 0.2 at 3."""
    return round(target / 15, 3)


def flows_between(count: int, between: FlowLayout) -> tuple[Flow, ...]:
    """Return flows among ``count`` hosts in both directions: between neighbours two by two (the
    last of an odd number with the first), around a ring, or between every two.
    """
    if between == "all":
        return tuple(Flow(a, b) for a in range(count) for b in range(count) if a != b)
    if between == "ring":
        return tuple(Flow(a, (a + 1) % count) for a in range(count))
    pairs = [(a, (a + 1) % count) for a in range(0, count, 2)]
    return tuple(flow for a, b in pairs for flow in (Flow(a, b), Flow(b, a)))


def format_bytes(size: float) -> str:
    """Format a size, such as ``256 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def format_rate(rate: float) -> str:
    """Format a rate, such as ``250 Mbit/s``."""
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} Gbit/s"


def flow_names(environment: Environment, flows: Sequence[Flow] | None = None) -> list[str]:
    """Return the flows in words, such as ``h00 → h01``."""
    hosts = environment.hosts
    chosen = environment.flows if flows is None else flows
    return [f"{hosts[flow.source].name} → {hosts[flow.target].name}" for flow in chosen]
