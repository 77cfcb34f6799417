"""From hosts to slots: what each host is like, as far as that is known, and which ranks it takes.
Pure but for :func:`this_machine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.interpolation import parts, references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts import probe
from flagscale.hosts.hostfile import Host, count_ranks
from flagscale.launch.planning import devices
from flagscale.launch.planning.model import Machine, Slot
from flagscale.launch.planning.per_host import Settings, all_settings

if TYPE_CHECKING:
    from flagscale.hosts.facts import Facts


def this_machine() -> Machine:
    return Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=devices.installed_gpus(),
        environment=dict(os.environ),
    )


def machines(
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
        gpus=None,
    )
    return [
        unknown
        if (known := facts.get(node_rank)) is None
        else replace(
            unknown,
            cpus=known.cpus,
            gpus=known.gpus,
            interface=known.interface if len(hosts) > 1 else None,
        )
        for node_rank in range(len(hosts))
    ]


def slots(
    experiment: Experiment,
    hosts: Sequence[Host],
    machines: Sequence[Machine],
    settings: Sequence[Settings] | None = None,
) -> tuple[Slot, ...]:
    """The hosts' places in a plan, numbered in their order, as their ranks are. ``machines`` are
    what the hosts are like; ``settings``, where they are worked out already, are theirs."""
    made: list[Slot] = []
    first = 0
    on: dict[tuple[int, int], Machine] = {}
    settings = all_settings(experiment, hosts) if settings is None else settings
    for host, bare, own in zip(hosts, machines, settings, strict=True):
        # Hosts of which nothing is different share one machine, as they share their settings.
        key = (id(bare), id(own))
        if key not in on:
            on[key] = _with_settings(bare, own)
        machine = on[key]
        nproc = ranks_of(experiment, host, machine)
        made.append(Slot(len(made), nproc, first, host, machine, own))
        first += nproc
    return tuple(made)


def _with_settings(machine: Machine, own: Settings) -> Machine:
    """A machine on which an experiment's own Python and directory hold."""
    python = own.python or ("python" if own.conda else machine.python)
    return replace(machine, python=python, project=own.build_dir or machine.project)


def ranks_of(experiment: Experiment, host: Host, machine: Machine) -> int:
    """How many ranks this host takes."""
    own = machine.environment
    envs = experiment.envs.for_host(host.name, host.device_type)
    # What another host has in its own environment is not known here, and limits nothing.
    known = {k: parts(k, v) for k, v in envs.items() if own or not references(v)}
    given = {**own, **{k: probe.filled(value, own) for k, value in known.items()}}
    wanted = experiment.runner.nproc_per_node
    if wanted == "auto":
        visible = devices.visible_devices(given)
        if machine.gpus is None:
            return count_ranks(host.slots, None, visible)
        automatic = devices.automatic_ranks(given, machine.gpus)
        return count_ranks(host.slots, automatic, visible)
    return count_ranks(host.slots, wanted, devices.visible_devices(given))
