"""Host assignments of a run: the facts known about each host and the ranks that run there.

Devices are counted without torch. Everything but :func:`this_machine` is pure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.accelerators.registry import AUTO, accelerators
from flagscale.accelerators.visible import automatic_ranks, kind_of, visible_devices
from flagscale.config.checks import Arguments
from flagscale.config.interpolation import parts, references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts import probe
from flagscale.hosts.hostfile import Host, least
from flagscale.launcher.planning.model import Machine, HostAssignment
from flagscale.launcher.planning.per_host import Settings, all_settings

if TYPE_CHECKING:
    from flagscale.hosts.facts import Facts


def this_machine() -> Machine:
    return Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd(),
        cpus=len(os.sched_getaffinity(0)),
        devices={kind.name: kind.count() for kind in accelerators()},
        environment=dict(os.environ),
    )


def describe_machines(
    experiment: Experiment, hosts: Sequence[Host], facts: Mapping[int, Facts], *, here: bool
) -> list[Machine]:
    """The hosts as machines; ``here``: the only one is this machine. Nothing of this machine's
    environment reaches others; a host without an answer is one of which nothing is known."""
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
        if (known := facts.get(node_rank)) is None
        else replace(
            unknown,
            cpus=known.cpus,
            devices=known.devices,
            interface=known.interface if len(hosts) > 1 else None,
        )
        for node_rank in range(len(hosts))
    ]


def assign_ranks(
    experiment: Experiment,
    hosts: Sequence[Host],
    machines: Sequence[Machine],
    settings: Sequence[Settings] | None = None,
) -> tuple[HostAssignment, ...]:
    """The hosts' places in a plan, numbered in their order, as their ranks are. ``machines`` are
    what the hosts are like; ``settings``, where they are worked out already, are theirs."""
    made: list[HostAssignment] = []
    first = 0
    on: dict[tuple[int, int], Machine] = {}
    settings = all_settings(experiment, hosts) if settings is None else settings
    wanted = wanted_kind(experiment)
    for host, bare, own in zip(hosts, machines, settings, strict=True):
        # Hosts of which nothing is different share one machine, as they share their settings.
        key = (id(bare), id(own))
        if key not in on:
            python = own.python or ("python" if own.conda else bare.python)
            on[key] = replace(bare, python=python, project=own.build_dir or bare.project)
        machine = on[key]
        nproc = ranks_of(experiment, host, machine, wanted)
        made.append(HostAssignment(len(made), nproc, first, host, machine, own))
        first += nproc
    return tuple(made)


def wanted_kind(experiment: Experiment) -> str:
    """The kind of device that the YAML asks for; a program of others may mean anything by it."""
    return AUTO if experiment.task.external else str(Arguments.of(experiment)["device"])


def ranks_of(experiment: Experiment, host: Host, machine: Machine, device: str) -> int:
    """How many ranks this host takes. ``device``: the kind that the YAML asks for."""
    own, devices = machine.environment, machine.devices
    envs = experiment.envs.for_host(host.name, host.device_type)
    # What another host has in its own environment is not known here, and limits nothing.
    known = {k: parts(k, v) for k, v in envs.items() if own or not references(v)}
    given = {**own, **{k: probe.filled(value, own) for k, value in known.items()}}
    wanted = experiment.runner.nproc_per_node
    if wanted is None and experiment.task.is_command:
        return 1
    if wanted == "auto":
        wanted = None if devices is None else automatic_ranks(given, devices, device)
    kind = kind_of(device, devices or {}, given)
    return least(host.slots, wanted, visible_devices(given, kind))
