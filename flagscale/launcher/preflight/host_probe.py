"""Asking every host of a run what it is like, all at once, and planning from the answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flagscale.config.arguments import paths
from flagscale.config.arguments.flatten import leaves
from flagscale.config.interpolation import parts
from flagscale.config.schema import BACKEND_DIRECTORY, PROJECT, Experiment
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.hosts import facts as asking
from flagscale.hosts import probe
from flagscale.hosts.executor import Executor
from flagscale.hosts.facts import Facts, ModuleQuestion, Need, Question
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import Layout
from flagscale.launcher.liveness import secret
from flagscale.launcher.planning.assignment import describe_machines, assign_ranks
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.per_host import Settings, all_settings, rebased
from flagscale.launcher.planning.plan import master_address, plan, wanted_port
from flagscale.launcher.planning.supervision import liveness_port
from flagscale.launcher.preflight import backend, checkpoint, directories, user_code

BACKEND = "the adapted training backend"
"""What asks for the backend's source."""


@dataclass
class Survey:
    """What the hosts answered, by number, and the errors of those that did not."""

    hosts: tuple[Host, ...]
    settings: tuple[Settings, ...]
    """What the experiment says of each."""
    here: bool = False
    """Whether this very machine is the only host."""
    needed: tuple[Mapping[str, str], ...] = ()
    """What each host has to have: paths, with what asks for them."""
    facts: dict[int, Facts] = field(default_factory=dict)
    errors: dict[int, FlagscaleError] = field(default_factory=dict)
    code: str = ""
    """The digest of this machine's code; empty where it was not compared."""

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def survey(
    experiment: Experiment,
    hosts: Sequence[Host],
    reached: Hosts,
    *,
    here: bool,
    thorough: bool,
    fresh: bool = False,
) -> Survey:
    """Ask every host for a preflight, and its Python too: ``fresh``, or only if something has
    changed since it answered last. Otherwise only the master host is asked, for a port: the
    scripts of hosts that nobody asked look for themselves."""
    made = Survey(tuple(hosts), all_settings(experiment, hosts), here)
    if thorough:
        made.needed = tuple(_needed(experiment, own, here=here) for own in made.settings)
        if compares_code(experiment, here=here):
            made.code = probe.digest_of(probe.manifest(str(PROJECT)))
    asked = list(questions(experiment, made, thorough, fresh))

    def visit(number: int, executor: Executor) -> Facts | None:
        return asking.ask(executor, asked[number]) if thorough or number == 0 else None

    # All are connected to now: hosts that can't be reached are known before anything starts.
    answers, made.errors = reached.each(visit)
    made.facts = {number: one for number, one in answers.items() if one is not None}
    return made


def syncs(experiment: Experiment, *, here: bool) -> bool:
    """Whether a run copies this machine's code to its hosts."""
    runner = experiment.runner
    return not here and runner.sync == "code" and runner.no_shared_fs


def compares_code(experiment: Experiment, *, here: bool) -> bool:
    """Whether hosts may have code of their own: no shared files, or a directory of their own."""
    specifics = (*experiment.by_type.values(), *experiment.by_host.values())
    own = experiment.runner.build_dir or any(specific.build_dir for specific in specifics)
    return bool(own) or (experiment.runner.no_shared_fs and not here)


def questions(
    experiment: Experiment, made: Survey, thorough: bool, fresh: bool
) -> Iterator[Question]:
    runner = experiment.runner
    layout = Layout(experiment.exp_dir, runner.log_dir)
    # Alone, a host needs neither an interface nor a port for agents.
    alone = len(made.hosts) == 1
    wanted = wanted_port(runner)
    agents_port = liveness_port(runner, wanted) if wanted else runner.liveness_port
    for number, own in enumerate(made.settings):
        yield Question(
            master="" if alone else master_address(runner, made.hosts),
            log_root=str(layout.log_dir or layout.logs / "details"),
            python=python_of(own),
            setup=own.setup,
            port=(wanted or 0) if number == 0 else None,
            agents_port=agents_port if number == 0 and not alone else None,
            need=_need(experiment, made, number, fresh) if thorough else None,
        )


