"""Results of hardware checks that adapters of devices report. Standard library alone.

An adapter has two sources: the vendor's management library, of which
:meth:`.Accelerator.read_health` returns a :class:`DeviceReading`, and short measurements, of which
:meth:`.Accelerator.measure_rates` returns :class:`Rate` values. :mod:`flagscale.health` decides
what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rate:
    """A measured rate of a device. Higher is better."""

    name: str
    """Name of the measurement, such as ``matrix product``. Equal names are compared."""
    value: float
    unit: str


@dataclass(frozen=True)
class DeviceReading:
    """State of one device as its vendor's management library reports it.

    Keys name the property, such as ``row remapping``, and stay the same between two readings of the
    same state.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    """Sentences about states in which a device must not be used."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Sentences about states that the user should know and that need not affect a run."""
    widths: Mapping[str, float] = field(default_factory=dict)
    """Properties that equal devices share, such as the number of active links. A lower value than
    most equal devices have is a fault."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings that may differ on purpose, such as a power limit. A lower value than most equal
    devices have is a warning."""
    other_processes: tuple[str, ...] = ()
    """Processes of others on the device. Its measured rates are not judged then."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further values for the page and JSON."""
    unread: str = ""
    """Reason why the library could not be asked; empty if it was."""
