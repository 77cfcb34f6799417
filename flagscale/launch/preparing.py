"""From an experiment to a plan that is ready to start, and the runner that starts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flagscale.config.checks import check_world, notes
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import (
    Host,
    choose_hosts,
    is_local_only,
    is_loopback,
    read_hostfile,
)
from flagscale.launch.planning import ports
from flagscale.launch.planning.backends import backend_problems
from flagscale.launch.planning.environment import shell_notes
from flagscale.launch.planning.machines import remote_machines, this_machine, with_settings
from flagscale.launch.planning.naming import idle_names, unknown_names
from flagscale.launch.planning.per_host import settings
from flagscale.launch.planning.plan import LaunchPlan, plan, wanted_port
from flagscale.launch.state import new_run_id

if TYPE_CHECKING:
    from flagscale.launch.preflight.local import Check
    from flagscale.launch.runners.base import Runner

# What a dry run shows where only the master host could tell.
_DRY_PORT = 29500


@dataclass
class Prepared:
    """A plan, what a preflight found about it (nothing where none was wanted), and its runner."""

    plan: LaunchPlan
    runner: Runner
    checks: list[Check] = field(default_factory=list)
    copy_code: Callable[[], object] = lambda: None
    """Brings the hosts this machine's code, where the runner is to do that."""


def hosts_of(experiment: Experiment) -> tuple[Host, ...]:
    """The hosts that take part. Raises :class:`ConfigError` where there are none to take part, and
    for what is given for a host or a type that the hostfile does not have."""
    runner = experiment.runner
    if runner.hostfile is not None:
        problems = unknown_names(experiment, read_hostfile(runner.hostfile))
        if problems:
            raise ConfigError(problems)
    return choose_hosts(runner.hostfile, runner.nnodes, runner.type)


def unprobed_plan(experiment: Experiment) -> LaunchPlan:
    """The plan as far as this machine can tell, without a word to any other."""
    hosts = hosts_of(experiment)
    if is_local_only(hosts):
        return _checked(experiment, _local_plan(experiment, hosts))
    made = plan(
        experiment,
        hosts,
        remote_machines(experiment, hosts, {}),
        run_id=new_run_id(),
        master_port=wanted_port(experiment.runner) or _DRY_PORT,
        over_ssh=True,
    )
    notes = []
    if wanted_port(experiment.runner) is None:
        notes.append(f"a run picks a port that is free on {hosts[0].name}, in place of {_DRY_PORT}")
    if experiment.runner.preflight:
        notes.append("a run asks every host for its cores, GPUs and interface; no host was asked")
    return _checked(experiment, made, *notes, *_loopback_notes(made))


@contextmanager
def prepared(
    experiment: Experiment,
    *,
    checking: bool,
    fresh: bool = False,
    texts: tuple[str, str] = ("", ""),
) -> Iterator[Prepared]:
    """What a run needs, for as long as the block lasts; then connections are closed.

    ``checking``: with a preflight, for which nothing that hosts have kept of an earlier one is
    believed where it is to be ``fresh``. ``texts``: the configuration and the overrides, to be
    kept beside the scripts. Raises :class:`ConfigError` for what cannot work and
    :class:`UnreachableError` for hosts that don't answer, unless a check is to show them.
    """
    hosts = hosts_of(experiment)
    if is_local_only(hosts):
        yield _prepare_local(experiment, hosts, checking, texts)
        return
    from flagscale.launch.preflight.survey import connect, plan_of, survey, sync
    from flagscale.launch.runners.ssh import SshRunner

    with connect(experiment, hosts) as connections:
        found = survey(experiment, hosts, connections, thorough=checking, fresh=fresh)
        made = plan_of(experiment, found, new_run_id())
        # A preflight knows whether the hosts are one machine.
        made = _checked(experiment, made, *(() if checking else _loopback_notes(made)))
        runner = SshRunner(*texts, connections)
        ready = Prepared(made, runner, copy_code=lambda: sync(experiment, found, connections))
        from flagscale.launch.preflight.hosts import check_hosts, require_reachable

        if checking:
            ready.checks = check_hosts(experiment, made, found)
        else:
            require_reachable(found)
        yield ready


def _local_plan(experiment: Experiment, hosts: tuple[Host, ...]) -> LaunchPlan:
    machine = with_settings(this_machine(), settings(experiment, hosts[0]))
    port = wanted_port(experiment.runner) or ports.free_port()
    return plan(experiment, hosts, machine, run_id=new_run_id(), master_port=port)


def _prepare_local(
    experiment: Experiment, hosts: tuple[Host, ...], checking: bool, texts: tuple[str, str]
) -> Prepared:
    from flagscale.launch.preflight import backend, directories
    from flagscale.launch.preflight.local import preflight
    from flagscale.launch.runners.local import LocalRunner

    own = settings(experiment, hosts[0])
    machine = with_settings(this_machine(), own)
    made = _checked(experiment, _local_plan(experiment, hosts))
    checks = preflight(experiment, made, machine) if checking else []
    if checking:
        checks += directories.check_here(experiment, made, own)
        checks.append(
            backend.check_here(experiment, hosts[0], own, machine.python, machine.gpus or 0)
        )
    return Prepared(made, LocalRunner(*texts), checks)


def _checked(experiment: Experiment, made: LaunchPlan, *more: str) -> LaunchPlan:
    """The plan with its notes. Raises :class:`ConfigError` where its ranks don't fit."""
    problems = [*backend_problems(experiment), *check_world(experiment, made.world_size)]
    if problems:
        raise ConfigError(problems)
    told = (
        *notes(experiment, made.world_size),
        *shell_notes(experiment),
        *_notes_on_hosts(experiment, made),
        *more,
    )
    return replace(made, notes=told)


def _loopback_notes(made: LaunchPlan) -> Iterator[str]:
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
    if experiment.runner.hostfile is None:
        idle = idle_names(experiment, [host.name for host in made.hosts])
        if idle:
            yield idle