def python_of(own: Settings) -> str:
    """The Python that starts the ranks of a host, a path or a name there."""
    return own.python or ("python" if own.conda else sys.executable)


def _needed(experiment: Experiment, own: Settings, *, here: bool) -> dict[str, str]:
    """The paths that a host has to have, and the keys that ask for them."""
    project = own.build_dir or PROJECT
    external = experiment.task.external
    reads = [] if external else list(leaves(own.sections, "train."))
    needed = {path: key for key, name, value in reads for path in paths.needed(name, value)}
    task = experiment.task
    program, copied = task.entrypoint, syncs(experiment, here=here)
    if task.is_command:
        program = Path(task.command[0])
        if not program.is_absolute():
            return needed
    if not (copied and program.is_relative_to(PROJECT / probe.CODE_ROOTS[0])):
        key = "command" if task.is_command else "entrypoint"
        needed[str(rebased(program, project))] = f"experiment.task.{key}"
    if not (copied or external):
        needed[str(project / BACKEND_DIRECTORY / "megatron" / "core")] = BACKEND
    return needed


def _need(experiment: Experiment, made: Survey, number: int, fresh: bool) -> Need:
    own, host = made.settings[number], made.hosts[number]
    project = str(own.build_dir or PROJECT)
    layout = Layout(experiment.exp_dir, experiment.runner.log_dir)
    want = directories.wanted(experiment, layout, own, first=number == 0)

    variables = experiment.envs.for_host(host.name, host.device_type)
    environment = {k: parts(k, v) for k, v in variables.items() if not is_secret(k, v)}
    ask = partial(ModuleQuestion, project=project, environment=environment)
    asked = [(backend.CHECK, backend.MODULE, backend.words(experiment))]
    asked += [(part.check, part.module, part.words(experiment)) for part in user_code.ALL]
    return Need(
        project=project,
        exp_dir=str(experiment.exp_dir),
        paths=list(made.needed[number]),
        written=list(want.written.values()),
        load=want.load,
        compared=compares_code(experiment, here=made.here),
        asked=[ask(check, module, words) for check, module, words in asked if words],
        # Rank 0 chooses the checkpoint for all.
        asked_of_checkpoints=(
            [ask(checkpoint.CHECK, checkpoint.MODULE, [want.load])] if number == 0 else []
        ),
        fresh=fresh,
    )


def plan_of(experiment: Experiment, found: Survey, run_id: str, runner: RunnerHandle) -> LaunchPlan:
    """The plan that follows from the answers."""
    master = found.facts.get(0)
    port = master.port if master is not None else None
    known = describe_machines(experiment, found.hosts, found.facts, here=found.here)
    return plan(
        experiment,
        assign_ranks(experiment, found.hosts, known, found.settings),
        run_id=run_id,
        master_port=port or wanted_port(experiment.runner) or 0,
        runner=runner,
        shared_fs=found.here or not experiment.runner.no_shared_fs,
        run_secret=secret.new(),
    )


def port_in_use(experiment: Experiment, found: Survey) -> ConfigError | None:
    """What there is to say of a port that is taken on the master host, unless by the run that is
    alive there, which is told by itself."""
    runner, master = experiment.runner, found.facts.get(0)
    if master is None or master.alive or (master.port is not None and master.busy_port is None):
        return None
    holder = master.port_holder or "another process"
    text = f"port {master.busy_port} of {found.names[0]} is in use by {holder}"
    key, what = "master_port", "choose another one"
    if master.busy_port != wanted_port(runner):
        key = "liveness_port"
        if runner.liveness_port is None:
            text += "; agents meet there, beside experiment.runner.master_port"
            what = f"set {key}, or choose another master_port"
    problem = Problem(f"experiment.runner.{key}", text)
    return ConfigError(problem, hint=f"{what}, or leave both keys out to get free ports")
