"""Checks of a job before it is submitted: reasons to reject it, or to let it wait forever.

``sbatch --test-only`` reports jobs that are rejected at once, and jobs that request too many nodes.
Slurm accepts jobs that request too many CPUs or too much time, or whose partition is down or
dependency has failed; these wait forever, and are checked here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flagscale.config.schema import Container, Experiment, Runner, Slurm, SlurmType
from flagscale.config.slurm_reader import STOP_MARGIN_SECONDS
from flagscale.config.slurm_schema import parse_time_limit
from flagscale.errors import UnreachableError
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.preflight import backend, user_code
from flagscale.launcher.preflight.checks import EARLIER_RUN, REACHABLE, Check
from flagscale.launcher.preflight.host_probe import TRAINING_BACKEND, query_hosts
from flagscale.launcher.preflight.hosts import check_hosts
from flagscale.launcher.runners import endpoints
from flagscale.launcher.runners.slurm import scheduler, watch
from flagscale.launcher.runners.slurm.container import CONTAINER_KEY
from flagscale.launcher.runners.slurm.job import RUNNER_TYPE, components, signal_seconds
from flagscale.launcher.runners.slurm.scheduler import Partition
from flagscale.launcher.state import alive_message, load_state

_SECTION = "experiment.runner.slurm"
_JOB_IDS = re.compile(r"(?:^|:)(\d+)")
_UNSUCCESSFUL = frozenset(
    {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
)
_UNSATISFIABLE = {
    "afterok": _UNSUCCESSFUL,
    "aftercorr": _UNSUCCESSFUL,
    "afternotok": frozenset({"COMPLETED"}),
}
# Checks that concern the shared file system, and checks that only nodes can make.
_SHARED_FILE_CHECKS = frozenset({"exp_dir", "load"})
_NODE_CHECKS = frozenset(
    {"devices", backend.CHECK, "master port", "liveness port", EARLIER_RUN, REACHABLE}
)
# Checks that only hold in the container's image.
_IMAGE_CHECKS = frozenset(
    {"python", "packages", "code", *(part.check for part in user_code.HOST_QUERIES)}
)
_PROCESS_GROUP_WARNING = (
    "proctrack/pgid: processes that leave their process group survive scancel; nodes end them a "
    "moment later"
)
# The expected start time in the output of sbatch --test-only.
_START_TIME = re.compile(r"to start at (\S+)")


def check_job(experiment: Experiment, plan: LaunchPlan, *, fresh: bool = False) -> list[Check]:
    """Check a job with the information of this machine and of Slurm, before it is submitted.

    With ``fresh``, the Python environment is probed again even if a cached result exists.
    """
    slurm = experiment.runner.slurm
    checks = list(_check_earlier_run(plan))
    checks += _check_shared_files(experiment, plan, fresh=fresh)
    if slurm.container is not None:
        checks.append(_check_container(slurm.container))
    try:
        partitions = scheduler.query_partitions()
        checks.append(Check(REACHABLE, True, f"{len(partitions)} partition(s)", hosts="slurm"))
        if scheduler.tracks_process_groups():
            checks.append(
                Check("proctrack", True, _PROCESS_GROUP_WARNING, warning=True, hosts="slurm")
            )
        for hosts in components(plan, slurm):
            checks += _check_partition(experiment.runner, hosts, partitions)
        checks += _check_dependencies(slurm)
        checks.append(_test_submission(plan))
    except UnreachableError as error:
        checks.append(Check(REACHABLE, False, error.message, error.hint or "", hosts="slurm"))
    return checks


def _check_earlier_run(plan: LaunchPlan) -> Iterator[Check]:
    previous = load_state(plan.layout.state)
    if previous is None or previous.runner.type != RUNNER_TYPE:
        return
    status = watch.monitor_of_run(previous.run_id).status(previous)
    if status.over:
        yield Check(EARLIER_RUN, True, "none alive")
    elif not status.trouble:
        message, hint = alive_message(previous)
        yield Check(EARLIER_RUN, False, message, hint)


def _check_shared_files(
    experiment: Experiment, plan: LaunchPlan, *, fresh: bool
) -> Iterator[Check]:
    """Yield the checks that this machine can make of files that nodes share with it.

    These are the project, directories and checkpoints. Other failures are warnings, because nodes
    may have software that this machine lacks.
    """
    first, uses_container = plan.hosts[0], experiment.runner.slurm.container is not None
    host = Host(first.name, device_type=first.device_type)
    with endpoints.open_hosts(RunnerHandle("local"), [host.name]) as hosts:
        probe_results = query_hosts(
            experiment, (host,), hosts, is_local=True, for_preflight=True, ignore_cache=fresh
        )
    for check in check_hosts(experiment, plan, probe_results):
        shared = check.name in _SHARED_FILE_CHECKS or TRAINING_BACKEND in check.found
        if check.name in _NODE_CHECKS or (uses_container and check.name in _IMAGE_CHECKS):
            continue
        if check.ok or shared:
            yield check
        else:
            text = f"on this machine: {check.found}"
            yield Check(check.name, True, text, warning=True)


def _check_container(container: Container) -> Check:
    """Check the image, if it is a file, and the container runtime.

    A missing runtime is a warning, because nodes may have it.
    """
    if container.image.startswith("/") and not Path(container.image).exists():
        hint = f"set {CONTAINER_KEY}.image to a file that nodes see, too"
        return Check("container", False, f"there is no {container.image}", hint)
    if container.runtime == "pyxis":
        missing = not scheduler.srun_has_option("--container-image")
        reason = "srun has no --container-image, which Pyxis provides"
    else:
        missing = shutil.which(container.runtime) is None
        reason = f"there is no command {container.runtime}"
    if missing:
        return Check("container", True, f"on this machine {reason}", warning=True)
    return Check("container", True, f"{container.image}, by {container.runtime}")


def _check_partition(
    runner: Runner, hosts: Sequence[HostPlan], partitions: Mapping[str, Partition]
) -> Iterator[Check]:
    """Check that one of the requested partitions can run a component of the job."""
    slurm = runner.slurm
    slurm_type = slurm.by_type.get(hosts[0].device_type or "", SlurmType())
    requested = slurm_type.partition or slurm.partition or os.environ.get("SBATCH_PARTITION", "")
    default = [partition.name for partition in partitions.values() if partition.default]
    names = requested.split(",") if requested else default
    candidates = [partitions[name] for name in names if name in partitions]
    if not candidates:
        existing = ", ".join(map(repr, partitions)) or "none"
        text = "Slurm has no default partition"
        if requested:
            text = f"Slurm has no partition {requested!r}"
        yield Check(
            "partition",
            False,
            f"{text}; its partitions are {existing}",
            f"set {_SECTION}.partition",
        )
        return
    reasons = {
        partition.name: _find_partition_problem(runner, len(hosts), partition)
        for partition in candidates
    }
    usable = [name for name, reason in reasons.items() if not reason]
    if usable:
        limits = ", ".join(f"{name!r} (up to {partitions[name].limit})" for name in usable)
        yield Check("partition", True, limits)
        return
    text = "; ".join(f"partition {name!r} {reason}" for name, reason in reasons.items())
    yield Check("partition", False, f"the job would wait forever: {text}", f"change {_SECTION}")


def _find_partition_problem(runner: Runner, nodes: int, partition: Partition) -> str:
    """Return why a job would never start in a partition, or end at once; empty if it may run."""
    slurm = runner.slurm
    if partition.availability != "up":
        return f"is {partition.availability}"
    if nodes > partition.nodes:
        return f"has {partition.nodes} node(s), but {nodes} are requested"
    if slurm.cpus_per_task and slurm.cpus_per_task > partition.cpus:
        return (
            f"has nodes of at most {partition.cpus} CPUs, but {slurm.cpus_per_task} are requested"
        )
    return _find_time_problem(slurm.time or os.environ.get("SBATCH_TIMELIMIT"), partition, runner)


def _find_time_problem(requested: str | None, partition: Partition, runner: Runner) -> str:
    """Return why a partition's time limits do not fit a job; empty if they do."""
    try:
        limit = parse_time_limit(partition.limit)
        requested_seconds = parse_time_limit(requested) if requested else None
        default_limit = (
            None if partition.default_limit == "n/a" else parse_time_limit(partition.default_limit)
        )
    except ValueError:
        return ""
    if requested:
        if limit is not None and (requested_seconds is None or requested_seconds > limit):
            return f"allows at most {partition.limit}, but {requested} is requested"
        return ""
    saving_seconds = signal_seconds(runner)
    if default_limit is None or default_limit > saving_seconds:
        return ""
    return (
        f"allows {partition.default_limit} if no time is requested, which is not longer than the "
        f"{saving_seconds} s that are reserved to save and end (experiment.runner.stop_grace + "
        f"{STOP_MARGIN_SECONDS} s)"
    )


