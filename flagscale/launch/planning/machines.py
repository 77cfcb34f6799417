"""What planning needs to know of this machine, and of others from what they answered."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts.hostfile import Host
from flagscale.launch.planning import devices
from flagscale.launch.planning.per_host import Settings, settings
from flagscale.launch.planning.plan import Machine

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


def with_settings(machine: Machine, own: Settings) -> Machine:
    """A machine on which an experiment's own Python and directory hold."""
    python = own.python or ("python" if own.conda else machine.python)
    return replace(machine, python=python, project=own.build_dir or machine.project)


def remote_machines(
    experiment: Experiment, hosts: Sequence[Host], facts: Mapping[int, Facts]
) -> list[Machine]:
    """The hosts as machines. Nothing of this machine's environment reaches them; a host without
    an answer is one of which nothing is known."""
    made = []
    for rank, host in enumerate(hosts):
        own, known = settings(experiment, host), facts.get(rank)
        project = own.build_dir or PROJECT
        machine = Machine(
            python=sys.executable,
            project=project,
            # Where files are not shared, this working directory may not exist.
            workdir=project if experiment.runner.no_shared_fs else Path.cwd(),
            cpus=known.cpus if known else None,
            gpus=known.gpus if known else None,
            interface=known.interface if known and len(hosts) > 1 else None,
        )
        made.append(with_settings(machine, own))
    return made
