"""Query all hosts of a run at once, and plan the run from their replies.

A query is a bash program that :mod:`flagscale.hosts.facts` runs on a host; it also runs modules
of this project with the host's Python, for the checks of this package.
"""

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
from flagscale.object_storage import is_address

TRAINING_BACKEND = "the adapted training backend"
"""Description of what requires the adapted backend's source, in place of a configuration key."""


@dataclass
class HostReplies:
    """Replies of the hosts by index, and the errors of those that did not reply."""

    hosts: tuple[Host, ...]
    settings: tuple[HostSettings, ...]
    """Settings of the experiment for each host."""
    is_local: bool = False
    """True if this machine is the only host."""
    required_paths: tuple[Mapping[str, str], ...] = ()
    """Paths that each host must have, with the keys that require them."""
    facts: dict[int, HostFacts] = field(default_factory=dict)
    errors: dict[int, FlagscaleError] = field(default_factory=dict)
    code_digest: str = ""
    """Digest of this machine's code; empty if it was not compared."""
    is_code_copied: bool = False
    """True once this machine's code was copied to the hosts."""

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def query_hosts(
    experiment: Experiment,
    hosts: Sequence[Host],
    connections: Hosts,
    *,
    is_local: bool,
    for_preflight: bool,
    ignore_cache: bool = False,
) -> HostReplies:
    """Query the hosts.

    ``is_local`` is True if this machine is the only host. With ``for_preflight``, every host is
    queried for a preflight. Its Python is probed again if ``ignore_cache``, otherwise only if
    something has changed since its last reply. Without ``for_preflight``, only the master host is
    queried, for a port, and the scripts of the other hosts read their facts themselves.
    """
    replies = HostReplies(tuple(hosts), resolve_all_settings(experiment, hosts), is_local)
    if for_preflight:
        replies.required_paths = tuple(
            _required_paths(experiment, settings, is_local=is_local)
            for settings in replies.settings
        )
        if compares_code(experiment, is_local=is_local):
            replies.code_digest = probe.digest_manifest(probe.build_manifest(str(PROJECT)))
    queries = list(build_queries(experiment, replies, for_preflight, ignore_cache))

    def read_facts(index: int, connection: HostConnection) -> HostFacts | None:
        return (
            asking.read_host_facts(connection, queries[index])
            if for_preflight or index == 0
            else None
        )

    # All hosts are connected now, so unreachable ones are known before anything starts.
    facts_by_host, replies.errors = connections.run_on_hosts(read_facts)
    replies.facts = {
        number: host_facts for number, host_facts in facts_by_host.items() if host_facts is not None
    }
    return replies


def copies_code(experiment: Experiment, *, is_local: bool) -> bool:
    """Return True if a run copies this machine's code to its hosts."""
    runner = experiment.runner
    return not is_local and runner.sync == "code" and runner.no_shared_fs


def compares_code(experiment: Experiment, *, is_local: bool) -> bool:
    """Return True if hosts may have code of their own: without shared files, or in another
    directory.
    """
    overrides = (*experiment.by_type.values(), *experiment.by_host.values())
    has_own_directory = experiment.runner.build_dir or any(
        specific.build_dir for specific in overrides
    )
    return bool(has_own_directory) or (experiment.runner.no_shared_fs and not is_local)


def build_queries(
    experiment: Experiment, replies: HostReplies, for_preflight: bool, ignore_cache: bool
) -> Iterator[HostQuery]:
    """Yield the query of each host; parameters as in :func:`query_hosts`."""
    runner = experiment.runner
    layout = Layout(experiment.exp_dir, runner.log_dir)
    # A single host needs neither an interface nor a port for agents.
    is_single_host = len(replies.hosts) == 1
    configured_port = requested_port(runner)
    agents_port = (
        liveness_port(runner, configured_port) if configured_port else runner.liveness_port
    )
    for index, settings in enumerate(replies.settings):
        yield HostQuery(
            master="" if is_single_host else master_address(runner, replies.hosts),
            log_root=str(layout.log_dir or layout.logs / "details"),
            python=rank_python(settings),
            setup=settings.setup,
            port=(configured_port or 0) if index == 0 else None,
            agents_port=agents_port if index == 0 and not is_single_host else None,
            preflight=_preflight_query(experiment, replies, index, ignore_cache)
            if for_preflight
            else None,
        )


def rank_python(settings: HostSettings) -> str:
    """Return the Python that starts the ranks of a host: a path or a name there."""
    return settings.python or ("python" if settings.conda else sys.executable)


