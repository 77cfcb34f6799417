"""Names of the checks, as tables, JSON and documentation show them."""

from __future__ import annotations

ALL_RATES = "all rates together"
"""Comparison of hosts without devices by the mean of their rates."""
ALL_REDUCE = "all_reduce within the host"
EXCHANGE = "exchange with hosts"
DEVICE_STATE = "device state"
HARDWARE = "hardware"
"""Check that a host could be measured at all."""


def format_rate(value: float) -> str:
    """Return a rate with three digits, or more before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
