"""From an experiment and its slots to exactly what each host will run. Pure.

The same :class:`LaunchPlan` is printed by ``action=dryrun`` and started by ``action=run``. What
depends on the machines (interpreter, devices, cores, inherited variables) comes in with the slots,
what differs from run to run as ``run_id``, ``master_port`` and ``run_secret``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config import placement
from flagscale.config.arguments.flatten import flatten, leaves
from flagscale.config.schema import BACKEND_DIRECTORY, Experiment, Runner
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, meeting_address
from flagscale.hosts.names import ranges
from flagscale.launcher.layout import RANKS_DIRECTORY, STATUS_DIRECTORY, Layout
from flagscale.launcher.planning import supervision
from flagscale.launcher.planning.environment import build_environment
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle, HostAssignment
from flagscale.launcher.planning.per_host import rebased
from flagscale.launcher.planning.supervision import Meeting
from flagscale.modules import started


def plan(
    experiment: Experiment,
    slots: Sequence[HostAssignment],
    *,
    run_id: str,
    master_port: int,
    runner: RunnerHandle,
    shared_fs: bool = True,
    run_secret: str | None = None,
) -> LaunchPlan:
    """What every host runs. ``runner`` is who starts it; ``run_secret`` is what the agents of
    several hosts share: without one each is on its own.

    Raises :class:`ConfigError` for what no host could run.
    """
    given = experiment.runner
    hosts = [slot.host for slot in slots]
    address = master_address(given, hosts)
    meeting = None
    if len(slots) > 1:
        names = tuple(ranges(host.name for host in hosts))
        port = supervision.liveness_port(given, master_port)
        held = placement.places(experiment, [slot.ranks for slot in slots])
        meeting = Meeting(address, port, names, hosts[0].name, run_secret, tuple(held))
    job = _Job(experiment, run_id, tuple(slots), (address, master_port), meeting)
    return LaunchPlan(
        run_id=run_id,
        name=experiment.name,
        exp_dir=experiment.exp_dir,
        log_dir=given.log_dir,
        master_addr=address,
        master_port=master_port,
        hosts=tuple(job.host(slot) for slot in slots),
        external=experiment.task.external,
        start_timeout=given.start_timeout,
        stop_grace=given.stop_grace,
        runner=runner,
        shared_fs=shared_fs,
        liveness_port=meeting.port if meeting is not None else None,
    )


def master_address(runner: Runner, hosts: Sequence[Host]) -> str:
    """The address at which ranks meet: what the user says, else the first host's."""
    return meeting_address(runner.master_addr or _endpoint(runner)[0], hosts)


def _endpoint(runner: Runner) -> tuple[str | None, int | None]:
    """``rdzv_endpoint`` as address and port."""
    if not runner.rdzv_endpoint:
        return None, None
    address, colon, port = runner.rdzv_endpoint.rpartition(":")
    if not colon:
        return runner.rdzv_endpoint, None
    if not port.isdigit():
        key = "experiment.runner.rdzv_endpoint"
        raise ConfigError(Problem(key, f"{runner.rdzv_endpoint!r}: expected host:port"))
    return address, int(port)


def wanted_port(runner: Runner) -> int | None:
    """The port the user asked for; None where any free one will do."""
    return runner.master_port or _endpoint(runner)[1]


def program_arguments(
    experiment: Experiment, layout: Layout, sections: Mapping[str, Any], project: Path
) -> tuple[str, ...]:
    """The training program and its arguments: the YAML's, and for what it leaves out, the
    directories of this experiment."""
    problems = [
        Problem(key, "looks like a secret, which a script and the process list would show")
        for key, name, value in leaves(sections, "train.")
        if is_secret(name, value)
    ]
    if problems:
        raise ConfigError(problems, hint="give it as an environment variable: experiment.envs")
    directories = unnamed_directories(layout, sections)
    arguments = flatten(
        {**sections, "directories": directories}, external=experiment.task.external, prefix="train."
    )
    return (str(rebased(experiment.task.entrypoint, project)), *arguments)


def unnamed_directories(layout: Layout, sections: Mapping[str, Any]) -> dict[str, str]:
    """The directories of this experiment that training uses, by argument, where the YAML names
    none. A null names one: ``save: null`` saves nothing."""
    given = {name for _, name, _ in leaves(sections, nulls=True)}
    defaults = {
        "save": layout.checkpoints,
        "load": layout.checkpoints,
        "tensorboard_dir": layout.tensorboard,
        "wandb_save_dir": layout.wandb,
    }
    return {name: str(path) for name, path in defaults.items() if name not in given}


