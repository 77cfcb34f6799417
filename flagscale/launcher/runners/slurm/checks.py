"""What Slurm would refuse of a job, or let wait for ever: asked before it is submitted.

``sbatch --test-only`` tells of what is refused at once, and of too many nodes. Too many CPUs, too
much time, a partition that is down and a job that waits for one that has failed are taken, and wait
for ever; those are looked up.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flagscale.config.schema import Container, Experiment, Runner, Slurm, SlurmType
from flagscale.config.slurm_schema import seconds
from flagscale.errors import UnreachableError
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.preflight import backend, user_code
from flagscale.launcher.preflight.checks import EARLIER_RUN, REACHABLE, Check
from flagscale.launcher.preflight.host_probe import BACKEND, survey
from flagscale.launcher.preflight.hosts import check_hosts
from flagscale.launcher.runners import endpoints
from flagscale.launcher.runners.slurm import scheduler, watch
from flagscale.launcher.runners.slurm.container import KEY
from flagscale.launcher.runners.slurm.job import TYPE, components, signal_seconds
from flagscale.launcher.runners.slurm.scheduler import Partition
from flagscale.launcher.state import alive_message, load_state

_SECTION = "experiment.runner.slurm"
_JOBS = re.compile(r"(?:^|:)(\d+)")
_NOT_OK = frozenset({"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"})
_NEVER = {"afterok": _NOT_OK, "aftercorr": _NOT_OK, "afternotok": frozenset({"COMPLETED"})}
# What is on files that nodes share, and what is not theirs.
_SHARED = frozenset({"exp_dir", "load"})
_OF_NODES = frozenset(
    {"devices", backend.CHECK, "master port", "liveness port", EARLIER_RUN, REACHABLE}
)
# And what is an image's, where nodes run in one.
_OF_IMAGES = frozenset({"python", "packages", "code", *(part.check for part in user_code.ALL)})
_BY_GROUPS = "proctrack/pgid: what leaves its group outlives scancel; nodes end it a moment later"
# What people need of sbatch's answer to --test-only.
_WHEN = re.compile(r"to start at (\S+)")


def check_job(experiment: Experiment, plan: LaunchPlan, *, fresh: bool = False) -> list[Check]:
    """Everything that this machine and Slurm tell of a job that is not submitted yet. ``fresh``:
    its Python is asked, whatever it has said before."""
    slurm = experiment.runner.slurm
    checks = list(_earlier(plan))
    checks += _here(experiment, plan, fresh=fresh)
    if slurm.container is not None:
        checks.append(_container(slurm.container))
    try:
        partitions = scheduler.partitions()
        checks.append(Check(REACHABLE, True, f"{len(partitions)} partition(s)", hosts="slurm"))
        if scheduler.finds_by_groups():
            checks.append(Check("proctrack", True, _BY_GROUPS, warning=True, hosts="slurm"))
        for hosts in components(plan, slurm):
            checks += _partition(experiment.runner, hosts, partitions)
        checks += _dependencies(slurm)
        checks.append(_tested(plan))
    except UnreachableError as error:
        checks.append(Check(REACHABLE, False, error.message, error.hint or "", hosts="slurm"))
    return checks


def _earlier(plan: LaunchPlan) -> Iterator[Check]:
    previous = load_state(plan.layout.state)
    if previous is None or previous.runner.type != TYPE:
        return
    standing = watch.of_run(previous.run_id).standing(previous)
    if standing.over:
        yield Check(EARLIER_RUN, True, "none alive")
    elif not standing.trouble:
        found, hint = alive_message(previous)
        yield Check(EARLIER_RUN, False, found, hint)


def _here(experiment: Experiment, plan: LaunchPlan, *, fresh: bool) -> Iterator[Check]:
    """What this machine tells of what nodes share with it: the project, directories, checkpoints.
    It may lack what they have, so what else it finds is a warning."""
    first, contained = plan.hosts[0], experiment.runner.slurm.container is not None
    host = Host(first.name, device_type=first.device_type)
    with endpoints.reach(RunnerHandle("local"), [host.name]) as reached:
        found = survey(experiment, (host,), reached, here=True, thorough=True, fresh=fresh)
    for check in check_hosts(experiment, plan, found):
        shared = check.name in _SHARED or BACKEND in check.found
        if check.name in _OF_NODES or (contained and check.name in _OF_IMAGES):
            continue
        if check.ok or shared:
            yield check
        else:
            text = f"on this machine: {check.found}"
            yield Check(check.name, True, text, warning=True)


def _container(container: Container) -> Check:
    """The image, where it is a file, and whether this machine knows what makes containers: nodes
    may know more."""
    if container.image.startswith("/") and not Path(container.image).exists():
        hint = f"set {KEY}.image to a file that nodes see, too"
        return Check("container", False, f"there is no {container.image}", hint)
    if container.runtime == "pyxis":
        missing = not scheduler.knows_option("--container-image")
        what = "srun has no --container-image, which Pyxis brings"
    else:
        missing = shutil.which(container.runtime) is None
        what = f"there is no command {container.runtime}"
    found = f"on this machine {what}" if missing else f"{container.image}, by {container.runtime}"
    return Check("container", True, found, warning=missing)


def _partition(
    runner: Runner, hosts: Sequence[HostPlan], found: Mapping[str, Partition]
) -> Iterator[Check]:
    slurm = runner.slurm
    own = slurm.by_type.get(hosts[0].device_type or "", SlurmType())
    wanted = own.partition or slurm.partition or os.environ.get("SBATCH_PARTITION", "")
    default = [one.name for one in found.values() if one.default]
    names = wanted.split(",") if wanted else default
    there = [found[name] for name in names if name in found]
    if not there:
        known = ", ".join(found) or "none"
        text = f"there is no partition {wanted}" if wanted else "Slurm has no default partition"
        yield Check("partition", False, f"{text}; it has {known}", f"set {_SECTION}.partition")
        return
    reasons = {one.name: _unfit(runner, len(hosts), one) for one in there}
    fit = [name for name, reason in reasons.items() if not reason]
    if fit:
        limits = ", ".join(f"{name} (up to {found[name].limit})" for name in fit)
        yield Check("partition", True, limits)
        return
    text = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    yield Check("partition", False, f"the job would wait for ever: {text}", f"change {_SECTION}")


def _unfit(runner: Runner, nodes: int, one: Partition) -> str:
    """Why a job would never start in a partition, or end at once; empty where it may run."""
    slurm = runner.slurm
    if one.up != "up":
        return f"is {one.up}"
    if nodes > one.nodes:
        return f"has {one.nodes} node(s), {nodes} are asked for"
    if slurm.cpus_per_task and slurm.cpus_per_task > one.cpus:
        return f"has nodes of {one.cpus} CPUs at most, {slurm.cpus_per_task} are asked for"
    return _too_long(slurm.time or os.environ.get("SBATCH_TIMELIMIT"), one, runner)


def _too_long(asked: str | None, one: Partition, runner: Runner) -> str:
    """Why a partition has no time for a job."""
    try:
        limit, wanted = seconds(one.limit), seconds(asked) if asked else None
        usual = None if one.usual == "n/a" else seconds(one.usual)
    except ValueError:
        return ""
    if asked:
        long = limit is not None and (wanted is None or wanted > limit)
        return f"gives {one.limit} at most, {asked} is asked for" if long else ""
    if usual is None or usual > (saving := signal_seconds(runner)):
        return ""
    text = f"gives {one.usual} where no time is asked for, no longer than the {saving} s in which"
    return f"{text} a job may save and end (experiment.runner.stop_grace and more)"


def _dependencies(slurm: Slurm) -> Iterator[Check]:
    """Jobs that this one waits for in vain. Slurm knows those of the last minutes."""
    given = slurm.dependency or ""
    kinds = [part.partition(":")[::2] for part in re.split("[,?]", given)]
    wanted = [(kind, _JOBS.findall(jobs)) for kind, jobs in kinds if kind in _NEVER]
    asked = [job for _, jobs in wanted for job in jobs]
    states = scheduler.states(asked) if asked else {}
    vain = [
        [
            f"{kind}:{job} cannot come true any more: job {job} is {states[job]}"
            for job in jobs
            if states.get(job) in _NEVER[kind]
        ]
        for kind, jobs in wanted
    ]
    # Of those between question marks one is enough.
    if "?" not in given or (all(vain) and len(vain) == len(kinds)):
        for text in (text for part in vain for text in part):
            yield Check("dependency", False, text, f"change {_SECTION}.dependency")
    if states:
        told = ", ".join(f"job {job} is {state}" for job, state in states.items())
        yield Check("dependency", True, told)


def _tested(plan: LaunchPlan) -> Check:
    if plan.job is None:
        return Check("job", False, "this plan has no job")
    # Its script is written when it is submitted; what is asked needs one that exists.
    taken, text = scheduler.test_only((*plan.job.command[:-1], "--wrap=true"))
    if not taken:
        unknown = "change the hostfile to names that `sinfo -N` lists"
        hint = unknown if "Invalid node name" in text else f"change {_SECTION}"
        return Check("job", False, f"Slurm refuses it: {text}", hint)
    when = _WHEN.search(text)
    if when is not None and scheduler.endless(when[1]):
        found = "Slurm cannot tell when it may start: jobs without a time limit are before it"
        return Check("job", True, found, warning=True)
    return Check("job", True, f"may start at {when[1]}" if when else text)
