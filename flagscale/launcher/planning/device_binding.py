"""What the hostfile's types of devices cannot do, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.accelerators.registry import accelerators
from flagscale.config.arguments.registry import arguments
from flagscale.config.checks import Arguments
from flagscale.config.placement import Typed
from flagscale.config.schema import Experiment
from flagscale.errors import Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import all_settings

_ANY = arguments()["device"].default


def chip_problems(experiment: Experiment, hosts: Sequence[Typed]) -> Iterator[Problem]:
    """Of each type of device that is known to lack what its hosts are told to use. What no adapter
    knows, and hosts without a type, their ranks look at themselves."""
    if experiment.task.external:
        return
    typed = [Host(name=host.name, device_type=host.device_type) for host in hosts]
    told = set[str]()
    for host, own in zip(typed, all_settings(experiment, typed), strict=True):
        kind, args = host.device_type, Arguments.of_sections(own.sections, experiment.sources)
        if kind is None or kind in told or not args["fp8"]:
            continue
        # Of the kinds that the host's ranks could use.
        able = [a for a in accelerators() if args["device"] in (_ANY, a.name)]
        if False in {adapter.knows_eight_bits(kind) for adapter in able}:
            told.add(kind)
            yield args.problem(
                "fp8",
                f"{args['fp8']}, but {host.name} has type={kind}, which has no matrix products of "
                "8-bit numbers; leave fp8 out, or take Ada, Hopper or later",
            )
