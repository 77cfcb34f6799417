"""Construction of a checked plan from an experiment, for every runner."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.checks import check_world, experiment_notes
from flagscale.config.placement import check_placement, order_by_mesh, placement_notes
from flagscale.config.schema import SPECIFIC_SECTIONS, Experiment
from flagscale.config.sources import find_location
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import (
    Host,
    choose_hosts,
    is_loopback,
    parse_host_list,
    read_hostfile,
)
from flagscale.hosts.names import compress_names
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.succession import MIN_SUCCESSION_AGENTS
from flagscale.launcher.planning.assignment import assign_ranks, describe_machines
from flagscale.launcher.planning.environment import note_unexpanded_variables
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.planning.per_host import resolve_all_settings
from flagscale.launcher.planning.plan import plan, requested_port
from flagscale.launcher.planning.support import check_backend, check_fp8_support
from flagscale.launcher.state import new_run_id

# Port shown by a dry run; a run uses a port that is free on the master host.
_DRY_RUN_PORT = 29500


def select_hosts(experiment: Experiment) -> tuple[Host, ...]:
    """Return the hosts that take part.

    Raises:
        ConfigError: If there are none, or a setting is for a host or a device type that the
            hostfile does not have.
    """
    runner = experiment.runner
    listed_hosts = None
    if runner.hostfile is not None:
        listed_hosts = read_hostfile(runner.hostfile)
    elif runner.hosts:
        location = find_location(experiment.sources, "experiment.runner.hosts")
        listed_hosts = parse_host_list(runner.hosts, location)
    if listed_hosts is not None and (problems := find_unknown_names(experiment, listed_hosts)):
        raise ConfigError(problems)
    if runner.spares and listed_hosts is not None:
        return _select_with_spares(experiment, listed_hosts)
    selected = choose_hosts(listed_hosts, runner.hostfile, runner.nnodes, runner.type)
    return order_by_mesh(experiment, selected)


def _select_with_spares(experiment: Experiment, listed_hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts that train, and after them those that wait.

    Raises:
        ConfigError: If there are too few hosts, or the job has heterogeneous devices.
    """
    runner = experiment.runner
    available = len(listed_hosts) - runner.spares
    training = available if runner.nnodes is None else runner.nnodes
    if training > available:
        message = (
            f"{_name_host_list(experiment)} has {len(listed_hosts)} hosts, and {training} train: "
            f"{max(0, len(listed_hosts) - training)} left to wait, not {runner.spares}"
        )
        raise ConfigError(_spares_problem(experiment, message))
    check_spares(experiment, training)
    return choose_hosts(listed_hosts, runner.hostfile, training + runner.spares, runner.type)


def check_spares(experiment: Experiment, training: int) -> None:
    """Check that spares, if there are any, can take the places of hosts.

    Args:
        experiment: The experiment.
        training: Number of hosts that train.

    Raises:
        ConfigError: If no host can be replaced, or the job has heterogeneous devices.
    """
    runner, message = experiment.runner, ""
    if runner.type == "slurm" and training < 2:
        message = "the first node cannot be replaced: at least two nodes must train"
    elif training + runner.spares < MIN_SUCCESSION_AGENTS:
        message = (
            f"the only host that trains can be replaced if {MIN_SUCCESSION_AGENTS - 1} hosts wait"
        )
    elif not experiment.task.external and experiment.train["enable_hetero"]:
        message = "not supported with enable_hetero: hosts differ, and none can replace another one"
    if message and runner.spares:
        raise ConfigError(_spares_problem(experiment, message))


def _spares_problem(experiment: Experiment, message: str) -> Problem:
    key = "experiment.runner.spares"
    return Problem(key, message, find_location(experiment.sources, key))


