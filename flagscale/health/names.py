"""Names of the checks, as tables, JSON and documentation show them."""

from __future__ import annotations

ALL_REDUCE = "all_reduce within the host"
EXCHANGE = "exchange with hosts"
DEVICE_STATE = "device state"
HARDWARE = "hardware"
"""Check that a host could be measured at all."""