def _required_paths(
    experiment: Experiment, settings: HostSettings, *, is_local: bool
) -> dict[str, str]:
    """Return the paths that a host must have, with the keys that require them."""
    project = settings.build_dir or PROJECT
    external = experiment.task.external
    train_arguments = [] if external else list(settings.train)
    key_by_path = {
        path: argument.key
        for argument in train_arguments
        for path in files_needed(argument.name, argument.value)
    }
    task = experiment.task
    program, is_code_copied = task.entrypoint, copies_code(experiment, is_local=is_local)
    if task.is_command:
        program = Path(task.command[0])
        if not program.is_absolute():
            return key_by_path
    if not (is_code_copied and program.is_relative_to(PROJECT / probe.CODE_ROOTS[0])):
        key = "command" if task.is_command else "entrypoint"
        path = program if task.is_copied else rebase_path(program, project)
        key_by_path[str(path)] = f"experiment.task.{key}"
    if not (is_code_copied or external):
        key_by_path[str(project / BACKEND_DIRECTORY / "megatron" / "core")] = TRAINING_BACKEND
    return key_by_path


def _preflight_query(
    experiment: Experiment, replies: HostReplies, index: int, ignore_cache: bool
) -> PreflightQuery:
    settings, host = replies.settings[index], replies.hosts[index]
    project = str(settings.build_dir or PROJECT)
    layout = Layout(experiment.exp_dir, experiment.runner.log_dir)
    host_paths = directories.collect_host_paths(experiment, layout, settings, is_first=index == 0)

    variables = experiment.envs.for_host(host.name, host.device_type)
    environment = {k: split_references(k, v) for k, v in variables.items() if not is_secret(k, v)}
    make_query = partial(ModuleQuery, project=project, environment=environment)
    module_queries = [(backend.CHECK, backend.MODULE, backend.query_arguments(experiment))]
    module_queries += [
        (part.check, part.module, part.query_arguments(experiment))
        for part in user_code.HOST_QUERIES
    ]
    # Rank 0 chooses the checkpoint for all.
    load_query = (checkpoint.CHECK, checkpoint.MODULE, [host_paths.load_dir])
    loads_from_storage = is_address(host_paths.load_dir)
    if loads_from_storage and index == 0:
        module_queries.append(load_query)
    return PreflightQuery(
        project=project,
        exp_dir=str(experiment.exp_dir),
        required_paths=list(replies.required_paths[index]),
        output_paths=list(host_paths.output_paths.values()),
        load_dir="" if loads_from_storage else host_paths.load_dir,
        compare_code=compares_code(experiment, is_local=replies.is_local),
        module_queries=[
            make_query(check, module, arguments)
            for check, module, arguments in module_queries
            if arguments
        ],
        checkpoint_queries=[make_query(*load_query)] if index == 0 else [],
        ignore_cache=ignore_cache,
    )


def build_plan(
    experiment: Experiment, replies: HostReplies, run_id: str, runner: RunnerHandle
) -> LaunchPlan:
    """Build the plan from the replies."""
    master = replies.facts.get(0)
    port = master.port if master is not None else None
    shared_fs = not experiment.runner.no_shared_fs
    machines = describe_machines(
        replies.hosts, replies.facts, is_local=replies.is_local, shared_fs=shared_fs
    )
    return plan(
        experiment,
        assign_ranks(experiment, replies.hosts, machines, replies.settings),
        run_id=run_id,
        master_port=port or requested_port(experiment.runner) or 0,
        runner=runner,
        settings=replies.settings,
        shared_fs=replies.is_local or shared_fs,
        run_secret=secret.generate_secret(),
    )


def find_port_conflict(experiment: Experiment, replies: HostReplies) -> ConfigError | None:
    """Return the error for an occupied port on the master host, or None.

    A port that is occupied by a live run of this experiment is reported by another check.
    """
    runner, master = experiment.runner, replies.facts.get(0)
    if (
        master is None
        or master.live_run_id
        or (master.port is not None and master.busy_port is None)
    ):
        return None
    holder = master.port_holder or "another process"
    text = f"port {master.busy_port} of {replies.names[0]} is in use by {holder}"
    key, advice = "master_port", "choose another one"
    if master.busy_port != requested_port(runner):
        key = "liveness_port"
        if runner.liveness_port is None:
            text += "; agents use it, because it is next to experiment.runner.master_port"
            advice = f"set {key}, or choose another master_port"
    problem = Problem(f"experiment.runner.{key}", text)
    return ConfigError(problem, hint=f"{advice}, or omit both keys to get free ports")
