"""From an experiment to a plan: what every runner needs on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flagscale.config import placement
from flagscale.config.arguments.values import did_you_mean
from flagscale.config.checks import Arguments, check_world, notes
from flagscale.config.schema import SPECIFIC_SECTIONS, Experiment
from flagscale.config.sources import place_of
from flagscale.config.yaml_file import short
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, choose_hosts, is_loopback, read_hostfile
from flagscale.hosts.names import compress
from flagscale.launcher.liveness import secret
from flagscale.launcher.planning.assignment import describe_machines, assign_ranks
from flagscale.launcher.planning.backends import backend_problems
from flagscale.launcher.planning.device_binding import chip_problems
from flagscale.launcher.planning.environment import shell_notes
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.plan import plan, wanted_port
from flagscale.launcher.state import new_run_id

# What a dry run shows where only the master host could tell.
_DRY_PORT = 29500


def hosts_of(experiment: Experiment) -> tuple[Host, ...]:
    """The hosts that take part. Raises :class:`ConfigError` where there are none to take part, and
    for what is given for a host or a type that the hostfile does not have."""
    runner = experiment.runner
    listed = None
    if runner.hostfile is not None:
        listed = read_hostfile(runner.hostfile)
        problems = unknown_names(experiment, listed)
        if problems:
            raise ConfigError(problems)
    chosen = choose_hosts(listed, runner.hostfile, runner.nnodes, runner.type)
    return placement.by_mesh(experiment, chosen)


def unprobed_plan(
    experiment: Experiment,
    hosts: Sequence[Host],
    runner: RunnerHandle,
    *,
    here: bool,
    late: bool = False,
) -> LaunchPlan:
    """The plan as far as this machine can tell, without a word to any other. ``here``: this machine
    is the only host; ``late``: hosts are given, and asked, when the run's job starts."""
    asked_port = wanted_port(experiment.runner)
    made = plan(
        experiment,
        assign_ranks(experiment, hosts, describe_machines(experiment, hosts, {}, here=here)),
        run_id=new_run_id(),
        master_port=asked_port or _DRY_PORT,
        runner=runner,
        shared_fs=here or not experiment.runner.no_shared_fs,
        run_secret=secret.new(),
    )
    told = []
    if late:
        return checked(experiment, made)
    if asked_port is None:
        told.append(f"a run picks a port that is free on {hosts[0].name}, in place of {_DRY_PORT}")
    if experiment.runner.preflight and not here:
        told.append("a run asks every host for its cores, GPUs and interface; no host was asked")
    return checked(experiment, made, *told, *loopback_notes(made))


def checked(experiment: Experiment, made: LaunchPlan, *more: str) -> LaunchPlan:
    """The plan with its notes. Raises :class:`ConfigError` where its ranks don't fit."""
    problems = [
        *backend_problems(experiment),
        *check_world(experiment, made.world_size),
        *chip_problems(experiment, made.hosts),
    ]
    problems = problems or placement.problems(experiment, made.hosts)
    if problems:
        raise ConfigError(problems)
    told = (
        *notes(experiment, made.world_size),
        *placement.notes(experiment, made.hosts),
        *_estimated(experiment, made),
        *shell_notes(experiment),
        *_notes_on_hosts(experiment, made),
        *more,
    )
    return replace(made, notes=told)


def _estimated(experiment: Experiment, made: LaunchPlan) -> Iterator[str]:
    """What a step takes, where the hostfile says of what kind devices are, or they are unlike."""
    unlike = Arguments.of(experiment)["enable_hetero"]
    if unlike or any(host.device_type for host in made.hosts):
        from flagscale.estimate.notes import notes as estimated

        yield from estimated(experiment, made.hosts)


def loopback_notes(made: LaunchPlan) -> Iterator[str]:
    """That a master has an address by which every host means itself."""
    if len(made.hosts) > 1 and is_loopback(made.master_addr):
        yield (
            f"{made.master_addr} is a loopback address, which leads every machine to itself: give "
            "the hostfile's addr=, or experiment.runner.master_addr"
        )


def _notes_on_hosts(experiment: Experiment, made: LaunchPlan) -> Iterator[str]:
    wanted, there = experiment.runner.nnodes, len(made.hosts)
    if wanted is not None and wanted > there:
        asked = f"experiment.runner.nnodes is {wanted}"
        yield f"{there} host(s) take part: {asked}, the hostfile has {there}"
    if experiment.runner.hostfile is not None:
        return
    names = [host.name for host in made.hosts]
    types = {host.device_type for host in made.hosts if host.device_type}
    idle = [key for key, _, _ in _unmatched(experiment, types, names)]
    if idle:
        hosts = "the only host is" if len(names) == 1 else "the hosts are"
        kind = f"of type {' or '.join(sorted(types))}" if types else "of no type"
        yield (
            f"{', '.join(idle)}: not used, since without experiment.runner.hostfile {hosts} "
            f"{compress(names)}, {kind}"
        )


def unknown_names(experiment: Experiment, listed: Sequence[Host]) -> list[Problem]:
    """Names that are no host's and no type's of the whole hostfile, ``listed``: a run of some of
    its hosts still may say what is different on the others."""
    hostfile = experiment.runner.hostfile
    where = short(hostfile) if hostfile else "the hostfile"
    types = list(dict.fromkeys(host.device_type for host in listed if host.device_type))
    names = [host.name for host in listed]
    problems = []
    for key, name, by_type in _unmatched(experiment, types, set(names)):
        known, what = (types, "type") if by_type else (names, "name")
        there = f"it has {compress(known)}" if known else "its lines have no type="
        near = did_you_mean(name, known) or f"; {there}"
        message = f"no host in {where} has this {what}{near}"
        problems.append(Problem(key, message, place_of(experiment.sources, key)))
    return problems


def _unmatched(
    experiment: Experiment, types: Collection[str], names: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """Dotted key and name of every part for a type or a host that is none of these, and whether
    it is for a type."""
    envs = experiment.envs
    for prefix, parts in (
        ("", (experiment.by_type, experiment.by_host)),
        ("experiment.envs.", (envs.by_type, envs.by_host)),
    ):
        for section, given in zip(SPECIFIC_SECTIONS, parts, strict=True):
            by_type = section == SPECIFIC_SECTIONS[0]
            for name in given:
                if name not in (types if by_type else names):
                    yield f"{prefix}{section}.{name}", name, by_type
