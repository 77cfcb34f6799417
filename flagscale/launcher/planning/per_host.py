"""Settings of one host: Python, project directory, shell commands and program arguments.

``device_type_specific`` and then ``node_specific`` override the values that all hosts share. Each
host is resolved from the experiment itself, so that settings of one host do not leak into the next.
Pure functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.schema import PROJECT, Experiment, HostOverride, Task
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import read_source

_COMMAND_NAMES = ("before_start", "after_stop")


@cache
def read_script_part(name: str) -> str:
    """Return a part of a host's script from a file in this directory, without its first comment."""
    return read_source(Path(__file__).with_name(name)).partition("\n\n")[2].rstrip("\n")


@dataclass(frozen=True)
class HostSettings:
    """Settings of one host. ``origins`` are pairs of key and value, one for each setting that is
    specific to this host or its device type.
    """

    python: str | None
    conda: str | None
    build_dir: Path | None
    before_start: str
    after_stop: str
    train: TrainArguments
    """Arguments of the training program on this host."""
    origins: tuple[tuple[str, str], ...] = ()

    @property
    def setup(self) -> str:
        """Shell commands that put the host's Python first in PATH."""
        text = ""
        if self.conda:
            text += f"{read_script_part('conda.sh')}\nconda activate {shlex.quote(self.conda)}\n"
        if self.python and "/" in self.python:
            directory = shlex.quote(str(PurePosixPath(self.python).parent))
            text += f'export PATH={directory}"${{PATH:+:$PATH}}"\n'
        return text


def resolve_settings(experiment: Experiment, host: Host) -> HostSettings:
    """Resolve the settings of one host."""
    layers: list[tuple[str, HostOverride]] = []
    if host.device_type is not None and host.device_type in experiment.by_type:
        override = experiment.by_type[host.device_type]
        layers.append((f"device_type_specific.{host.device_type}", override))
    if host.name in experiment.by_host:
        layers.append((f"node_specific.{host.name}", experiment.by_host[host.name]))
    origins: list[tuple[str, str]] = []
    runner, cmds = experiment.runner, experiment.cmds
    values: dict[str, Any] = {
        "build_dir": runner.build_dir,
        "python": runner.python,
        "conda": runner.conda,
        "before_start": cmds.before_start,
        "after_stop": cmds.after_stop,
    }
    for origin, layer in layers:
        for name in values:
            value = getattr(layer, name)
            if value is not None:
                values[name] = value
                key = f"{origin}.cmds.{name}" if name in _COMMAND_NAMES else f"{origin}.{name}"
                origins.append((key, str(value)))
    train = experiment.train
    for _, layer in layers:
        train = train.overlaid(layer.arguments)
        origins += [
            (argument.key, "" if argument.value is None else f"{argument.value}")
            for argument in layer.arguments.entries
        ]
    return HostSettings(**values, train=train, origins=tuple(origins))


def resolve_all_settings(experiment: Experiment, hosts: Iterable[Host]) -> tuple[HostSettings, ...]:
    """Resolve the settings of every host, in order.

    Hosts of one device type without overrides of their own share one object, so that few of
    thousands of hosts are resolved.
    """
    resolved: dict[tuple[str | None, str | None], HostSettings] = {}
    settings_of_hosts = []
    for host in hosts:
        key = (host.device_type, host.name if host.name in experiment.by_host else None)
        if key not in resolved:
            resolved[key] = resolve_settings(experiment, host)
        settings_of_hosts.append(resolved[key])
    return tuple(settings_of_hosts)


def program_path(task: Task, project: Path) -> Path:
    """Return the path of a task's program on a host with this project in ``project``."""
    return task.entrypoint if task.is_copied else rebase_path(task.entrypoint, project)


def rebase_path(path: Path, project: Path) -> Path:
    """Return a path inside this project relative to the project's directory on another host."""
    if project == PROJECT or not path.is_relative_to(PROJECT):
        return path
    return project / path.relative_to(PROJECT)
