"""Asking every host of a run what it is like, all at once, and planning from the answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flagscale.config.arguments import paths
from flagscale.config.arguments.flatten import leaves
from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.hosts import facts as asking
from flagscale.hosts import probe
from flagscale.hosts.facts import Facts, Need, Question
from flagscale.hosts.hostfile import Host
from flagscale.hosts.reach import Endpoint, Hosts, require_all
from flagscale.hosts.ssh import Connection
from flagscale.launch.layout import Layout
from flagscale.launch.liveness import secret
from flagscale.launch.planning.machines import remote_machines
from flagscale.launch.planning.model import LaunchPlan
from flagscale.launch.planning.per_host import Settings, all_settings, rebased
from flagscale.launch.planning.plan import master_address, plan, wanted_port
from flagscale.launch.planning.slots import slots
from flagscale.launch.planning.supervision import liveness_port
from flagscale.launch.preflight import backend, directories
from flagscale.launch.runners import ssh_handle


@dataclass
class Survey:
    """What the hosts answered, by rank, and the errors of those that did not."""

    hosts: tuple[Host, ...]
    facts: dict[int, Facts] = field(default_factory=dict)
    errors: dict[int, FlagscaleError] = field(default_factory=dict)
    code: str = ""
    """The digest of this machine's code; empty where it was not compared."""

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def connect(experiment: Experiment, hosts: Sequence[Host]) -> Hosts:
    """The hosts, to be connected to when they are first asked."""
    runner = experiment.runner
    places = [
        (host.name, Endpoint(host.user, host.port or runner.ssh_port, host.proxy)) for host in hosts
    ]
    return Hosts(places, runner.ssh_config)


def survey(
    experiment: Experiment,
    hosts: Sequence[Host],
    connections: Hosts,
    *,
    thorough: bool,
    fresh: bool = False,
) -> Survey:
    """Ask every host for a preflight, and its Python too: ``fresh``, or only if something has
    changed since it answered last. Otherwise only the master host is asked, for a port: the
    scripts of hosts that nobody asked look for themselves."""
    made = Survey(tuple(hosts))
    if thorough and compares_code(experiment):
        made.code = probe.digest_of(probe.manifest(str(PROJECT)))
    questions = list(_questions(experiment, hosts, thorough, fresh))

    def ask(rank: int, connection: Connection) -> Facts:
        return asking.ask(connection, questions[rank])

    def visit(rank: int, connection: Connection) -> Facts | None:
        return ask(rank, connection) if thorough or rank == 0 else None

    # All are connected to now: hosts that can't be reached are known before anything starts.
    answers, made.errors = connections.each(visit)
    made.facts = {rank: one for rank, one in answers.items() if one is not None}
    return made


def sync(experiment: Experiment, found: Survey, connections: Hosts) -> int:
    """Copy the code to every host whose code differs, where the runner is to do that; how many
    hosts it was copied to."""
    from flagscale.launch.runners.programs import code

    if not syncs(experiment):
        return 0
    files = probe.manifest(str(PROJECT))
    digest = probe.digest_of(files)
    behind = [
        rank for rank, f in found.facts.items() if f.python is None or f.python.code != digest
    ]

    every = all_settings(experiment, found.hosts)

    def copy(rank: int, connection: Connection) -> int:
        own = every[rank]
        return code.sync(
            connection,
            PROJECT,
            files,
            project=own.build_dir or PROJECT,
            python=_python(own),
            setup=own.setup,
        )

    copied, errors = connections.each(copy, behind)
    require_all(errors, found.names, "the code could not be copied")
    return sum(1 for count in copied.values() if count)


def syncs(experiment: Experiment) -> bool:
    """Whether a run copies this machine's code to its hosts."""
    return experiment.runner.sync == "code" and experiment.runner.no_shared_fs


def compares_code(experiment: Experiment) -> bool:
    """Whether hosts may have code of their own: no shared files, or a directory of their own."""
    specifics = (*experiment.by_type.values(), *experiment.by_host.values())
    own = experiment.runner.build_dir or any(specific.build_dir for specific in specifics)
    return experiment.runner.no_shared_fs or bool(own)


def _questions(
    experiment: Experiment, hosts: Sequence[Host], thorough: bool, fresh: bool
) -> Iterator[Question]:
    runner = experiment.runner
    layout = Layout(experiment.exp_dir, runner.log_dir)
    # Alone, a host needs neither an interface nor a port for agents.
    alone = len(hosts) == 1
    wanted = wanted_port(runner)
    agents_port = liveness_port(runner, wanted) if wanted else runner.liveness_port
    every = all_settings(experiment, hosts)
    for rank, (host, own) in enumerate(zip(hosts, every, strict=True)):
        yield Question(
            master="" if alone else master_address(runner, hosts),
            log_root=str(layout.log_dir or layout.logs / "details"),
            python=_python(own),
            setup=own.setup,
            port=(wanted or 0) if rank == 0 else None,
            agents_port=agents_port if rank == 0 and not alone else None,
            need=_need(experiment, host, own, fresh, first=rank == 0) if thorough else None,
        )


def _python(own: Settings) -> str:
    return own.python or ("python" if own.conda else sys.executable)


def _need(experiment: Experiment, host: Host, own: Settings, fresh: bool, *, first: bool) -> Need:
    project = own.build_dir or PROJECT
    reads = [] if experiment.task.external else list(leaves(own.sections))
    needed = [path for _, name, value in reads for path in paths.needed(name, value)]
    program = experiment.task.entrypoint
    if not (syncs(experiment) and program.is_relative_to(PROJECT / probe.CODE_ROOTS[0])):
        needed.append(str(rebased(program, project)))
    layout = Layout(experiment.exp_dir, experiment.runner.log_dir)
    want = directories.wanted(experiment, layout, own, first=first)
    return Need(
        project=str(project),
        exp_dir=str(experiment.exp_dir),
        paths=needed,
        written=list(want.written.values()),
        load=want.load,
        compared=compares_code(experiment),
        backend=backend.question(experiment, host, own),
        fresh=fresh,
    )


def plan_of(experiment: Experiment, found: Survey, run_id: str) -> LaunchPlan:
    """The plan that follows from the answers. Raises :class:`ConfigError` for a port that is
    taken on the master host."""
    master = found.facts.get(0)
    port = master.port if master is not None else None
    if master is not None and (port is None or master.busy_port is not None):
        raise _port_in_use(experiment, master, found.names[0])
    machines = remote_machines(experiment, found.hosts, found.facts)
    runner = experiment.runner
    return plan(
        experiment,
        slots(experiment, found.hosts, machines),
        run_id=run_id,
        master_port=port or wanted_port(runner) or 0,
        runner=ssh_handle(runner, found.hosts),
        shared_fs=not runner.no_shared_fs,
        run_secret=secret.new(),
    )


def _port_in_use(experiment: Experiment, master: Facts, name: str) -> ConfigError:
    runner = experiment.runner
    text = (
        f"port {master.busy_port} of {name} is in use by {master.port_holder or 'another process'}"
    )
    key, what = "master_port", "choose another one"
    if master.busy_port != wanted_port(runner):
        key = "liveness_port"
        if runner.liveness_port is None:
            text += "; agents meet there, beside experiment.runner.master_port"
            what = f"set {key}, or choose another master_port"
    problem = Problem(f"experiment.runner.{key}", text)
    return ConfigError(problem, hint=f"{what}, or leave both keys out to get free ports")
