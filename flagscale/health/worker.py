"""Entry point of a worker that checks the hardware of its host, started by :mod:`.session`.

It sends ``ready`` and then answers commands until its controller ends it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from flagscale.errors import ConfigError
from flagscale.health.messages import HealthCommand, WorkerSettings
from flagscale.hosts import probe
from flagscale.hosts.workers.control import ControlChannel
from flagscale.hosts.workers.task import WorkerTask

ENTRY_POINT = "flagscale.health.worker:run"


def run(settings: WorkerSettings) -> int:
    """Run a worker until its controller or its lifetime ends it."""
    if settings.environment:
        _restart_in_environment(settings)
    channel = ControlChannel(HealthCommand, settings.seconds, settings.seconds)
    try:
        # Imports torch, of which only the hosts that are measured need one.
        from flagscale.health.measure import HostMeter

        meter = HostMeter(settings)
    except (ConfigError, ImportError, OSError, RuntimeError) as error:
        channel.report_failure(str(error))
    channel.open()
    channel.send_event(meter.describe())
    while True:
        channel.send_event(meter.execute(channel.commands.get()))


def _restart_in_environment(settings: WorkerSettings) -> None:
    """Replace this process with the same worker in the environment of the ranks, part of which the
    dynamic linker and Python read only at their start."""
    values = {
        name: probe.fill_references(list(parts), os.environ)
        for name, parts in settings.environment.items()
    }
    task = WorkerTask.create(ENTRY_POINT, replace(settings, environment={}))
    command = task.command
    os.execve(command[0], command, {**os.environ, **values, **task.to_environment()})
