"""Entry point of a worker that checks the hardware of its host, started by :mod:`.session`.

It sends ``ready`` and then answers commands until its controller ends it.
"""

from __future__ import annotations

import os
import sys

from flagscale.errors import ConfigError
from flagscale.health.messages import HealthCommand, WorkerSettings
from flagscale.hosts import probe
from flagscale.hosts.workers.control import ControlChannel


def run(settings: WorkerSettings) -> int:
    """Run a worker until its controller or its lifetime ends it."""
    _apply_environment(settings)
    channel = ControlChannel(HealthCommand, settings.seconds, settings.seconds)
    try:
        # Imports torch, which reads the variables.
        from flagscale.health.measure import HostMeter

        meter = HostMeter(settings)
    except (ConfigError, ImportError, OSError, RuntimeError) as error:
        channel.report_failure(str(error))
    channel.open()
    channel.send_event(meter.describe())
    while True:
        channel.send_event(meter.execute(channel.commands.get()))


def _apply_environment(settings: WorkerSettings) -> None:
    """Set the variables of the ranks before torch and the vendor's libraries read them."""
    values = {
        name: probe.fill_references(list(parts), os.environ)
        for name, parts in settings.environment.items()
    }
    os.environ.update(values)
    # Packages there may register kinds of devices. The project goes first, as for ranks.
    sys.path.extend(path for path in values.get("PYTHONPATH", "").split(os.pathsep) if path)
