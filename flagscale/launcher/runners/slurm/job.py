"""From an experiment to the job that Slurm is given: options of sbatch and the batch script. Pure.

Options are words of sbatch's command line, ``--name=value``, which no shell reads and which go
before its ``SBATCH_`` variables and ``#SBATCH`` lines.
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
from flagscale.config import placement
from flagscale.config.arguments.values import did_you_mean
from flagscale.config.schema import Experiment, Runner, Slurm
from flagscale.config.slurm_reader import SAVING_SECONDS
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host, least
from flagscale.hosts.names import compress
from flagscale.hosts.program import PROGRAMS, source
from flagscale.launcher.plan_builder import hosts_of, unprobed_plan
from flagscale.launcher.planning.deferred_values import left_to_the_job
from flagscale.launcher.planning.model import BatchJob, HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.planning.plan import wanted_port
from flagscale.launcher.runners.slurm import container, files

TYPE = "slurm"
_HERE = Path(__file__).parent
_NAMES_TAKEN = re.compile(r"[^A-Za-z0-9._\-]+")
_MOST_NAME = 60
_ENDING_SECONDS = 5


def plan_of(experiment: Experiment) -> LaunchPlan:
    """The plan of a run, its job in it. Raises :class:`ConfigError` for what cannot work."""
    runner = experiment.runner
    hosts = _hosts(experiment)
    named = runner.hostfile is not None
    handle = RunnerHandle(TYPE, {"requeue": runner.slurm.requeue, "named": named})
    inside = container.with_its_python(experiment)
    made = unprobed_plan(inside, hosts, handle, here=False, late=True)
    made = container.with_its_directory(left_to_the_job(made, runner), runner.slurm.container)
    handle = replace(handle, handle={**handle.handle, "name": job_name(made)})
    notes = (*made.notes, *_notes(runner))
    return replace(made, runner=handle, job=batch_job(made, runner), notes=notes)


def _notes(runner: Runner) -> Iterator[str]:
    if not runner.slurm.exclusive and runner.slurm.cpus_per_task is None:
        yield (
            "experiment.runner.slurm.exclusive: false: Slurm gives one CPU of each node, unless "
            "cpus_per_task says how many"
        )


def _hosts(experiment: Experiment) -> tuple[Host, ...]:
    """The hostfile's hosts, or as many as are asked for, whose names are not known before."""
    runner = experiment.runner
    slurm = runner.slurm
    if runner.hostfile is not None:
        hosts = hosts_of(experiment)
        _require_types(slurm, hosts)
    else:
        counts: dict[str | None, int] = {
            name: own.nodes or 0 for name, own in slurm.by_type.items()
        }
        counts = counts or {None: runner.nnodes or 1}
        unnamed = [Host("", device_type=kind) for kind, n in counts.items() for _ in range(n)]
        hosts = placement.by_mesh(experiment, unnamed)
        hosts = tuple(replace(host, name=f"node-{n}") for n, host in enumerate(hosts))
    if slurm.by_type:
        # Of each component the nodes lie together, in the order in which types come.
        order = list(dict.fromkeys(host.device_type for host in hosts))
        hosts = tuple(sorted(hosts, key=lambda host: order.index(host.device_type)))
    return tuple(_with_gpus(slurm, host) for host in hosts)


def _with_gpus(slurm: Slurm, host: Host) -> Host:
    gpus = _asked(slurm, host.device_type, "gpus_per_node")
    count = int(gpus.rpartition(":")[2]) if gpus else None
    return replace(host, slots=least(host.slots, count)) if count else host


def _asked(slurm: Slurm, kind: str | None, name: str) -> str | None:
    """What nodes of a type are asked for by, as far as it is the type's own, or else all nodes'."""
    own = slurm.by_type.get(kind) if kind else None
    value: str | None = getattr(own, name, None)
    common: str | None = getattr(slurm, name)
    return common if value is None else value


def _require_types(slurm: Slurm, hosts: Sequence[Host]) -> None:
    """Raise :class:`ConfigError` for types that no host has."""
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
    """What Slurm calls the job: the experiment's name, and the run's id by which it is found."""
    return f"{_NAMES_TAKEN.sub('_', plan.name)[:_MOST_NAME]}.{plan.run_id}"


def batch_job(plan: LaunchPlan, runner: Runner) -> BatchJob:
    """The job of a plan."""
    file = plan.layout.scripts / "slurm_job.sh"
    words: list[str] = []
    for hosts in components(plan, runner.slurm):
        words += [":"] if words else []
        words += [
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in _options(plan, runner, hosts)
        ]
    # --parsable is sbatch's own, of no component.
    return BatchJob(("sbatch", "--parsable", *words, str(file)), file, render(plan, runner))


