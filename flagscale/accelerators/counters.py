"""Counters of a device, as its vendor's management library reports them. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceCounters:
    """Current counters of one device; None where the device does not report one."""

    index: int
    """Number of the device on this host, in the vendor's order."""
    uuid: str
    product: str
    utilization: float | None = None
    """Share of the last sampling period in which the device was busy, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
