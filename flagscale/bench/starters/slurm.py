"""Starter of ranks inside Slurm: in an existing allocation, or in a new one.

Slurm's own errors (no such job, too few hosts, a full queue) come from ``salloc`` and
``squeue``, before ``srun`` runs anything: the exit code of ``srun`` is therefore the
measurement's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from flagscale.bench.files import read_text
from flagscale.bench.placement import Placement
from flagscale.bench.starters.launcher_command import run_launcher, run_rank_launcher
from flagscale.bench.starters.local import log_path, overall_exit_code
from flagscale.errors import ConfigError, JobError, UnreachableError
from flagscale.hosts.workers.children import unwind_on_signal
from flagscale.hosts.workers.task import WorkerTask, python_path

_PROGRAMS = ("srun", "salloc", "squeue", "scancel")
_ANSWER_SECONDS = 30.0
# Ranks end almost at the same time; one that runs longer than this hangs.
_LAST_RANK_SECONDS = 30
_LONGEST_SCRIPT = 100 * 1024


def run_in_slurm(
    place: Placement, task: WorkerTask, environment: Mapping[str, str], *, note: bool = True
) -> int:
    """Run a task as the ranks of ``place``, and return the exit code.

    A new allocation is cancelled at the end, also when a signal ends this process.

    Raises:
        UnreachableError: Slurm is not installed, does not answer or has no hosts in time.
        ConfigError: the ranks do not fit the job; the setup script cannot be read.
        JobError: the setup script failed.
    """
    missing = [n for n in _PROGRAMS if shutil.which(n, path=environment.get("PATH")) is None]
    if missing:
        raise UnreachableError(f"--slurm-mode: {', '.join(missing)} is not installed here")
    setup = _read_setup_script(place)
    environment = {**environment, **task.to_environment(), "PYTHONPATH": python_path()}
    with unwind_on_signal(), _enter_allocation(place, environment) as allocation:
        if setup is not None and run_launcher(setup_argv(place, allocation, setup), environment):
            raise JobError(f"--slurm-setup-script {place.slurm_setup} failed; nothing was measured")
        if note:
            print(f"# Slurm job {allocation}", flush=True)
        # srun returns its tasks' largest code.
        line = srun_argv(place, allocation, task.command)
        return overall_exit_code(run_rank_launcher(line, environment, place.log_dir))


def srun_argv(place: Placement, job: str, program: Sequence[str]) -> list[str]:
    """Return srun's command line for the ranks.

    Without ``--kill-on-bad-exit``: with it srun returns the killed ranks' codes instead of the
    code of the rank that failed.
    """
    command = ["srun", f"--jobid={job}", "--overlap", *_shape_arguments(place)]
    command += ["--kill-on-bad-exit=0", f"--wait={_LAST_RANK_SECONDS}"]
    if place.log_dir is not None:
        command.append(f"--output={log_path(place.log_dir.absolute(), '%t')}")
    return [*command, *program]


def setup_argv(place: Placement, job: str, script: str) -> list[str]:
    """Return srun's command line for the setup script, once per host. The script's text is an
    argument, so that no shared disk is needed.
    """
    command = ["srun", f"--jobid={job}", "--overlap", f"--nodes={place.nodes}"]
    command += [f"--ntasks={place.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return [*command, "bash", "-c", script, str(place.slurm_setup)]


def salloc_argv(place: Placement) -> list[str]:
    """Return salloc's command line for an allocation that outlives it."""
    waiting = f"--immediate={max(1, round(place.slurm_wait))}"
    return ["salloc", "--no-shell", "--job-name=flagscale-bench", waiting, *_shape_arguments(place)]


def _shape_arguments(place: Placement) -> list[str]:
    """Return arguments for equally many ranks on each host."""
    ranks = place.workers or 1
    each = ranks // place.nodes
    shape = [f"--nodes={place.nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={each}"]
    if place.slurm_cpus is not None:
        shape.append(f"--cpus-per-task={max(1, place.slurm_cpus // each)}")
    return shape


def _read_setup_script(place: Placement) -> str | None:
    if place.slurm_setup is None:
        return None
    text = read_text(place.slurm_setup, f"--slurm-setup-script {place.slurm_setup}")
    if len(text.encode()) > _LONGEST_SCRIPT:
        raise ConfigError(
            f"--slurm-setup-script {place.slurm_setup}: longer than {_LONGEST_SCRIPT} bytes",
            hint="have it run a larger one from a path that the hosts share",
        )
    return text


@contextmanager
def _enter_allocation(place: Placement, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the id of the job to run in: the requested job, the job of this process, or a new
    allocation for the duration of the context.
    """
    existing_job = place.slurm_job or environment.get("SLURM_JOB_ID")
    if existing_job is not None:
        _check_job(place, existing_job, environment)
        yield existing_job
        return
    result = _run_slurm_command(salloc_argv(place), environment, place.slurm_wait + _ANSWER_SECONDS)
    granted = re.search(r"Granted job allocation (\d+)", result.stderr + result.stdout)
    if result.returncode or granted is None:
        raise UnreachableError(
            f"Slurm gives no {place.nodes} hosts for {place.workers} ranks within "
            f"{place.slurm_wait:g} s: {_last_line(result.stderr)}",
            hint="sinfo shows what there is; --slurm-wait waits longer",
        )
    try:
        yield granted[1]
    finally:
        _run_slurm_command(["scancel", granted[1]], environment, _ANSWER_SECONDS)


def _check_job(place: Placement, job: str, environment: Mapping[str, str]) -> None:
    """Refuse a job in which the ranks cannot run."""
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %D"]
    result = _run_slurm_command(words, environment, _ANSWER_SECONDS)
    state, _, hosts = result.stdout.strip().partition(" ")
    if result.returncode and "Invalid job id" not in result.stderr:
        raise UnreachableError(f"squeue: {_last_line(result.stderr)}")
    if state != "RUNNING":
        problem = f"is {state}" if state else "does not exist, or has ended"
        raise ConfigError(f"--slurm-job-id {job}: the job {problem}; expected a running one")
    if int(hosts) < place.nodes:
        raise ConfigError(f"--slurm-job-id {job}: it has {hosts} hosts, and -N asks {place.nodes}")


def _run_slurm_command(
    words: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{words[0]} does not answer within {seconds:g} s") from error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it does not say why"])[-1]
