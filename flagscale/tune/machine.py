"""Devices, hosts and links of a layout, as far as its time depends on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flagscale.estimate.op_times import DevicePeaks
from flagscale.estimate.plan import GIB, DeviceSpec

_NETWORK_BYTES_PER_SECOND = 45e9
"""Bandwidth per rank between hosts: a 400 Gbit/s adapter for each device."""
_LINK_LATENCY_SECONDS = 12e-6
_NETWORK_LATENCY_SECONDS = 30e-6
"""Latency of a collective within a host, and between hosts."""

_CORE_FLOPS = 100e9
"""FLOP per second that a core of a CPU with AVX-512 reaches in fp32 GEMMs."""
_CORE_BYTES_PER_SECOND = 8e9
_CPU_KERNEL_SECONDS = 40e-6
"""Time of an operation on small tensors, with its share of Python."""
_CPU_LINK_BYTES_PER_SECOND = 1.5e9
_CPU_LATENCY_SECONDS = 1e-3
"""Latency of a collective of gloo: less than docs/results/comm-cpu.json has on a busy machine."""


@dataclass(frozen=True)
class Machine:
    """Identical ranks on hosts.

    ``cores`` is the number of cores per host that its ranks share, None if each has a device of
    its own. ``is_known`` is True if the constants were measured on such devices; otherwise only
    the order of layouts is predicted, until one has been measured. ``memory_gib`` is the memory of
    a device, None if it is not limited or unknown.
    """

    ranks: int
    ranks_per_host: int
    peaks: DevicePeaks
    memory_gib: float | None = None
    cores: int | None = None
    network_bytes_per_second: float = _NETWORK_BYTES_PER_SECOND
    link_latency_seconds: float = _LINK_LATENCY_SECONDS
    network_latency_seconds: float = _NETWORK_LATENCY_SECONDS
    is_known: bool = False
    name: str = ""

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def link(self, group: int, stride: int = 1) -> tuple[float, float]:
        """Return bandwidth and latency of the slowest link of a group of ranks.

        Args:
            group: Number of ranks.
            stride: Distance between their numbers.
        """
        if group * stride <= self.ranks_per_host:
            return self.peaks.link_bytes_per_second, self.link_latency_seconds
        return self.network_bytes_per_second, self.network_latency_seconds

    def with_hosts(self, hosts: int) -> Machine:
        """Return the same devices on another number of hosts."""
        return replace(self, ranks=hosts * self.ranks_per_host)

    def describe(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        count = f"{ranks} on {self.hosts} host{'s' * (self.hosts > 1)}"
        return f"{count}, {self.name}" if self.name else count


def make_gpu_machine(
    ranks: int, ranks_per_host: int, spec: DeviceSpec | None, configured_peak: float | None
) -> Machine:
    """Return a machine of devices of which each rank has one. An unknown device counts as an
    H100, whose speed the first measurement corrects.
    """
    peak = configured_peak or (spec.peak if spec is not None else None)
    bandwidth = spec.bandwidth if spec is not None else None
    return Machine(
        ranks,
        ranks_per_host,
        DevicePeaks(1e12 * (peak or 989.0), None if bandwidth is None else 1e9 * bandwidth),
        memory_gib=spec.memory if spec is not None else None,
        is_known=peak is not None,
        name=spec.kind if spec is not None else "devices of unknown type",
    )


def make_cpu_machine(
    ranks: int, ranks_per_host: int, cores: int, host_bytes: int | None = None
) -> Machine:
    """Return a machine whose ranks share the cores of their host, and its memory if it is known."""
    threads = max(cores // ranks_per_host, 1)
    return Machine(
        ranks,
        ranks_per_host,
        DevicePeaks(
            _CORE_FLOPS * threads,
            _CORE_BYTES_PER_SECOND * threads,
            kernel_seconds=_CPU_KERNEL_SECONDS,
            launch_seconds=0.0,
            link_bytes_per_second=_CPU_LINK_BYTES_PER_SECOND,
        ),
        memory_gib=None if host_bytes is None else host_bytes / ranks_per_host / GIB,
        cores=cores,
        link_latency_seconds=_CPU_LATENCY_SECONDS,
        network_latency_seconds=4 * _CPU_LATENCY_SECONDS,
        network_bytes_per_second=_CPU_LINK_BYTES_PER_SECOND / 2,
        name=f"{cores} CPU cores each" if ranks > ranks_per_host else f"{cores} CPU cores",
    )
