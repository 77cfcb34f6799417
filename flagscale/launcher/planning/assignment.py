"""Assignment of ranks to hosts: properties of each host's machine, and the ranks that run on it.

Devices are counted without torch. All functions except :func:`this_machine` are pure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flagscale.accelerators.registry import AUTO, list_device_accelerators
from flagscale.accelerators.visible import (
    choose_visible_kind,
    count_automatic_ranks,
    count_visible_devices,
)
from flagscale.config.interpolation import host_references, split_references
from flagscale.config.schema import PROJECT, Environments, Experiment
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
    hosts: Sequence[Host], facts: Mapping[int, HostFacts], *, is_local: bool, shared_fs: bool
) -> list[Machine]:
    """Return the machine of each host, in order.

    Args:
        hosts: Hosts that take part.
        facts: Results of the host probe by node rank. A host without a result gets a machine with
            unknown cores and devices.
        is_local: True if this machine is the only host. Otherwise nothing of this machine's
            environment is passed to the hosts.
        shared_fs: True if the working directory of this machine exists on the hosts too.
    """
    if is_local:
        return [this_machine()]
    unprobed_machine = Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd() if shared_fs else None,
        cpus=None,
        devices=None,
    )
    return [
        unprobed_machine
        if (host_facts := facts.get(node_rank)) is None
        else replace(
            unprobed_machine,
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
        machines: Machine of each host. Spares come last.
        settings: Settings of each host, if they have been resolved already.
    """
    assignments: list[HostAssignment] = []
    first_rank = 0
    adapted_machines: dict[tuple[int, int], Machine] = {}
    settings = resolve_all_settings(experiment, hosts) if settings is None else settings
    device = requested_device(experiment)
    nproc_per_node = experiment.runner.nproc_per_node
    runs_once = experiment.task.is_command and nproc_per_node is None
    for node_rank, (host, probed, host_settings) in enumerate(
        zip(hosts, machines, settings, strict=True)
    ):
        # Identical hosts share one machine object, as they share their settings.
        key = (id(probed), id(host_settings))
        if key not in adapted_machines:
            default_python = "python" if host_settings.conda else probed.python
            adapted_machines[key] = replace(
                probed,
                python=host_settings.python or default_python,
                project=host_settings.build_dir or probed.project,
            )
        machine = adapted_machines[key]
        nproc = (
            1 if runs_once else count_ranks(host, machine, experiment.envs, nproc_per_node, device)
        )
        is_spare = node_rank >= len(hosts) - experiment.runner.spares
        assignments.append(
            HostAssignment(node_rank, nproc, first_rank, host, machine, is_spare=is_spare)
        )
        first_rank += nproc
    return tuple(assignments)


def requested_device(experiment: Experiment) -> str:
    """Return the kind of device that the YAML requests; automatic for an external program.

    An external program may use the key ``device`` for something else.
    """
    return AUTO if experiment.task.external else str(experiment.train["device"])


def count_ranks(
    host: Host,
    machine: Machine,
    envs: Environments,
    nproc_per_node: int | Literal["auto"] | None,
    device: str,
) -> int:
    """Return the number of ranks on a host.

    Args:
        envs: Variables of the ranks, which may hide devices.
        nproc_per_node: Number of ranks that the YAML requests, ``auto`` for one per device. A
            smaller limit of the hostfile or of the visible devices takes precedence.
        device: Kind of device that the YAML requests.
    """
    inherited, devices = machine.environment, machine.devices
    configured = {
        name: split_references(name, value)
        for name, value in envs.for_host(host.name, host.device_type).items()
        # The environment of another host is unknown here, so references to it limit nothing.
        if inherited or not host_references(value)
    }
    environment = {
        **inherited,
        **{name: probe.fill_references(value, inherited) for name, value in configured.items()},
    }
    if nproc_per_node == "auto":
        requested = None if devices is None else count_automatic_ranks(environment, devices, device)
    else:
        requested = nproc_per_node
    kind = choose_visible_kind(device, devices or {}, environment)
    return smallest_limit(host.slots, requested, count_visible_devices(environment, kind))
