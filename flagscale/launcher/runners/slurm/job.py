"""The Slurm job of a plan: options of sbatch and the batch script.

Options are passed on sbatch's command line as ``--name=value``, which no shell parses and which
takes precedence over ``SBATCH_`` variables and ``#SBATCH`` lines. Pure functions.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from flagscale import __version__
from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.placement import order_by_mesh
from flagscale.config.schema import Experiment, Runner, Slurm
from flagscale.config.slurm_reader import STOP_MARGIN_SECONDS
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, smallest_limit
from flagscale.hosts.names import compress_names
from flagscale.hosts.program import PROGRAMS, read_source
from flagscale.launcher.plan_builder import build_unprobed_plan, check_spares, select_hosts
from flagscale.launcher.planning.deferred_values import defer_to_job
from flagscale.launcher.planning.model import BatchJob, HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.planning.per_host import read_script_part
from flagscale.launcher.planning.plan import requested_port
from flagscale.launcher.runners.slurm import container, files

RUNNER_TYPE = "slurm"
_HERE = Path(__file__).parent
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._\-]+")
_MAX_NAME_LENGTH = 60
_ENDING_SECONDS = 5
_MAX_GUARD_SECONDS = 30.0
# Options of sbatch that are passed on from experiment.runner.slurm.
_RESOURCE_OPTIONS = (
    "partition",
    "account",
    "qos",
    "time",
    "gpus_per_node",
    "cpus_per_task",
    "mem",
    "constraint",
    "reservation",
    "dependency",
)


def plan_with_job(experiment: Experiment) -> LaunchPlan:
    """Return the plan of a run, including its job.

    Raises:
        ConfigError: If the configuration cannot work.
    """
    runner = experiment.runner
    hosts = _select_hosts(experiment)
    has_host_names = runner.names_hosts
    handle = RunnerHandle(RUNNER_TYPE, {"requeue": runner.slurm.requeue, "named": has_host_names})
    in_container = container.use_image_python(experiment)
    plan = build_unprobed_plan(in_container, hosts, handle, is_local=False, is_deferred=True)
    plan = container.use_container_workdir(defer_to_job(plan, runner), runner.slurm.container)
    handle = replace(handle, handle={**handle.handle, "name": job_name(plan)})
    notes = (*plan.notes, *_note_cpu_allocation(runner))
    return replace(plan, runner=handle, job=batch_job(plan, runner), notes=notes)


def _note_cpu_allocation(runner: Runner) -> Iterator[str]:
    if not runner.slurm.exclusive and runner.slurm.cpus_per_task is None:
        yield (
            "experiment.runner.slurm.exclusive: false: Slurm allocates one CPU per node, unless "
            "cpus_per_task requests more"
        )


def _select_hosts(experiment: Experiment) -> tuple[Host, ...]:
    """Return the hostfile's hosts, or the requested number of hosts with placeholder names."""
    runner = experiment.runner
    slurm = runner.slurm
    if runner.names_hosts:
        hosts = select_hosts(experiment)
        _require_types(slurm, hosts)
    else:
        counts: dict[str | None, int] = {
            name: slurm_type.nodes or 0 for name, slurm_type in slurm.by_type.items()
        }
        training = runner.nnodes or 1
        check_spares(experiment, training)
        counts = counts or {None: training + runner.spares}
        placeholder_hosts = [
            Host("", device_type=kind) for kind, n in counts.items() for _ in range(n)
        ]
        hosts = order_by_mesh(experiment, placeholder_hosts)
        hosts = tuple(replace(host, name=f"node-{n}") for n, host in enumerate(hosts))
    if slurm.by_type:
        # The nodes of a component have to be contiguous, in the order in which types first appear.
        type_order = list(dict.fromkeys(host.device_type for host in hosts))
        hosts = tuple(sorted(hosts, key=lambda host: type_order.index(host.device_type)))
    return tuple(_limit_ranks_to_gpus(slurm, host) for host in hosts)


def _limit_ranks_to_gpus(slurm: Slurm, host: Host) -> Host:
    gpus = _requested_resource(slurm, host.device_type, "gpus_per_node")
    count = int(gpus.rpartition(":")[2]) if gpus else None
    return replace(host, slots=smallest_limit(host.slots, count)) if count else host


def _requested_resource(slurm: Slurm, kind: str | None, name: str) -> str | None:
    """Return a requested resource per node: the device type's, or else that of all nodes."""
    slurm_type = slurm.by_type.get(kind) if kind else None
    value: str | None = getattr(slurm_type, name, None)
    common: str | None = getattr(slurm, name)
    return common if value is None else value


def _require_types(slurm: Slurm, hosts: Sequence[Host]) -> None:
    """Check that every configured device type has a host.

    Raises:
        ConfigError: If a type has none.
    """
    types = list(dict.fromkeys(host.device_type for host in hosts if host.device_type))
    key = "experiment.runner.slurm.device_type_specific"
    text = "no host that takes part has this type"
    problems = [
        Problem(f"{key}.{name}", f"{text}{did_you_mean(name, types)}")
        for name in slurm.by_type
        if name not in types
    ]
    if problems:
        raise ConfigError(problems)


def job_name(plan: LaunchPlan) -> str:
    """Return the name of the job: the experiment's name, and the run id that makes it unique."""
    return f"{_UNSAFE_CHARACTERS.sub('_', plan.name)[:_MAX_NAME_LENGTH]}.{plan.run_id}"


