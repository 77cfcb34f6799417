"""Description of background traffic: hosts, flows, their pattern, and the probe.

An :class:`Environment` holds all of it, and is stored as JSON (:mod:`.environment`). A *flow* is a
stream of bursts from one host to another. The *probe* is a small operation between the same hosts,
whose times show the effect of the traffic. Imported on the hosts too, with the standard library
alone.

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
    """A host that takes part in flows or in the probe. ``via``, ``user``, ``port`` and ``proxy``
    describe the connection to it (:class:`~flagscale.hosts.connection.Endpoint`).
    """

    name: str
    addr: str
    """Address for the probe, and for flows without an address of their own."""
    flow_addr: str | None = None
    """Address for flows on another network than the probe's, used for control experiments."""
    via: str = "ssh"
    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class Flow:
    """Stream of bursts from one host to another, by their indices in :attr:`Environment.hosts`."""

    source: int
    target: int


@dataclass(frozen=True)
class Pattern:
    """Bursts that each flow sends. The time of a burst does not depend on the end of the previous
    one, so that a delayed burst does not reduce the load.
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
    """Messages over TCP between the hosts, one operation at a time, whose times show the effect of
    the traffic.
    """

    kind: ProbeKind = "ring"
    """``ring``: the messages of a ring all_reduce among all hosts, without computing sums.
    ``echo``: a message to the second host and back.
    """
    size: int = 256 << 10
    """Size of the tensor or message. Under the same traffic a larger size has a smaller ratio."""

    @property
    def label(self) -> str:
        """Such as ``ring of 256 KiB``."""
        return f"{self.kind} of {format_bytes(self.size)}"


@dataclass(frozen=True)
class ProbeResult:
    """Statistics of the probe's times."""

    samples: int
    median: float
    p99: float
    ratio: float
    """p99 ÷ p50."""
    low: float
    high: float
    """``low`` to ``high``: 95 % confidence interval of the ratio, by a block bootstrap."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def label(self) -> str:
        """Such as ``1.52 [1.44, 1.60], 800 samples``."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}], {self.samples} samples"


@dataclass(frozen=True)
class Environment:
    """Traffic that can be generated again, and its measured effect on the probe. Stored as JSON."""

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
        """Return the same flows over another network, with the probe on its own.

        Used for control experiments: traffic on a link that is not connected to the measured one.

        Args:
            addresses: address of each host on the other network, by host name.
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
    """Return flows among ``count`` hosts.

    ``pairs``: in both directions between hosts 0 and 1, 2 and 3, and so on; the last of an odd
    number is paired with host 0. ``ring``: from each host to the next one. ``all``: from each host
    to every other one.
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
    """Return a label of each flow, such as ``h00 → h01``; by default of all flows."""
    hosts = environment.hosts
    chosen = environment.flows if flows is None else flows
    return [f"{hosts[flow.source].name} → {hosts[flow.target].name}" for flow in chosen]
