"""Entry point of a traffic worker on a host, started by :mod:`.session`.

A worker serves either the host's flows (:mod:`.flows`) or its part of the probe (:mod:`.ring`).
Standard library alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flagscale.bench.traffic import flows, ring
from flagscale.bench.traffic.messages import TrafficCommand, WorkerSettings
from flagscale.hosts.workers.control import ControlChannel

_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def run(settings: WorkerSettings) -> int:
    """Run a worker until its process ends. Returns 0 after an error, which was reported."""
    channel = ControlChannel(TrafficCommand, settings.seconds, settings.lease)
    _raise_priority(settings)
    serve = flows.serve if settings.role == "flows" else ring.serve
    try:
        serve(settings, channel, congestion_control())
    except (OSError, ValueError) as error:
        channel.report_failure(str(error))
    return 0


def _raise_priority(settings: WorkerSettings) -> None:
    """Raise this process's priority above the host's computations, if the user is permitted to.
    Otherwise the probe would measure the CPU scheduler, not the network. The real-time priority of
    the probe is safe, because it runs only while samples are requested.
    """
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
