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
from flagscale.launch.planning.model import Machine

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
