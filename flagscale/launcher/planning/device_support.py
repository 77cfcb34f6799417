"""Checks of the hosts' device types against the precision that their ranks are to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.accelerators.registry import list_device_accelerators
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.placement import TypedHost
from flagscale.config.schema import Experiment
from flagscale.errors import Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import resolve_all_settings

_ANY = arguments()["device"].default


def check_device_support(experiment: Experiment, hosts: Sequence[TypedHost]) -> Iterator[Problem]:
    """Yield a problem for each device type that is known to lack 8-bit matrix products but uses
    fp8.

    Ranks on hosts without a type, or with a type that no adapter recognizes, check for themselves.
    """
    if experiment.task.external:
        return
    typed = [Host(name=host.name, device_type=host.device_type) for host in hosts]
    reported = set[str]()
    for host, settings in zip(typed, resolve_all_settings(experiment, typed), strict=True):
        kind, args = host.device_type, settings.train
        if kind is None or kind in reported or not args["fp8"]:
            continue
        # Only adapters that the host's ranks could use.
        adapters = [a for a in list_device_accelerators() if args["device"] in (_ANY, a.name)]
        if False in {adapter.product_supports_fp8(kind) for adapter in adapters}:
            reported.add(kind)
            yield args.problem(
                "fp8",
                f"{args['fp8']}, but {host.name} has type={kind}, which has no matrix products of "
                "8-bit numbers; leave fp8 out, or take Ada, Hopper or later",
            )