def components(plan: LaunchPlan, slurm: Slurm) -> list[Sequence[HostPlan]]:
    """The hosts that are asked for alike; of a job that is not heterogeneous, all."""
    if not slurm.by_type:
        return [plan.hosts]
    return [list(hosts) for _, hosts in groupby(plan.hosts, key=lambda host: host.device_type)]


def _options(
    plan: LaunchPlan, runner: Runner, hosts: Sequence[HostPlan]
) -> Iterator[tuple[str, str | None]]:
    """Every option of sbatch for some of the hosts, with its value."""
    slurm, count = runner.slurm, len(hosts)
    yield "job-name", job_name(plan)
    # The script itself writes to a file, so that a path may hold what Slurm would take for its own.
    yield "output", "/dev/null"
    yield "export", "ALL"
    yield "nodes", str(count)
    yield "ntasks", str(count)
    yield "ntasks-per-node", "1"
    if runner.hostfile is not None:
        yield "nodelist", compress(host.name for host in hosts)
    if slurm.exclusive:
        yield "exclusive", None
    for name in _PASSED_ON:
        if (value := _asked(slurm, hosts[0].device_type, name)) is not None:
            yield name.replace("_", "-"), str(value)
    yield "requeue" if slurm.requeue else "no-requeue", None
    yield "kill-on-invalid-dep", "yes"
    yield "signal", f"B:USR1@{signal_seconds(runner)}"
    for name, given in slurm.extra.items():
        yield name.replace("_", "-"), given


_PASSED_ON = (
    *("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_task", "mem"),
    *("constraint", "reservation", "dependency"),
)


def signal_seconds(runner: Runner) -> int:
    """How long before its time limit a job is told to save and end."""
    return math.ceil(runner.stop_grace) + SAVING_SECONDS


def _patience(runner: Runner) -> int:
    """Seconds after which an agent that has not ended, where others have, is none any more."""
    return math.ceil(runner.stop_grace + runner.lost_host_timeout) + _ENDING_SECONDS


def _srun(slurm: Slurm, count: int, parts: int) -> Sequence[str]:
    """Options of srun: one task a node, which neither ends the others nor is bound to a core."""
    words = [f"--nodes={count}", f"--ntasks={count}"]
    if parts > 1:
        words = [f"--het-group={','.join(map(str, range(parts)))}"]
    words += ["--ntasks-per-node=1"]
    words += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--cpu-bind=none"]
    # Of sbatch's own srun does not know in every version.
    return [*words, f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else words


def render(plan: LaunchPlan, runner: Runner) -> str:
    """The batch script."""
    layout, count = plan.layout, len(plan.hosts)
    parts = len(components(plan, runner.slurm))
    address = runner.master_addr or ("127.0.0.1" if count == 1 else "")
    if not address and plan.hosts[0].address != plan.hosts[0].name:
        address = plan.hosts[0].address
    values = {
        "run_id": plan.run_id,
        "job_dir": str(files.of_run(plan.exp_dir, plan.run_id)),
        "scripts": str(layout.scripts),
        "outputs": str(layout.logs),
        "details": str(layout.log_dir or layout.logs / "details"),
        "count": str(count),
        "requeue": str(runner.slurm.requeue),
        "patience": str(_patience(runner)) if runner.on_failure == "stop" and count > 1 else "",
        "master_addr": address,
        "master_port": str(wanted_port(runner) or ""),
        "liveness_port": str(runner.liveness_port or ""),
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {' '.join(plan.name.split())}: the job of run {plan.run_id}, {count} node(s).",
            f"# Written by flagscale {__version__}; srun starts the script of each node.",
            "# shellcheck disable=SC2016,SC2317,SC2329 # texts for other shells; traps",
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            _words(
                "srun", (*_srun(runner.slurm, count, parts), *container.srun_words(plan, runner))
            ),
            _words("inside", container.inside_words(plan, runner)),
            *_text("ports", PROGRAMS / "ports.sh"),
            *_text("node", _HERE / "node.sh"),
            "",
            _body(_HERE / "job.sh"),
        ]
    )


def _words(name: str, words: Iterable[str]) -> str:
    """A bash array."""
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def _text(name: str, path: Path) -> Iterator[str]:
    """A variable that holds a program for another shell."""
    yield f"IFS= read -r -d '' {name} <<'END_{name.upper()}'"
    yield _body(path).rstrip("\n")
    yield f"END_{name.upper()}"


def _body(path: Path) -> str:
    """A program without the words that open its file."""
    return source(path).partition("\n\n")[2]
