"""Messages between the session and its workers, as JSON. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.accelerators.health import DeviceReading, Rate

VariableParts = tuple[str | tuple[str, str, str], ...]
"""Value of a variable, as :func:`flagscale.config.interpolation.split_references` splits it."""


@dataclass(frozen=True)
class WorkerSettings:
    """Argument of a worker."""

    device: str
    """Kind of device to measure, or ``auto``."""
    environment: dict[str, VariableParts]
    """Variables of the ranks."""
    address: str
    """Address for other hosts; empty: that of the interface towards ``other_hosts``."""
    other_hosts: tuple[str, ...]
    """Possible names and addresses of other hosts."""
    seconds: float
    """Longest life of the worker."""


@dataclass(frozen=True)
class PairRound:
    """One host's part of a round of pairs. ``name`` identifies the pair."""

    name: str
    partner: int
    """Index of the other host."""
    address: str
    """Address of the host with the lower index, which has the store for the rendezvous."""
    port: int
    leads: bool
    """True for the host with the lower index."""
    ranks: int
    """Number of ranks on either host."""


@dataclass(frozen=True)
class HealthCommand:
    """Command to a worker: measure the devices, or exchange data with another host."""

    seconds: float
    """Length of one window of a measurement."""
    pair: PairRound | None = None
    """The other host; None: measure this host's devices."""


@dataclass(frozen=True)
class DeviceMeasurement:
    """Measurement of one device."""

    label: str
    """Name of the device on its host, such as ``GPU 3``."""
    product: str
    """Vendor's name of the product, with the threads that measured it if it is a CPU."""
    machine: str = ""
    """Model of the host. Equal products in equal machines are compared."""
    is_host: bool = False
    """True for a process on the CPU, which it shares with the other processes of its host."""
    rates: tuple[Rate, ...] = ()
    reading: DeviceReading | None = None
    problem: str = ""
    """Reason why it could not be measured."""


@dataclass(frozen=True)
class PairMeasurement:
    """Exchange of data with another host. ``rates`` are in GB/s, by device."""

    partner: int
    rates: tuple[float, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class HealthEvent:
    """Event of a worker: it is ready, or has finished a command."""

    kind: Literal["ready", "measured", "paired"]
    device: str = ""
    """Kind of the host's devices, in the event ``ready``."""
    address: str = ""
    """This host's address for other hosts, in ``ready``; empty if it has none."""
    port: int = 0
    """Port of the store for rendezvous, in ``ready``."""
    ranks: int = 0
    """Number of processes that measure, one per device, in ``ready``."""
    devices: tuple[DeviceMeasurement, ...] = ()
    """Measurements in ``measured``; all_reduce within the host is one of the rates."""
    pairs: tuple[PairMeasurement, ...] = ()
    """Measurements in ``paired``."""
