"""Query all hosts of a run at once, and plan the run from their replies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flagscale.config.arguments.spec.paths import files_needed
from flagscale.config.interpolation import split_references
from flagscale.config.schema import BACKEND_DIRECTORY, PROJECT, Experiment
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.hosts import facts as asking
from flagscale.hosts import probe
from flagscale.hosts.connection import HostConnection
from flagscale.hosts.facts import HostFacts, HostQuery, ModuleQuery, PreflightQuery
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import Layout
from flagscale.launcher.liveness import secret
from flagscale.launcher.planning.assignment import assign_ranks, describe_machines
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.per_host import HostSettings, rebase_path, resolve_all_settings
from flagscale.launcher.planning.plan import master_address, plan, requested_port
from flagscale.launcher.planning.supervision import liveness_port
from flagscale.launcher.preflight import backend, checkpoint, directories, user_code

BACKEND = "the adapted training backend"
"""Description of what requires the adapted backend's source, in place of a configuration key."""


@dataclass
class HostReplies:
    """Replies of the hosts by index, and the errors of those that did not reply."""

    hosts: tuple[Host, ...]
    settings: tuple[HostSettings, ...]
    """Settings of the experiment for each host."""
    here: bool = False
    """True if this machine is the only host."""
    needed: tuple[Mapping[str, str], ...] = ()
    """Paths that each host must have, with the keys that require them."""
    facts: dict[int, HostFacts] = field(default_factory=dict)
    errors: dict[int, FlagscaleError] = field(default_factory=dict)
    code: str = ""
    """Digest of this machine's code; empty if it was not compared."""

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def query_hosts(
    experiment: Experiment,
    hosts: Sequence[Host],
    connections: Hosts,
    *,
    here: bool,
    thorough: bool,
    fresh: bool = False,
) -> HostReplies:
    """Query the hosts.

    With ``thorough``, every host is queried for a preflight. Its Python is asked again if
    ``fresh``, otherwise only if something has changed since its last reply. Without ``thorough``,
    only the master host is asked for a port, and the scripts of the other hosts look for
    themselves.
    """
    replies = HostReplies(tuple(hosts), resolve_all_settings(experiment, hosts), here)
    if thorough:
        replies.needed = tuple(
            _required_paths(experiment, settings, here=here) for settings in replies.settings
        )
        if compares_code(experiment, here=here):
            replies.code = probe.digest_manifest(probe.build_manifest(str(PROJECT)))
    queries = list(build_queries(experiment, replies, thorough, fresh))

    def visit(number: int, executor: HostConnection) -> HostFacts | None:
        return (
            asking.read_host_facts(executor, queries[number]) if thorough or number == 0 else None
        )

    # All hosts are connected now, so unreachable ones are known before anything starts.
    facts_by_host, replies.errors = connections.each(visit)
    replies.facts = {
        number: host_facts for number, host_facts in facts_by_host.items() if host_facts is not None
    }
    return replies


def copies_code(experiment: Experiment, *, here: bool) -> bool:
    """Return whether a run copies this machine's code to its hosts."""
    runner = experiment.runner
    return not here and runner.sync == "code" and runner.no_shared_fs


def compares_code(experiment: Experiment, *, here: bool) -> bool:
    """Return whether hosts may have code of their own: without shared files, or in another
    directory.
    """
    overrides = (*experiment.by_type.values(), *experiment.by_host.values())
    own_directory = experiment.runner.build_dir or any(specific.build_dir for specific in overrides)
    return bool(own_directory) or (experiment.runner.no_shared_fs and not here)


def build_queries(
    experiment: Experiment, replies: HostReplies, thorough: bool, fresh: bool
) -> Iterator[HostQuery]:
    runner = experiment.runner
    layout = Layout(experiment.exp_dir, runner.log_dir)
    # A single host needs neither an interface nor a port for agents.
    alone = len(replies.hosts) == 1
    configured_port = requested_port(runner)
    agents_port = (
        liveness_port(runner, configured_port) if configured_port else runner.liveness_port
    )
    for number, settings in enumerate(replies.settings):
        yield HostQuery(
            master="" if alone else master_address(runner, replies.hosts),
            log_root=str(layout.log_dir or layout.logs / "details"),
            python=rank_python(settings),
            setup=settings.setup,
            port=(configured_port or 0) if number == 0 else None,
            agents_port=agents_port if number == 0 and not alone else None,
            preflight=_preflight_query(experiment, replies, number, fresh) if thorough else None,
        )


