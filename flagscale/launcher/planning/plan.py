"""Construction of the launch plan from an experiment and its host assignments. Pure functions.

``action=dryrun`` prints the same :class:`LaunchPlan` that ``action=run`` starts. Properties of the
machines (interpreter, devices, cores, inherited variables) are part of the assignments; values that
differ from run to run are parameters: ``run_id``, ``master_port`` and ``run_secret``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.config.arguments.spec.command_line import command_line
from flagscale.config.arguments.spec.train_arguments import TrainArguments, read_arguments
from flagscale.config.placement import describe_host_contents, fill_automatic_meshes
from flagscale.config.schema import BACKEND_DIRECTORY, Experiment, Runner, Task
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, rendezvous_address
from flagscale.hosts.names import compress_consecutive
from flagscale.launcher.layout import RANKS_DIRECTORY, STATUS_DIRECTORY, Layout
from flagscale.launcher.planning import supervision
from flagscale.launcher.planning.assignment import requested_device
from flagscale.launcher.planning.environment import (
    build_environment,
    configured_variables,
    run_variables,
)
from flagscale.launcher.planning.model import (
    HostAssignment,
    HostPlan,
    LaunchPlan,
    Machine,
    RunnerHandle,
)
from flagscale.launcher.planning.per_host import HostSettings, program_path, resolve_all_settings
from flagscale.launcher.planning.supervision import AgentRendezvous
from flagscale.module_command import python_arguments
from flagscale.object_storage import is_address

HOOK_DIRECTORY = "flagscale/rank_hooks"
"""Directory in the project for PYTHONPATH of programs other than ours."""
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def plan(
    experiment: Experiment,
    assignments: Sequence[HostAssignment],
    *,
    run_id: str,
    master_port: int,
    runner: RunnerHandle,
    settings: Sequence[HostSettings] | None = None,
    shared_fs: bool = True,
    run_secret: str | None = None,
) -> LaunchPlan:
    """Return the plan of every host.

    Args:
        settings: Settings of each host, if they have been resolved already.
        runner: The runner that starts the plan.
        run_secret: Secret shared by the agents of several hosts. Without it each agent watches its
            host alone.

    Raises:
        ConfigError: If no host could run the plan.
    """
    runner_config = experiment.runner
    hosts = [assignment.host for assignment in assignments]
    settings = resolve_all_settings(experiment, hosts) if settings is None else settings
    address = master_address(runner_config, hosts)
    rendezvous = None
    if len(assignments) > 1:
        names = tuple(compress_consecutive(host.name for host in hosts))
        port = supervision.liveness_port(runner_config, master_port)
        mesh_positions = describe_host_contents(
            experiment, [assignment.ranks for assignment in assignments if not assignment.is_spare]
        )
        addresses = compress_consecutive(host.addr or host.name for host in hosts[1:])
        rendezvous = AgentRendezvous(
            address,
            port,
            names,
            hosts[0].name,
            tuple(addresses),
            run_secret,
            tuple(mesh_positions),
        )
    planner = _HostPlanner(
        experiment, run_id, tuple(assignments), (address, master_port), rendezvous
    )
    return LaunchPlan(
        run_id=run_id,
        name=experiment.name,
        exp_dir=experiment.exp_dir,
        log_dir=runner_config.log_dir,
        master_addr=address,
        master_port=master_port,
        hosts=tuple(map(planner.plan_host, assignments, settings)),
        external=experiment.task.external,
        start_timeout=runner_config.start_timeout,
        stop_grace=runner_config.stop_grace,
        runner=runner,
        shared_fs=shared_fs,
        liveness_port=rendezvous.port if rendezvous is not None else None,
    )


def master_address(runner: Runner, hosts: Sequence[Host]) -> str:
    """Return the master address of the ranks: the user's, else the first host's.

    Raises:
        ConfigError: If the user's is no address: it is an argument of the ranks' command line.
    """
    key, address = "master_addr", runner.master_addr
    if not address:
        key, address = "rdzv_endpoint", _parse_endpoint(runner)[0]
    if address and not _is_host_address(address):
        problem = f"expected a host name or an address, found {address!r}"
        raise ConfigError(Problem(f"experiment.runner.{key}", problem))
    return rendezvous_address(address, hosts)


def _is_host_address(text: str) -> bool:
    """Return True for a host name and for an IP address, which may have brackets and a zone."""
    if _HOST_NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _parse_endpoint(runner: Runner) -> tuple[str | None, int | None]:
    """Parse ``rdzv_endpoint`` into an address and a port."""
    if not runner.rdzv_endpoint:
        return None, None
    address, colon, port = runner.rdzv_endpoint.rpartition(":")
    if not colon:
        return runner.rdzv_endpoint, None
    if not port.isdigit():
        key = "experiment.runner.rdzv_endpoint"
        raise ConfigError(Problem(key, f"{runner.rdzv_endpoint!r}: expected host:port"))
    return address, int(port)


def requested_port(runner: Runner) -> int | None:
    """Return the port that the user requested; None if any free port will do."""
    return runner.master_port or _parse_endpoint(runner)[1]


def program_arguments(
    experiment: Experiment, layout: Layout, args: TrainArguments, project: Path
) -> tuple[str, ...]:
    """Return the training program and its arguments.

    Arguments come from the YAML, completed with the default directories of this experiment.

    Raises:
        ConfigError: If an argument looks like a secret.
    """
    problems = [
        Problem(argument.key, "looks like a secret, which a script and the process list would show")
        for argument in args
        if is_secret(argument.name, argument.value)
    ]
    if problems:
        raise ConfigError(problems, hint="give it as an environment variable: experiment.envs")
    directories = read_arguments(default_directories(layout, args)).arguments
    arguments = command_line(
        args.with_added(directories.entries), external=experiment.task.external
    )
    return (str(program_path(experiment.task, project)), *arguments)


def _saves_when_stopped(experiment: Experiment) -> bool:
    """Return True if ranks save a checkpoint on SIGTERM, as far as it is known."""
    args = experiment.train
    saves = "save" not in args.named or args["save"] is not None
    is_own = not experiment.task.external and not experiment.task.is_command
    return is_own and saves and bool(args["exit_signal_handler"])


def default_directories(layout: Layout, args: TrainArguments) -> dict[str, str]:
    """Return the default directories of an experiment for arguments that the YAML does not set.

    A null counts as set: ``save: null`` saves nothing. A run that saves to object storage loads
    from there.
    """
    defaults: dict[str, Path | str] = {
        "save": layout.checkpoints,
        "load": layout.checkpoints,
        "tensorboard_dir": layout.tensorboard,
        "wandb_save_dir": layout.wandb,
    }
    save = args["save"]
    if isinstance(save, str) and is_address(save):
        defaults |= {"load": save, "save_staging_dir": layout.checkpoint_staging}
    return {name: str(path) for name, path in defaults.items() if name not in args.named}


@dataclass(frozen=True)
class _HostPlanner:
    """Builder of the hosts' plans from the values that all hosts of a run share."""

    experiment: Experiment
    run_id: str
    assignments: tuple[HostAssignment, ...]
    master: tuple[str, int]
    rendezvous: AgentRendezvous | None
    _programs: dict[tuple[int, Path], tuple[str, ...]] = field(default_factory=dict)

    def plan_host(self, assignment: HostAssignment, settings: HostSettings) -> HostPlan:
        """Return the plan of one host."""
        host, machine = assignment.host, assignment.machine
        runner = self.experiment.runner
        layout = Layout(self.experiment.exp_dir, runner.log_dir)
        run_dir = layout.run_dir(assignment.node_rank, host.name, self.run_id)
        environment = build_environment(
            configured_variables(self.experiment.envs, host, self.experiment.sources),
            host,
            machine.environment,
            stop_grace=runner.stop_grace,
            threads=None if machine.cpus is None else max(1, machine.cpus // assignment.nproc),
            devices=machine.devices,
            interface=machine.interface,
        )
        backend, packages = machine.project / BACKEND_DIRECTORY, self.experiment.task.packages
        return HostPlan(
            node_rank=assignment.node_rank,
            name=host.name,
            device_type=host.device_type,
            address=host.addr or host.name,
            nproc=0 if assignment.is_spare else assignment.nproc,
            first_rank=assignment.first_rank,
            environment=(
                *run_variables(self.run_id, run_dir / STATUS_DIRECTORY),
                *environment,
                *supervision.agent_environment(runner, assignment, self.rendezvous),
            ),
            python_path=(
                *map(str, packages),
                str(backend),
                *self._hook_directories(machine.project),
                str(machine.project),
            ),
            workdir=machine.workdir or machine.project,
            python=machine.python,
            agent=supervision.agent_options(
                runner,
                self.experiment.name,
                assignment,
                run_dir,
                self.rendezvous,
                reports_status=not self.experiment.task.is_command,
                device=requested_device(self.experiment),
                saves_when_stopped=_saves_when_stopped(self.experiment),
            ),
            starter=self._starter_arguments(assignment, run_dir),
            program=(
                _command_arguments(self.experiment.task, machine)
                if self.experiment.task.is_command
                else self._program_arguments(settings, layout, machine.project)
            ),
            run_dir=run_dir,
            script=layout.script(assignment.node_rank, host.name),
            output=layout.output(assignment.node_rank, host.name),
            pid_file=layout.pid(assignment.node_rank, host.name),
            before_start=settings.setup + settings.before_start,
            after_stop=settings.after_stop,
            origins=settings.origins,
            unprobed=machine.cpus is None,
        )

    @property
    def _training_hosts(self) -> list[HostAssignment]:
        return [assignment for assignment in self.assignments if not assignment.is_spare]

    def _hook_directories(self, project: Path) -> tuple[str, ...]:
        """Return the directory whose ``sitecustomize`` makes other programs answer the agents."""
        task = self.experiment.task
        return (str(project / HOOK_DIRECTORY),) if task.is_command or task.external else ()

    def _program_arguments(
        self, settings: HostSettings, layout: Layout, project: Path
    ) -> tuple[str, ...]:
        """Return the program and its arguments, computed once for all hosts that share their
        settings.
        """
        key = (id(settings), project)
        if key not in self._programs:
            args = fill_automatic_meshes(settings.train, self._training_hosts)
            self._programs[key] = program_arguments(self.experiment, layout, args, project)
        return self._programs[key]

    def _starter_arguments(self, assignment: HostAssignment, run_dir: Path) -> tuple[str, ...]:
        """Return the command that starts the ranks.

        Keys of the runner that only the launcher uses are not passed on.
        """
        runner, machine = self.experiment.runner, assignment.machine
        options: dict[str, str | None] = {
            "nnodes": str(len(self._training_hosts)),
            "node_rank": str(assignment.node_rank),
            "nproc_per_node": str(assignment.nproc),
            "rdzv_id": runner.rdzv_id or self.run_id,
            "master_addr": self.master[0],
            "master_port": str(self.master[1]),
            "log_dir": str(run_dir / RANKS_DIRECTORY),
            "redirects": runner.redirects,
            "tee": runner.tee,
        }
        if self.experiment.task.is_command:
            options |= {
                "first_rank": str(assignment.first_rank),
                "world_size": str(sum(host.nproc for host in self._training_hosts)),
                "stop_grace": f"{runner.stop_grace:g}",
            }
            starter = python_arguments("flagscale.launcher.rank_processes", machine.project)
            return (machine.python, *starter, *_format_options(options), "--")
        # torchrun must not restart ranks: the agents restart the whole job, on all hosts at once.
        options |= {"max_restarts": "0", **runner.extra}
        torchrun = python_arguments("torch.distributed.run", machine.project)
        return (machine.python, "-u", *torchrun, *_format_options(options))


def _format_options(options: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the words of a command line; None stands for an option without a value."""
    for name, value in options.items():
        yield f"--{name}"
        if value is not None:
            yield value


def _command_arguments(task: Task, machine: Machine) -> tuple[str, ...]:
    """Return the words of ``experiment.task.command``, with the host's own Python interpreter."""
    first, *arguments = task.command
    if first == "python":
        return (machine.python, *arguments)
    if first == "-m":
        return (machine.python, first, *arguments)
    if first == str(task.entrypoint):
        return (machine.python, str(program_path(task, machine.project)), *arguments)
    return task.command
