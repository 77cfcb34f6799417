"""Offloaded states of the optimizer on a machine without a device."""

from __future__ import annotations

import pytest

from flagscale.accelerators.device import Device


def update_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU update states as a device does, from copies of them."""
    monkeypatch.setattr(Device, "is_host", False)
    monkeypatch.setattr(Device, "register_host_memory", lambda *_: True)
