"""Construction of a checked plan from an experiment, for every runner."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.checks import check_world, experiment_notes
from flagscale.config.placement import check_placement, order_by_mesh, placement_notes
from flagscale.config.schema import SPECIFIC_SECTIONS, Experiment
from flagscale.config.sources import find_place
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, choose_hosts, is_loopback, read_hostfile
from flagscale.hosts.names import compress_names
from flagscale.launcher.liveness import secret
from flagscale.launcher.planning.assignment import assign_ranks, describe_machines
from flagscale.launcher.planning.backends import check_backend
from flagscale.launcher.planning.device_support import check_device_support
from flagscale.launcher.planning.environment import note_unexpanded_variables
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.plan import plan, requested_port
from flagscale.launcher.state import new_run_id

# Port shown by a dry run; a run uses a port that is free on the master host.
_DRY_PORT = 29500


def select_hosts(experiment: Experiment) -> tuple[Host, ...]:
    """Return the hosts that take part.

    Raises:
        ConfigError: If there are none, or a setting is for a host or a device type that the
            hostfile does not have.
    """
    runner = experiment.runner
    listed = None
    if runner.hostfile is not None:
        listed = read_hostfile(runner.hostfile)
        problems = find_unknown_names(experiment, listed)
        if problems:
            raise ConfigError(problems)
    chosen = choose_hosts(listed, runner.hostfile, runner.nnodes, runner.type)
    return order_by_mesh(experiment, chosen)


def build_unprobed_plan(
    experiment: Experiment,
    hosts: Sequence[Host],
    runner: RunnerHandle,
    *,
    here: bool,
    late: bool = False,
) -> LaunchPlan:
    """Return the plan without contacting any host.

    Args:
        here: True if this machine is the only host.
        late: True if the hosts are allocated, and probed, when the run's job starts.
    """
    port = requested_port(experiment.runner)
    launch_plan = plan(
        experiment,
        assign_ranks(experiment, hosts, describe_machines(experiment, hosts, {}, here=here)),
        run_id=new_run_id(),
        master_port=port or _DRY_PORT,
        runner=runner,
        shared_fs=here or not experiment.runner.no_shared_fs,
        run_secret=secret.generate_secret(),
    )
    notes = []
    if late:
        return check_plan(experiment, launch_plan)
    if port is None:
        notes.append(f"a run uses a port that is free on {hosts[0].name} instead of {_DRY_PORT}")
    if experiment.runner.preflight and not here:
        notes.append("a run probes the cores, GPUs and interface of every host; no host was probed")
    return check_plan(experiment, launch_plan, *notes, *note_loopback_address(launch_plan))


def check_plan(experiment: Experiment, launch_plan: LaunchPlan, *extra_notes: str) -> LaunchPlan:
    """Check a plan, and return it with its notes and ``extra_notes``.

    Raises:
        ConfigError: If the configuration does not fit the plan's hosts and ranks.
    """
    problems = [
        *check_backend(experiment),
        *check_world(experiment, launch_plan.world_size),
        *check_device_support(experiment, launch_plan.hosts),
    ]
    problems = problems or check_placement(experiment, launch_plan.hosts)
    if problems:
        raise ConfigError(problems)
    all_notes = (
        *experiment_notes(experiment, launch_plan.world_size),
        *placement_notes(experiment, launch_plan.hosts),
        *_note_estimates(experiment, launch_plan),
        *note_unexpanded_variables(experiment),
        *_note_hosts(experiment, launch_plan),
        *extra_notes,
    )
    return replace(launch_plan, notes=all_notes)


def _note_estimates(experiment: Experiment, launch_plan: LaunchPlan) -> Iterator[str]:
    """Yield notes on step time and memory, if the device types are given or heterogeneous."""
    heterogeneous = experiment.train["enable_hetero"]
    if heterogeneous or any(host.device_type for host in launch_plan.hosts):
        from flagscale.estimate.notes import estimate_notes

        yield from estimate_notes(experiment, launch_plan.hosts)


def note_loopback_address(launch_plan: LaunchPlan) -> Iterator[str]:
    """Yield a note if the master's address is a loopback address, which differs on every host."""
    if len(launch_plan.hosts) > 1 and is_loopback(launch_plan.master_addr):
        yield (
            f"{launch_plan.master_addr} is a loopback address, at which every machine reaches "
            "itself: set addr= in the hostfile, or experiment.runner.master_addr"
        )


def _note_hosts(experiment: Experiment, launch_plan: LaunchPlan) -> Iterator[str]:
    """Yield notes on the number of hosts, and on settings for hosts that do not take part."""
    nnodes, host_count = experiment.runner.nnodes, len(launch_plan.hosts)
    if nnodes is not None and nnodes > host_count:
        yield (
            f"{host_count} host(s) take part: experiment.runner.nnodes is {nnodes}, the hostfile "
            f"has {host_count}"
        )
    if experiment.runner.hostfile is not None:
        return
    names = [host.name for host in launch_plan.hosts]
    types = {host.device_type for host in launch_plan.hosts if host.device_type}
    unused = [key for key, _, _ in _find_unused_settings(experiment, types, names)]
    if unused:
        hosts = "the only host is" if len(names) == 1 else "the hosts are"
        kind = f"of type {' or '.join(sorted(types))}" if types else "of no type"
        yield (
            f"{', '.join(unused)}: not used, since without experiment.runner.hostfile {hosts} "
            f"{compress_names(names)}, {kind}"
        )


def find_unknown_names(experiment: Experiment, listed: Sequence[Host]) -> list[Problem]:
    """Return the problems of settings for hosts or device types that the hostfile does not have.

    ``listed`` are all hosts of the hostfile: a run of some of them may keep settings for the
    others.
    """
    hostfile = experiment.runner.hostfile
    source = short_path(hostfile) if hostfile else "the hostfile"
    types = list(dict.fromkeys(host.device_type for host in listed if host.device_type))
    names = [host.name for host in listed]
    problems = []
    for key, name, by_type in _find_unused_settings(experiment, types, set(names)):
        valid, attribute = (types, "type") if by_type else (names, "name")
        available = f"it has {compress_names(valid)}" if valid else "its lines have no type="
        hint = did_you_mean(name, valid) or f"; {available}"
        message = f"no host in {source} has this {attribute}{hint}"
        problems.append(Problem(key, message, find_place(experiment.sources, key)))
    return problems


def _find_unused_settings(
    experiment: Experiment, types: Collection[str], names: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """Yield the settings for a device type or a host that is not among these.

    Yields:
        Dotted key, name, and True if the setting is for a device type.
    """
    envs = experiment.envs
    for prefix, sections in (
        ("", (experiment.by_type, experiment.by_host)),
        ("experiment.envs.", (envs.by_type, envs.by_host)),
    ):
        for section, overrides in zip(SPECIFIC_SECTIONS, sections, strict=True):
            by_type = section == SPECIFIC_SECTIONS[0]
            for name in overrides:
                if name not in (types if by_type else names):
                    yield f"{prefix}{section}.{name}", name, by_type
