"""Host assignments of a run: the facts known about each host and the ranks that run there.

Devices are counted without torch. All functions except :func:`this_machine` are pure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.accelerators.registry import AUTO, list_device_accelerators
from flagscale.accelerators.visible import (
    choose_visible_kind,
    count_automatic_ranks,
    count_visible_devices,
)
from flagscale.config.interpolation import references, split_references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts import probe
from flagscale.hosts.hostfile import Host, smallest_limit
from flagscale.launcher.planning.model import HostAssignment, Machine
from flagscale.launcher.planning.per_host import HostSettings, resolve_all_settings

if TYPE_CHECKING:
    from flagscale.hosts.facts import HostFacts


def this_machine() -> Machine:
    """Return the properties of the machine that this process runs on."""
    return Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd(),
        cpus=len(os.sched_getaffinity(0)),
        devices={kind.name: kind.count_devices() for kind in list_device_accelerators()},
        environment=dict(os.environ),
    )


def describe_machines(
    experiment: Experiment, hosts: Sequence[Host], facts: Mapping[int, HostFacts], *, here: bool
) -> list[Machine]:
    """Return the machine of each host, in order.

    Args:
        facts: Results of the host probe by node rank. A host without a result gets a machine with
            unknown cores and devices.
        here: True if this machine is the only host. Otherwise nothing of this machine's environment
            reaches the hosts.
    """
    if here:
        return [this_machine()]
    unknown = Machine(
        python=sys.executable,
        project=PROJECT,
        # Where files are not shared, this working directory may not exist.
        workdir=None if experiment.runner.no_shared_fs else Path.cwd(),
        cpus=None,
        devices=None,
    )
    return [
        unknown
        if (host_facts := facts.get(node_rank)) is None
        else replace(
            unknown,
            cpus=host_facts.cpus,
            devices=host_facts.devices,
            interface=host_facts.interface if len(hosts) > 1 else None,
        )
        for node_rank in range(len(hosts))
    ]


def assign_ranks(
    experiment: Experiment,
    hosts: Sequence[Host],
    machines: Sequence[Machine],
    settings: Sequence[HostSettings] | None = None,
) -> tuple[HostAssignment, ...]:
    """Assign ranks to the hosts, numbering hosts and ranks in the order of the hosts.

    Args:
        machines: Machine of each host.
        settings: Settings of each host, if they have been resolved already.
    """
    assignments: list[HostAssignment] = []
    first_rank = 0
    adapted: dict[tuple[int, int], Machine] = {}
    settings = resolve_all_settings(experiment, hosts) if settings is None else settings
    device = requested_device(experiment)
    for node_rank, (host, probed, host_settings) in enumerate(
        zip(hosts, machines, settings, strict=True)
    ):
        # Identical hosts share one machine object, as they share their settings.
        key = (id(probed), id(host_settings))
        if key not in adapted:
            default_python = "python" if host_settings.conda else probed.python
            adapted[key] = replace(
                probed,
                python=host_settings.python or default_python,
                project=host_settings.build_dir or probed.project,
            )
        machine = adapted[key]
        nproc = count_ranks(experiment, host, machine, device)
        assignments.append(
            HostAssignment(node_rank, nproc, first_rank, host, machine, host_settings)
        )
        first_rank += nproc
    return tuple(assignments)


def requested_device(experiment: Experiment) -> str:
    """Return the kind of device that the YAML requests; automatic for an external program.

    An external program may use the key ``device`` for something else.
    """
    return AUTO if experiment.task.external else str(experiment.train["device"])


def count_ranks(experiment: Experiment, host: Host, machine: Machine, device: str) -> int:
    """Return the number of ranks on a host. ``device`` is the kind of device that the YAML
    requests.
    """
    inherited, devices = machine.environment, machine.devices
    configured = {
        name: split_references(name, value)
        for name, value in experiment.envs.for_host(host.name, host.device_type).items()
        # The environment of another host is unknown here, so references to it limit nothing.
        if inherited or not references(value)
    }
    environment = {
        **inherited,
        **{name: probe.fill_references(value, inherited) for name, value in configured.items()},
    }
    nproc = experiment.runner.nproc_per_node
    if nproc is None and experiment.task.is_command:
        return 1
    if nproc == "auto":
        nproc = None if devices is None else count_automatic_ranks(environment, devices, device)
    kind = choose_visible_kind(device, devices or {}, environment)
    return smallest_limit(host.slots, nproc, count_visible_devices(environment, kind))
