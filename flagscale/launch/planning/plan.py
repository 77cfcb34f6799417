"""From an experiment and its hosts to exactly what each host will run. Pure.

The same :class:`LaunchPlan` is printed by ``action=dryrun`` and started by ``action=run``. What
depends on the machine (interpreter, devices, cores, inherited variables) comes in as a
:class:`Machine`, what differs from run to run as ``run_id`` and ``master_port``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagscale.config.arguments.flatten import flatten, leaves
from flagscale.config.interpolation import parts, references
from flagscale.config.schema import Experiment, Runner
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.files import plain
from flagscale.hosts import probe
from flagscale.hosts.hostfile import Host, count_ranks
from flagscale.launch.layout import RANKS_DIRECTORY, STATUS_DIRECTORY, Layout
from flagscale.launch.planning import devices
from flagscale.launch.planning.environment import EnvValue, build_environment
from flagscale.launch.planning.per_host import rebased, settings
from flagscale.launch.planning.supervision import supervised

BACKEND_DIRECTORY = Path("third_party") / "Megatron-LM"


@dataclass(frozen=True)
class Machine:
    """What planning needs to know of a machine."""

    python: str
    project: Path
    """Directory that holds the ``flagscale`` package and ``third_party``."""
    workdir: Path
    """Directory from which the user started; the ranks' working directory."""
    cpus: int | None
    gpus: int | None
    """None, as for ``cpus``, where the machine has not been asked."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What processes started there inherit."""
    interface: str | None = None
    """The network interface over which it reaches the other hosts, where there are others."""


@dataclass(frozen=True)
class Endpoint:
    """How SSH reaches a host where that differs from the user's SSH configuration."""

    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class HostPlan:
    """What one host runs. Every path is absolute on that host."""

    rank: int
    name: str
    device_type: str | None
    address: str
    nproc: int
    first_rank: int
    environment: tuple[EnvValue, ...]
    python_path: tuple[str, ...]
    """What stands first in PYTHONPATH, before the user's own entries in ``environment``."""
    workdir: Path
    agent: tuple[str, ...]
    torchrun: tuple[str, ...]
    program: tuple[str, ...]
    run_dir: Path
    script: Path
    output: Path
    pid_file: Path
    before_start: str = ""
    """Shell commands before the job, the activation of an environment among them."""
    after_stop: str = ""
    origins: tuple[tuple[str, str], ...] = ()
    """What this host's type or name changed: dotted key and value."""
    ssh: Endpoint | None = None
    """How SSH reaches it; None for this machine."""
    unprobed: bool = False
    """Whether its script has to find out by itself what the host is like."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True)
class LaunchPlan:
    """A whole run, host by host."""

    run_id: str
    name: str
    exp_dir: Path
    log_dir: Path | None
    master_addr: str
    master_port: int
    hosts: tuple[HostPlan, ...]
    external: bool
    """Whether the program may not be ours, and so may report no status."""
    start_timeout: float
    stop_grace: float
    notes: tuple[str, ...] = ()
    shared_fs: bool = True
    """Whether the hosts and this machine see the same files."""
    ssh_config: Path | None = None
    liveness_port: int | None = None
    """Where the agents meet on the master's host; None on a run's only host."""

    @property
    def world_size(self) -> int:
        return sum(host.nproc for host in self.hosts)

    @property
    def layout(self) -> Layout:
        return Layout(self.exp_dir, self.log_dir)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, without the values of secrets."""
        record = {**vars(self), "hosts": [], "world_size": self.world_size}
        for host in self.hosts:
            environment = [value.to_json() for value in host.environment]
            record["hosts"].append({**vars(host), "environment": environment})
        return dict(plain(record))


def plan(
    experiment: Experiment,
    hosts: Sequence[Host],
    machines: Machine | Sequence[Machine],
    *,
    run_id: str,
    master_port: int,
    over_ssh: bool = False,
    run_secret: str | None = None,
) -> LaunchPlan:
    """What every host runs. ``machines`` are theirs, or one that stands for all of them. The hosts
    of a run share ``run_secret``, which is made here where it is not given.

    Raises :class:`ConfigError` for what no host could run.
    """
    runner = experiment.runner
    each = [machines] * len(hosts) if isinstance(machines, Machine) else list(machines)
    draft = LaunchPlan(
        run_id=run_id,
        name=experiment.name,
        exp_dir=experiment.exp_dir,
        log_dir=runner.log_dir,
        master_addr=master_address(runner, hosts),
        master_port=master_port,
        hosts=(),
        external=experiment.task.external,
        start_timeout=runner.start_timeout,
        stop_grace=runner.stop_grace,
        shared_fs=not (over_ssh and runner.no_shared_fs),
        ssh_config=runner.ssh_config if over_ssh else None,
    )
    planned: list[HostPlan] = []
    for rank, (host, machine) in enumerate(zip(hosts, each, strict=True)):
        nproc = ranks_of(experiment, host, machine)
        first = sum(before.nproc for before in planned)
        made = _plan_host(draft, experiment, machine, host, (rank, nproc, first))
        place = Endpoint(host.user, host.port or runner.ssh_port, host.proxy)
        planned.append(replace(made, ssh=place) if over_ssh else made)
    whole = replace(draft, hosts=tuple(_with_node_count(planned)))
    return supervised(whole, runner, run_secret)


