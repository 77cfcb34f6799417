"""Checks that the communication backend and the hosts' devices support what the arguments request.

They run before anything starts and contact no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from flagscale.accelerators.registry import list_device_accelerators
from flagscale.comm import registry
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.system_arguments import COMM
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.host_overrides import iter_host_overrides
from flagscale.config.per_host_allowlist import PER_HOST_COMM_OPTIONS
from flagscale.config.placement import TypedHost
from flagscale.config.schema import PROJECT, Experiment, Task
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import resolve_all_settings

_ANY_DEVICE = arguments()["device"].default
_EXAMPLES = PROJECT / "examples"


def uses_backend_registry(task: Task) -> bool:
    """Return True if the program selects its backend through :mod:`flagscale.comm.registry`.

    This project's program and its examples do; an external program has a parser of its own.
    """
    return not task.external or task.entrypoint.is_relative_to(_EXAMPLES)


def check_backend(experiment: Experiment) -> list[Problem]:
    """Return the problems of the backend's name and of its options, including the options of
    individual hosts.

    Each host checks for itself whether it can use the backend
    (:mod:`flagscale.launcher.preflight.backend`).
    """
    if not uses_backend_registry(experiment.task):
        return []
    args = experiment.train
    name = args["distributed_backend"]
    try:
        registry.get_backend(name)
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return [args.problem("distributed_backend", message)]
    problems = [args.problem(COMM, text) for text in _find_option_errors(name, args[COMM] or ())]
    common_options = {
        option for option in args[COMM] or () if not _find_option_errors(name, [option])
    }
    for _, override in iter_host_overrides(experiment.by_type, experiment.by_host):
        problems += _check_host_options(name, common_options, override.arguments)
    return problems


def _find_option_errors(name: str, options: Sequence[str]) -> list[str]:
    try:
        registry.parse_backend_options(name, options)
    except ConfigError as error:
        return [f"{problem.key}: {replace(problem, key='')}" for problem in error.problems]
    return []


def _check_host_options(
    name: str, common_options: Set[str], overrides: TrainArguments
) -> Iterator[Problem]:
    """Yield the problems of the options that replace those of ``train`` on some hosts.

    Args:
        name: Name of the backend.
        common_options: Valid options of ``train``, for all hosts.
        overrides: Arguments of a host or of a device type.
    """
    for argument in overrides.entries:
        if argument.name != COMM:
            continue
        options = argument.canonical or ()
        # Names of options that are set differently, or only in one of the two places.
        differing_names = {option.partition("=")[0] for option in common_options ^ set(options)}
        texts = _find_option_errors(name, options) or [
            f"{option}: has to be the same on every host of a job: set it in `train`, and "
            "repeat it here"
            for option in sorted(differing_names - PER_HOST_COMM_OPTIONS)
        ]
        for text in texts:
            yield Problem(argument.key, text, argument.location)


def check_fp8_support(experiment: Experiment, hosts: Sequence[TypedHost]) -> Iterator[Problem]:
    """Yield a problem for each device type that does not support FP8 GEMMs although fp8 is set.

    The ``type=`` of a hostfile is compared with the adapters' product names. Ranks on hosts without
    a type, or with a type that no adapter recognizes, check for themselves.
    """
    if experiment.task.external:
        return
    hostfile_hosts = [Host(name=host.name, device_type=host.device_type) for host in hosts]
    reported_types = set[str]()
    for host, settings in zip(
        hostfile_hosts, resolve_all_settings(experiment, hostfile_hosts), strict=True
    ):
        device_type, args = host.device_type, settings.train
        if device_type is None or device_type in reported_types or not args["fp8"]:
            continue
        # Only adapters that the host's ranks could use.
        adapters = [
            a for a in list_device_accelerators() if args["device"] in (_ANY_DEVICE, a.name)
        ]
        # True, False, or None from an adapter that does not recognize the type.
        if False in {adapter.product_supports_fp8(device_type) for adapter in adapters}:
            reported_types.add(device_type)
            yield args.problem(
                "fp8",
                f"{args['fp8']}, but {host.name} has type={device_type}, which has no FP8 matrix "
                "multiplication; remove fp8, or use Ada, Hopper or later GPUs",
            )