@dataclass(frozen=True)
class _Job:
    """What the hosts of a plan have in common."""

    experiment: Experiment
    run_id: str
    slots: tuple[HostAssignment, ...]
    master: tuple[str, int]
    meeting: Meeting | None
    _programs: dict[tuple[int, Path], tuple[str, ...]] = field(default_factory=dict)

    def host(self, slot: HostAssignment) -> HostPlan:
        """What one of them runs."""
        host, machine, own = slot.host, slot.machine, slot.settings
        runner = self.experiment.runner
        layout = Layout(self.experiment.exp_dir, runner.log_dir)
        run_dir = layout.run_dir(slot.node_rank, host.name, self.run_id)
        environment = build_environment(
            self.experiment,
            host,
            machine.environment,
            run_id=self.run_id,
            status_dir=run_dir / STATUS_DIRECTORY,
            threads=None if machine.cpus is None else max(1, machine.cpus // slot.nproc),
            devices=machine.devices,
            interface=machine.interface,
        )
        backend, packages = machine.project / BACKEND_DIRECTORY, self.experiment.task.packages
        return HostPlan(
            node_rank=slot.node_rank,
            name=host.name,
            device_type=host.device_type,
            address=host.addr or host.name,
            nproc=slot.nproc,
            first_rank=slot.first_rank,
            environment=(*environment, *supervision.agent_environment(runner, slot, self.meeting)),
            python_path=(*map(str, packages), str(backend), str(machine.project)),
            workdir=machine.workdir or machine.project,
            python=machine.python,
            agent=supervision.agent_options(
                runner, self.experiment.name, slot, run_dir, self.meeting
            ),
            starter=self._starter(slot, run_dir),
            program=self._program(slot, layout),
            run_dir=run_dir,
            script=layout.script(slot.node_rank, host.name),
            output=layout.output(slot.node_rank, host.name),
            pid_file=layout.pid(slot.node_rank, host.name),
            before_start=own.setup + own.before_start,
            after_stop=own.after_stop,
            origins=own.origins,
            unprobed=machine.cpus is None,
        )

    def _program(self, slot: HostAssignment, layout: Layout) -> tuple[str, ...]:
        """The same for all hosts that share their settings, and so worked out once for them."""
        if self.experiment.task.is_command:
            return _command(self.experiment, slot)
        project = slot.machine.project
        key = (id(slot.settings), project)
        if key not in self._programs:
            sections = placement.written_out(slot.settings.sections, self.slots)
            self._programs[key] = program_arguments(self.experiment, layout, sections, project)
        return self._programs[key]

    def _starter(self, slot: HostAssignment, run_dir: Path) -> tuple[str, ...]:
        """What starts the ranks, and its options: launcher-only keys of the runner never reach
        it."""
        runner, machine = self.experiment.runner, slot.machine
        options: dict[str, str | None] = {
            "nnodes": str(len(self.slots)),
            "node_rank": str(slot.node_rank),
            "nproc_per_node": str(slot.nproc),
            "rdzv_id": runner.rdzv_id or self.run_id,
            "master_addr": self.master[0],
            "master_port": str(self.master[1]),
            "log_dir": str(run_dir / RANKS_DIRECTORY),
            "redirects": runner.redirects,
            "tee": runner.tee,
        }
        if self.experiment.task.is_command:
            world = sum(one.nproc for one in self.slots)
            own = {"first_rank": str(slot.first_rank), "world_size": str(world)}
            own["stop_grace"] = f"{runner.stop_grace:g}"
            starter = started("flagscale.launcher.rank_processes", machine.project)
            return (machine.python, *starter, *_options({**options, **own}), "--")
        # The agents start the whole job again, on all hosts at once.
        options |= {"max_restarts": "0", **runner.extra}
        return (machine.python, "-u", "-m", "torch.distributed.run", *_options(options))


def _options(options: Mapping[str, str | None]) -> Iterator[str]:
    """Words of a command line; None is an option without a value."""
    for name, value in options.items():
        yield f"--{name}"
        if value is not None:
            yield value


def _command(experiment: Experiment, slot: HostAssignment) -> tuple[str, ...]:
    """The words of ``experiment.task.command`` on a host, whose Python runs what is Python's."""
    task, machine = experiment.task, slot.machine
    first, *rest = task.command
    if first == "python":
        return (machine.python, *rest)
    if first == "-m":
        return (machine.python, first, *rest)
    if first == str(task.entrypoint):
        return (machine.python, str(rebased(task.entrypoint, machine.project)), *rest)
    return task.command