def batch_job(plan: LaunchPlan, runner: Runner) -> BatchJob:
    """Return the job of a plan."""
    file = plan.layout.scripts / "slurm_job.sh"
    options: list[str] = []
    for hosts in components(plan, runner.slurm):
        options += [":"] if options else []
        options += [
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in _sbatch_options(plan, runner, hosts)
        ]
    # --parsable applies to the command, not to one component of a heterogeneous job.
    return BatchJob(
        ("sbatch", "--parsable", *options, str(file)), file, render_batch_script(plan, runner)
    )


def components(plan: LaunchPlan, slurm: Slurm) -> list[Sequence[HostPlan]]:
    """Return the hosts of each component of a heterogeneous job, or all hosts as one."""
    if not slurm.by_type:
        return [plan.hosts]
    return [list(hosts) for _, hosts in groupby(plan.hosts, key=lambda host: host.device_type)]


def _sbatch_options(
    plan: LaunchPlan, runner: Runner, hosts: Sequence[HostPlan]
) -> Iterator[tuple[str, str | None]]:
    """Yield the options of sbatch for one component, with their values."""
    slurm, count = runner.slurm, len(hosts)
    yield "job-name", job_name(plan)
    # The script redirects its output itself: Slurm would expand patterns such as %j in the path.
    yield "output", "/dev/null"
    yield "export", "ALL"
    yield "nodes", str(count)
    yield "ntasks", str(count)
    yield "ntasks-per-node", "1"
    if runner.names_hosts:
        yield "nodelist", compress_names(host.name for host in hosts)
    if slurm.exclusive:
        yield "exclusive", None
    if runner.on_bad_host != "stop":
        yield "no-kill", None
    for name in _RESOURCE_OPTIONS:
        if (value := _requested_resource(slurm, hosts[0].device_type, name)) is not None:
            yield name.replace("_", "-"), str(value)
    yield "requeue" if slurm.requeue else "no-requeue", None
    yield "kill-on-invalid-dep", "yes"
    yield "signal", f"B:USR1@{signal_seconds(runner)}"
    for name, extra_value in slurm.extra.items():
        yield name.replace("_", "-"), extra_value


def signal_seconds(runner: Runner) -> int:
    """Return how many seconds before its time limit a job is signalled to save and end."""
    return math.ceil(runner.stop_grace) + STOP_MARGIN_SECONDS


def _lost_node_seconds(runner: Runner) -> int:
    """Return the seconds after the end of the first agent, after which a missing one is lost."""
    return math.ceil(runner.stop_grace + runner.lost_host_timeout) + _ENDING_SECONDS


def _srun_options(runner: Runner, node_count: int, component_count: int) -> Sequence[str]:
    """Return the options of srun: one task per node, independent of the others and not bound."""
    slurm = runner.slurm
    options = [f"--nodes={node_count}", f"--ntasks={node_count}"]
    if component_count > 1:
        options = [f"--het-group={','.join(map(str, range(component_count)))}"]
    options += [
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        "--cpu-bind=none",
    ]
    if runner.on_bad_host != "stop":
        options.append("--no-kill")
    if slurm.cpus_per_task:
        # Some versions of srun do not inherit this option from sbatch.
        options.append(f"--cpus-per-task={slurm.cpus_per_task}")
    return options


def render_batch_script(plan: LaunchPlan, runner: Runner) -> str:
    """Return the batch script."""
    layout, node_count = plan.layout, len(plan.hosts)
    component_count = len(components(plan, runner.slurm))
    address = runner.master_addr or ("127.0.0.1" if node_count == 1 else "")
    if not address and plan.hosts[0].address != plan.hosts[0].name:
        address = plan.hosts[0].address
    values = {
        "run_id": plan.run_id,
        "job_dir": str(files.job_directory(plan.exp_dir, plan.run_id)),
        "scripts": str(layout.scripts),
        "outputs": str(layout.logs),
        "details": str(layout.log_dir or layout.logs / "details"),
        "node_count": str(node_count),
        "requeue": str(runner.slurm.requeue),
        "lost_node_seconds": (
            str(_lost_node_seconds(runner))
            if runner.on_failure == "stop" and node_count > 1
            else ""
        ),
        "on_bad_host": runner.on_bad_host,
        "guard_seconds": str(math.ceil(min(runner.lost_host_timeout, _MAX_GUARD_SECONDS))),
        "master_addr": address,
        "master_port": str(requested_port(runner) or ""),
        "liveness_port": str(runner.liveness_port or ""),
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {' '.join(plan.name.split())}: the job of run {plan.run_id}, {node_count} node(s).",
            f"# Written by flagscale {__version__}; srun starts the script of each node.",
            "# shellcheck disable=SC2016,SC2317,SC2329 # texts for other shells; traps",
            read_script_part("own_shell_options.sh"),
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            _bash_array(
                "srun_options",
                (
                    *_srun_options(runner, node_count, component_count),
                    *container.srun_options(plan, runner),
                ),
            ),
            _bash_array("container_command", container.exec_command(plan, runner)),
            *_bash_text("free_port_source", PROGRAMS / "ports.sh"),
            *_bash_text("node_source", _HERE / "node.sh"),
            *_bash_text("guard_source", _HERE / "guard.sh"),
            "",
            _read_program(_HERE / "job.sh"),
        ]
    )


def _bash_array(name: str, words: Iterable[str]) -> str:
    """Return a bash array."""
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def _bash_text(name: str, path: Path) -> Iterator[str]:
    """Yield lines that assign a program for another shell to a variable."""
    yield f"IFS= read -r -d '' {name} <<'END_{name.upper()}'"
    yield _read_program(path).rstrip("\n")
    yield f"END_{name.upper()}"


def _read_program(path: Path) -> str:
    """Return a program without the comment at the beginning of its file."""
    return read_source(path).partition("\n\n")[2]