def build_unprobed_plan(
    experiment: Experiment,
    hosts: Sequence[Host],
    runner: RunnerHandle,
    *,
    is_local: bool,
    is_deferred: bool = False,
    run_id: str = "",
    run_secret: str | None = None,
) -> LaunchPlan:
    """Return the plan without contacting any host.

    Args:
        experiment: The experiment.
        hosts: Hosts that take part, in order.
        runner: Handle of the runner that starts the plan.
        is_local: True if this machine is the only host.
        is_deferred: True if a scheduler allocates the hosts, and they are probed, only when the
            run's job starts, or if each host plans for itself.
        run_id: Id of the run; by default a new one.
        run_secret: Secret that the agents share; by default a new one.
    """
    shared_fs = not experiment.runner.no_shared_fs
    machines = describe_machines(hosts, {}, is_local=is_local, shared_fs=shared_fs)
    settings = resolve_all_settings(experiment, hosts)
    port = requested_port(experiment.runner)
    launch_plan = plan(
        experiment,
        assign_ranks(experiment, hosts, machines, settings),
        run_id=run_id or new_run_id(),
        master_port=port or _DRY_RUN_PORT,
        runner=runner,
        settings=settings,
        shared_fs=is_local or shared_fs,
        run_secret=run_secret or secret.generate_secret(),
    )
    notes = []
    if is_deferred:
        return check_plan(experiment, launch_plan)
    if port is None:
        notes.append(
            f"a run uses a port that is free on {hosts[0].name} instead of {_DRY_RUN_PORT}"
        )
    if experiment.runner.preflight and not is_local:
        notes.append("a run probes the cores, GPUs and interface of every host; no host was probed")
    notes += note_loopback_address(launch_plan.master_addr, len(hosts))
    return check_plan(experiment, launch_plan, *notes)


def check_plan(experiment: Experiment, launch_plan: LaunchPlan, *extra_notes: str) -> LaunchPlan:
    """Check a plan, and return it with its notes and ``extra_notes``.

    Raises:
        ConfigError: If the configuration does not fit the plan's hosts and ranks.
    """
    problems = [
        *check_backend(experiment),
        *check_world(experiment, launch_plan.world_size),
        *check_fp8_support(experiment, launch_plan.hosts),
    ]
    training_hosts = [host for host in launch_plan.hosts if not host.is_spare]
    problems = problems or check_placement(experiment, training_hosts)
    problems = problems or list(_check_exchangeable_hosts(experiment, launch_plan.hosts))
    problems = problems or list(_check_smaller_jobs(experiment, training_hosts))
    if problems:
        raise ConfigError(problems)
    hosts, runner = training_hosts, experiment.runner
    notes = [
        *experiment_notes(experiment, launch_plan.world_size),
        *placement_notes(experiment, hosts),
    ]
    if experiment.train["enable_hetero"] or any(host.device_type for host in hosts):
        # Device types are given, so step time and memory can be estimated.
        from flagscale.estimate.notes import estimate_notes

        notes += estimate_notes(experiment, hosts)
    notes += note_unexpanded_variables(experiment.envs)
    if runner.nnodes is not None and runner.nnodes > len(hosts):
        notes.append(
            f"{len(hosts)} host(s) take part: experiment.runner.nnodes is {runner.nnodes}, "
            f"{_name_host_list(experiment)} has {len(hosts)}"
        )
    if not runner.names_hosts:
        names = [host.name for host in hosts]
        types = {host.device_type for host in hosts if host.device_type}
        unused = [key for key, _, _ in _find_unused_settings(experiment, types, names)]
        notes += _note_unused_settings(unused, names, types)
    return replace(launch_plan, notes=(*notes, *extra_notes))


def _check_exchangeable_hosts(
    experiment: Experiment, hosts: Sequence[HostPlan]
) -> Iterator[Problem]:
    """Yield a problem if hosts cannot take each other's place: their numbers of ranks differ."""
    counts = {host.agent.nproc for host in hosts}
    key = "experiment.runner." + ("spares" if experiment.runner.spares else "on_bad_host")
    if len(counts) > 1 and experiment.runner.on_bad_host != "stop":
        numbers = " and ".join(map(str, sorted(counts)))
        message = f"any host may be replaced, but hosts have {numbers} ranks; set nproc_per_node"
        yield Problem(key, message, find_location(experiment.sources, key))


