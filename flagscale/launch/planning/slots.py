"""From hosts to slots: what each host is like, as far as that is known, and which ranks it takes.
Devices are counted without torch. Pure but for :func:`this_machine`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.interpolation import parts, references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts import probe
from flagscale.hosts.hostfile import Host, least
from flagscale.launch.planning.model import Machine, Slot
from flagscale.launch.planning.per_host import Settings, all_settings

if TYPE_CHECKING:
    from flagscale.hosts.facts import Facts

_NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
SUFFIX = "_VISIBLE_DEVICES"
# Speaks to the container runtime, not to the job: it is `all` or the host's numbering.
_NOT_FOR_JOBS = "NVIDIA_VISIBLE_DEVICES"


def this_machine() -> Machine:
    return Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=installed_gpus(),
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
            python = own.python or ("python" if own.conda else bare.python)
            on[key] = replace(bare, python=python, project=own.build_dir or bare.project)
        machine = on[key]
        nproc = ranks_of(experiment, host, machine)
        made.append(Slot(len(made), nproc, first, host, machine, own))
        first += nproc
    return tuple(made)


def ranks_of(experiment: Experiment, host: Host, machine: Machine) -> int:
    """How many ranks this host takes."""
    own = machine.environment
    envs = experiment.envs.for_host(host.name, host.device_type)
    # What another host has in its own environment is not known here, and limits nothing.
    known = {k: parts(k, v) for k, v in envs.items() if own or not references(v)}
    given = {**own, **{k: probe.filled(value, own) for k, value in known.items()}}
    wanted = experiment.runner.nproc_per_node
    if wanted == "auto":
        wanted = None if machine.gpus is None else automatic_ranks(given, machine.gpus)
    return least(host.slots, wanted, visible_devices(given))


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """How many devices ``*_VISIBLE_DEVICES`` variables leave visible, the fewest where several
    are set; None where none limits anything.

    A list such as ``0,1`` or ``GPU-8a…,MIG-3f…`` counts its entries. ``all`` is no limit. An empty
    value or ``-1`` hides every device, so the job has none to be counted by: no limit either.
    """
    counts = [
        _entries(value)
        for name, value in environment.items()
        if name.endswith(SUFFIX) and name != _NOT_FOR_JOBS
    ]
    return min((count for count in counts if count is not None), default=None)


def _entries(value: str) -> int | None:
    none = ("", "-1", "all", "none", "void", "NoDevFiles")
    # CUDA reads a list up to the first entry that it does not know; -1 and empty end it.
    kept = takewhile(lambda entry: entry.strip() not in none, value.split(","))
    return len(list(kept)) or None


def hidden(environment: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set and hides every GPU."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    return value is not None and _entries(value) is None and value.strip() != "all"


def installed_gpus() -> int:
    """How many NVIDIA GPUs this machine has: the driver's list, else ``nvidia-smi -L``."""
    try:
        return sum(1 for _ in _NVIDIA_PROC.iterdir())
    except OSError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))


def automatic_ranks(environment: Mapping[str, str], installed: int) -> int:
    """What ``nproc_per_node: auto`` means: one rank a device that is there and visible, 1 without
    any. Devices of other makers are counted by their variable alone."""
    visible = visible_devices(environment)
    if installed and not hidden(environment):
        return min(installed, visible or installed)
    others = {name: v for name, v in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    return visible_devices(others) or 1