def master_address(runner: Runner, hosts: Sequence[Host]) -> str:
    """The address at which ranks meet: what the user says, else the first host's."""
    return meeting_address(runner.master_addr or _endpoint(runner)[0], hosts)


def meeting_address(given: str | None, hosts: Sequence[Host]) -> str:
    """Where ranks on ``hosts`` meet, unless the user has ``given`` an address."""
    alone = "127.0.0.1" if len(hosts) == 1 else None
    return given or alone or hosts[0].addr or hosts[0].name


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


def ranks_of(experiment: Experiment, host: Host, machine: Machine) -> int:
    """How many ranks this host takes."""
    own = machine.environment
    envs = experiment.envs.for_host(host.name, host.device_type)
    # What another host has in its own environment is not known here, and limits nothing.
    known = {k: parts(k, v) for k, v in envs.items() if own or not references(v)}
    given = {**own, **{k: probe.filled(value, own) for k, value in known.items()}}
    wanted = experiment.runner.nproc_per_node
    if wanted == "auto":
        visible = devices.visible_devices(given)
        if machine.gpus is None:
            return count_ranks(host.slots, None, visible)
        automatic = devices.automatic_ranks(given, machine.gpus)
        return count_ranks(host.slots, automatic, visible)
    return count_ranks(host.slots, wanted, devices.visible_devices(given))


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
    none."""
    given = set(_names(sections))
    defaults = {
        "save": layout.checkpoints,
        "load": layout.checkpoints,
        "tensorboard_dir": layout.tensorboard,
        "wandb_save_dir": layout.wandb,
    }
    return {name: str(path) for name, path in defaults.items() if name not in given}


def _names(sections: Mapping[Any, Any]) -> Iterator[str]:
    """The arguments that a YAML names. A null is among them: ``save: null`` saves nothing."""
    for key, value in sections.items():
        if isinstance(value, Mapping):
            yield from _names(value)
        else:
            yield str(key).replace("-", "_")


def _plan_host(
    draft: LaunchPlan,
    experiment: Experiment,
    machine: Machine,
    host: Host,
    place: tuple[int, int, int],
) -> HostPlan:
    rank, nproc, first_rank = place
    own = settings(experiment, host)
    layout = draft.layout
    run_dir = layout.run_dir(rank, host.name, draft.run_id)
    environment = build_environment(
        experiment,
        host,
        machine.environment,
        run_id=draft.run_id,
        status_dir=run_dir / STATUS_DIRECTORY,
        threads=None if machine.cpus is None else max(1, machine.cpus // nproc),
        gpus=machine.gpus,
        interface=machine.interface,
    )
    backend = machine.project / BACKEND_DIRECTORY
    return HostPlan(
        rank=rank,
        name=host.name,
        device_type=host.device_type,
        address=host.addr or host.name,
        nproc=nproc,
        first_rank=first_rank,
        environment=environment,
        python_path=(str(backend), str(machine.project)),
        workdir=machine.workdir,
        agent=(
            *(machine.python, "-m", "flagscale.launch.agent"),
            *("--run-dir", str(run_dir)),
            *("--grace", f"{draft.stop_grace:g}"),
        ),
        torchrun=_torchrun(draft, experiment.runner, machine, run_dir, (rank, nproc)),
        program=program_arguments(experiment, layout, own.sections, machine.project),
        run_dir=run_dir,
        script=layout.script(rank, host.name),
        output=layout.output(rank, host.name),
        pid_file=layout.pid(rank, host.name),
        before_start=own.commands_before,
        after_stop=own.after_stop,
        origins=own.origins,
        unprobed=machine.cpus is None,
    )


def _torchrun(
    draft: LaunchPlan, runner: Runner, machine: Machine, run_dir: Path, place: tuple[int, int]
) -> tuple[str, ...]:
    """torchrun and its options: launcher-only keys of the runner never reach it."""
    rank, nproc = place
    options: dict[str, str | None] = {
        "nnodes": "1",
        "node_rank": str(rank),
        "nproc_per_node": str(nproc),
        "rdzv_id": runner.rdzv_id or draft.run_id,
        "master_addr": draft.master_addr,
        "master_port": str(draft.master_port),
        "log_dir": str(run_dir / RANKS_DIRECTORY),
        "redirects": runner.redirects,
        "tee": runner.tee,
        # The agents start the whole job again, on all hosts at once.
        "max_restarts": "0",
        **runner.extra,
    }
    words = [machine.python, "-u", "-m", "torch.distributed.run"]
    for name, value in options.items():
        words.append(f"--{name}")
        if value is not None:
            words.append(value)
    return tuple(words)


def _with_node_count(planned: Sequence[HostPlan]) -> Iterator[HostPlan]:
    """The number of hosts, which is known once every host is planned."""
    for host in planned:
        at = host.torchrun.index("--nnodes") + 1
        words = (*host.torchrun[:at], str(len(planned)), *host.torchrun[at + 1 :])
        yield replace(host, torchrun=words)