def _check_smaller_jobs(experiment: Experiment, hosts: Sequence[HostPlan]) -> Iterator[Problem]:
    """Yield a problem if the job could not go on with each number of hosts that the user allows."""
    runner, args = experiment.runner, experiment.train
    if runner.min_nnodes is None:
        return
    key = "experiment.runner.on_bad_host"
    location = find_location(experiment.sources, key)
    if len(hosts) < runner.min_nnodes:
        message = f"the job needs {runner.min_nnodes} hosts, and {len(hosts)} take part"
        nnodes = "experiment.runner.nnodes"
        yield Problem(nnodes, message, find_location(experiment.sources, nnodes))
        return
    trains = not experiment.task.external and not experiment.task.is_command
    if trains and args["enable_hetero"]:
        yield Problem(key, "`shrink` is not supported with enable_hetero", location)
        return
    if trains and args["global_batch_size"] is None:
        message = "`shrink` needs global_batch_size: the default would be smaller on fewer hosts"
        yield Problem(key, message, location)
        return
    for count in range(len(hosts) - 1, runner.min_nnodes - 1, -1):
        problems = check_world(experiment, count * hosts[0].nproc)
        if problems:
            message = f"with {count} of {len(hosts)} hosts (`shrink`): {problems[0].message}"
            yield replace(problems[0], message=message)
            return


def note_loopback_address(master_addr: str, host_count: int) -> Iterator[str]:
    """Yield a note if the master's address is a loopback address, which differs on every host."""
    if host_count > 1 and is_loopback(master_addr):
        yield (
            f"{master_addr} is a loopback address, which on every machine is the machine itself: "
            "set experiment.runner.master_addr, or addr= in a hostfile"
        )


def _note_unused_settings(
    unused_keys: Sequence[str], names: Sequence[str], types: Collection[str]
) -> Iterator[str]:
    """Yield a note about settings for hosts or device types that do not take part.

    Args:
        unused_keys: Dotted keys of the settings.
        names: Hosts that take part.
        types: Device types of these hosts.
    """
    if unused_keys:
        hosts = "the only host is" if len(names) == 1 else "the hosts are"
        type_text = f"of type {' or '.join(sorted(types))}" if types else "of no type"
        yield (
            f"{', '.join(unused_keys)}: not used: without experiment.runner.hostfile {hosts} "
            f"{compress_names(names)}, {type_text}"
        )


def _name_host_list(experiment: Experiment) -> str:
    """Return the name of the list of hosts, for messages."""
    return "experiment.runner.hosts" if experiment.runner.hosts else "the hostfile"


def find_unknown_names(experiment: Experiment, hostfile_hosts: Sequence[Host]) -> list[Problem]:
    """Return the problems of settings for hosts or device types that the hostfile does not have.

    ``hostfile_hosts`` are all hosts of the hostfile: a run on some of them may keep settings for
    the rest.
    """
    hostfile = experiment.runner.hostfile
    source = short_path(hostfile) if hostfile else _name_host_list(experiment)
    types = list(dict.fromkeys(host.device_type for host in hostfile_hosts if host.device_type))
    names = [host.name for host in hostfile_hosts]
    problems = []
    for key, name, by_type in _find_unused_settings(experiment, types, set(names)):
        valid, attribute = (types, "type") if by_type else (names, "name")
        available = f"it has {compress_names(valid)}" if valid else "its lines have no type="
        hint = did_you_mean(name, valid) or f"; {available}"
        message = f"no host in {source} has this {attribute}{hint}"
        problems.append(Problem(key, message, find_location(experiment.sources, key)))
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