def rank_python(settings: HostSettings) -> str:
    """Return the Python that starts the ranks of a host: a path or a name there."""
    return settings.python or ("python" if settings.conda else sys.executable)


def _required_paths(
    experiment: Experiment, settings: HostSettings, *, here: bool
) -> dict[str, str]:
    """Return the paths that a host must have, with the keys that require them."""
    project = settings.build_dir or PROJECT
    external = experiment.task.external
    reads = [] if external else list(settings.train)
    needed = {path: given.key for given in reads for path in files_needed(given.name, given.value)}
    task = experiment.task
    program, copied = task.entrypoint, copies_code(experiment, here=here)
    if task.is_command:
        program = Path(task.command[0])
        if not program.is_absolute():
            return needed
    if not (copied and program.is_relative_to(PROJECT / probe.CODE_ROOTS[0])):
        key = "command" if task.is_command else "entrypoint"
        needed[str(rebase_path(program, project))] = f"experiment.task.{key}"
    if not (copied or external):
        needed[str(project / BACKEND_DIRECTORY / "megatron" / "core")] = BACKEND
    return needed


def _preflight_query(
    experiment: Experiment, replies: HostReplies, number: int, fresh: bool
) -> PreflightQuery:
    settings, host = replies.settings[number], replies.hosts[number]
    project = str(settings.build_dir or PROJECT)
    layout = Layout(experiment.exp_dir, experiment.runner.log_dir)
    host_paths = directories.collect_host_paths(experiment, layout, settings, first=number == 0)

    variables = experiment.envs.for_host(host.name, host.device_type)
    environment = {k: split_references(k, v) for k, v in variables.items() if not is_secret(k, v)}
    ask = partial(ModuleQuery, project=project, environment=environment)
    module_queries = [(backend.CHECK, backend.MODULE, backend.query_words(experiment))]
    module_queries += [
        (part.check, part.module, part.query_words(experiment)) for part in user_code.USER_CODE
    ]
    return PreflightQuery(
        project=project,
        exp_dir=str(experiment.exp_dir),
        required_paths=list(replies.needed[number]),
        output_paths=list(host_paths.written.values()),
        load_dir=host_paths.load,
        compare_code=compares_code(experiment, here=replies.here),
        module_queries=[
            ask(check, module, words) for check, module, words in module_queries if words
        ],
        # Rank 0 chooses the checkpoint for all.
        checkpoint_queries=(
            [ask(checkpoint.CHECK, checkpoint.MODULE, [host_paths.load])] if number == 0 else []
        ),
        ignore_cache=fresh,
    )


def build_plan(
    experiment: Experiment, replies: HostReplies, run_id: str, runner: RunnerHandle
) -> LaunchPlan:
    """Build the plan from the replies."""
    master = replies.facts.get(0)
    port = master.port if master is not None else None
    machines = describe_machines(experiment, replies.hosts, replies.facts, here=replies.here)
    return plan(
        experiment,
        assign_ranks(experiment, replies.hosts, machines, replies.settings),
        run_id=run_id,
        master_port=port or requested_port(experiment.runner) or 0,
        runner=runner,
        shared_fs=replies.here or not experiment.runner.no_shared_fs,
        run_secret=secret.generate_secret(),
    )


def find_port_conflict(experiment: Experiment, replies: HostReplies) -> ConfigError | None:
    """Return the error for an occupied port on the master host, or None.

    A port that is occupied by a live run of this experiment is reported by another check.
    """
    runner, master = experiment.runner, replies.facts.get(0)
    if master is None or master.alive or (master.port is not None and master.busy_port is None):
        return None
    holder = master.port_holder or "another process"
    text = f"port {master.busy_port} of {replies.names[0]} is in use by {holder}"
    key, advice = "master_port", "choose another one"
    if master.busy_port != requested_port(runner):
        key = "liveness_port"
        if runner.liveness_port is None:
            text += "; agents meet there, beside experiment.runner.master_port"
            advice = f"set {key}, or choose another master_port"
    problem = Problem(f"experiment.runner.{key}", text)
    return ConfigError(problem, hint=f"{advice}, or leave both keys out to get free ports")
