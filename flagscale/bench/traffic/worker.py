"""Worker of the traffic on a host: serves its flows or its part of the probe. Standard library
alone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flagscale.bench.traffic import flows, ring
from flagscale.bench.traffic.messages import TrafficCommand, WorkerSettings
from flagscale.hosts.workers.control import ControlChannel

_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def run(settings: WorkerSettings) -> int:
    """Run a worker; this process does not return from it."""
    channel = ControlChannel(TrafficCommand, settings.seconds, settings.lease)
    _raise_priority(settings)
    serve = flows.serve if settings.role == "flows" else ring.serve
    try:
        serve(settings, channel, congestion_control())
    except (OSError, ValueError) as error:
        channel.report_failure(str(error))
    return 0


def _raise_priority(settings: WorkerSettings) -> None:
    """Run before the host's computations, where this user may: the network is measured, not the
    scheduler. The probe works little, and only while it is asked to."""
    with suppress(OSError):
        if settings.role == "probe":
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        else:
            os.nice(-10)


def congestion_control() -> str:
    """Return the name of the kernel's TCP congestion control."""
    try:
        return _CONGESTION_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
