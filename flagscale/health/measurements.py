"""Measurements of all hosts in one pass. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagscale.health.messages import DeviceMeasurement, PairMeasurement


@dataclass(frozen=True)
class HostMeasurement:
    """Measurements of one host."""

    devices: tuple[DeviceMeasurement, ...] = ()
    pairs: tuple[PairMeasurement, ...] = ()
    has_address: bool = True
    """False if the host takes no part in pairs, because it has no address for other hosts."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of one pass by the index of the host, and the reasons of hosts that could not be
    measured."""

    hosts: Mapping[int, HostMeasurement]
    failures: Mapping[int, str] = field(default_factory=dict)