def _check_dependencies(slurm: Slurm) -> Iterator[Check]:
    """Check for dependencies that can never be satisfied. Slurm lists jobs of the last minutes
    only.
    """
    dependency = slurm.dependency or ""
    clauses = [clause.partition(":")[::2] for clause in re.split("[,?]", dependency)]
    checkable = [(kind, _JOB_IDS.findall(jobs)) for kind, jobs in clauses if kind in _UNSATISFIABLE]
    job_ids = [job for _, jobs in checkable for job in jobs]
    states = scheduler.query_states(job_ids) if job_ids else {}
    errors = [
        [
            f"{kind}:{job} can never be satisfied: job {job} is {states[job]}"
            for job in jobs
            if states.get(job) in _UNSATISFIABLE[kind]
        ]
        for kind, jobs in checkable
    ]
    # Clauses that are separated by question marks are alternatives.
    if "?" not in dependency or (all(errors) and len(errors) == len(clauses)):
        for text in (text for clause_errors in errors for text in clause_errors):
            yield Check("dependency", False, text, f"change {_SECTION}.dependency")
    if states:
        summary = ", ".join(f"job {job} is {state}" for job, state in states.items())
        yield Check("dependency", True, summary)


def _test_submission(plan: LaunchPlan) -> Check:
    if plan.job is None:
        return Check("job", False, "this plan has no job")
    # The job's script does not exist yet, so a trivial command replaces it.
    accepted, text = scheduler.test_submission((*plan.job.command[:-1], "--wrap=true"))
    if not accepted:
        hint = f"change {_SECTION}"
        if "Invalid node name" in text:
            hint = "give names that `sinfo -N` lists, in the hostfile or in `exclude`"
        return Check("job", False, f"Slurm rejects it: {text}", hint)
    start = _START_TIME.search(text)
    if start is not None and scheduler.is_unpredictable(start[1]):
        warning = (
            "Slurm cannot predict its start, because jobs without a time limit are queued before it"
        )
        return Check("job", True, warning, warning=True)
    return Check("job", True, f"may start at {start[1]}" if start else text)
