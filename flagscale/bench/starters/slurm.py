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
_COMMAND_TIMEOUT_SECONDS = 30.0
# srun's --wait: all ranks end almost at the same time. One that still runs this long after the
# first has ended hangs, and is ended.
_WAIT_SECONDS = 30
_MAX_SCRIPT_BYTES = 100 * 1024


def run_in_slurm(
    placement: Placement,
    task: WorkerTask,
    environment: Mapping[str, str],
    *,
    print_job_id: bool = True,
) -> int:
    """Run a task as the ranks of ``placement``, and return the exit code.

    A new allocation is cancelled at the end, also when a signal ends this process.

    Raises:
        UnreachableError: Slurm is not installed, does not answer or has no hosts in time.
        ConfigError: the ranks do not fit the job; the setup script cannot be read.
        JobError: the setup script failed.
    """
    missing = [n for n in _PROGRAMS if shutil.which(n, path=environment.get("PATH")) is None]
    if missing:
        raise UnreachableError(f"--slurm-mode: {', '.join(missing)} is not installed here")
    setup_script = _read_setup_script(placement)
    environment = {**environment, **task.to_environment(), "PYTHONPATH": python_path()}
    with unwind_on_signal(), _enter_allocation(placement, environment) as job_id:
        if setup_script is not None and run_launcher(
            setup_argv(placement, job_id, setup_script), environment
        ):
            raise JobError(
                f"--slurm-setup-script {placement.slurm_setup} failed; nothing was measured"
            )
        if print_job_id:
            print(f"# Slurm job {job_id}", flush=True)
        # srun returns its tasks' largest code.
        argv = srun_argv(placement, job_id, task.command)
        return overall_exit_code(run_rank_launcher(argv, environment, placement.log_dir))


def srun_argv(placement: Placement, job_id: str, program: Sequence[str]) -> list[str]:
    """Return srun's command line for the ranks.

    Without ``--kill-on-bad-exit``: with it srun returns the killed ranks' codes instead of the
    code of the rank that failed.
    """
    command = ["srun", f"--jobid={job_id}", "--overlap", *_shape_arguments(placement)]
    command += ["--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    if placement.log_dir is not None:
        command.append(f"--output={log_path(placement.log_dir.absolute(), '%t')}")
    return [*command, *program]


def setup_argv(placement: Placement, job_id: str, script: str) -> list[str]:
    """Return srun's command line for the setup script, once per host. The script's text is an
    argument, so that no shared disk is needed.
    """
    command = ["srun", f"--jobid={job_id}", "--overlap", f"--nodes={placement.nodes}"]
    command += [f"--ntasks={placement.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return [*command, "bash", "-c", script, str(placement.slurm_setup)]


def salloc_argv(placement: Placement) -> list[str]:
    """Return salloc's command line for an allocation that outlives it."""
    immediate_flag = f"--immediate={max(1, round(placement.slurm_wait))}"
    return [
        "salloc",
        "--no-shell",
        "--job-name=flagscale-bench",
        immediate_flag,
        *_shape_arguments(placement),
    ]


def _shape_arguments(placement: Placement) -> list[str]:
    """Return arguments for equally many ranks on each host."""
    ranks = placement.ranks or 1
    ranks_per_node = ranks // placement.nodes
    arguments = [
        f"--nodes={placement.nodes}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={ranks_per_node}",
    ]
    if placement.slurm_cpus is not None:
        arguments.append(f"--cpus-per-task={max(1, placement.slurm_cpus // ranks_per_node)}")
    return arguments


def _read_setup_script(placement: Placement) -> str | None:
    if placement.slurm_setup is None:
        return None
    text = read_text(placement.slurm_setup, f"--slurm-setup-script {placement.slurm_setup}")
    if len(text.encode()) > _MAX_SCRIPT_BYTES:
        raise ConfigError(
            f"--slurm-setup-script {placement.slurm_setup}: longer than {_MAX_SCRIPT_BYTES} bytes",
            hint="have it run a larger one from a path that the hosts share",
        )
    return text


@contextmanager
def _enter_allocation(placement: Placement, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the id of the job to run in: the requested job, the job of this process, or a new
    allocation for the duration of the context.
    """
    source, job_id = "--slurm-job-id", placement.slurm_job_id
    if job_id is None:
        source, job_id = "SLURM_JOB_ID", environment.get("SLURM_JOB_ID")
    if job_id is not None:
        _check_job(placement, f"{source} {job_id}", job_id, environment)
        yield job_id
        return
    result = _run_slurm_command(
        salloc_argv(placement), environment, placement.slurm_wait + _COMMAND_TIMEOUT_SECONDS
    )
    allocation = re.search(r"Granted job allocation (\d+)", result.stderr + result.stdout)
    if result.returncode or allocation is None:
        raise UnreachableError(
            f"Slurm has not allocated {placement.nodes} hosts for {placement.ranks} ranks within "
            f"{placement.slurm_wait:g} s: {_last_line(result.stderr)}",
            hint="sinfo shows the available hosts; --slurm-wait waits longer",
        )
    try:
        yield allocation[1]
    finally:
        _run_slurm_command(["scancel", allocation[1]], environment, _COMMAND_TIMEOUT_SECONDS)


def _check_job(
    placement: Placement, source: str, job_id: str, environment: Mapping[str, str]
) -> None:
    """Refuse a job in which the ranks cannot run. ``source`` is the flag or variable with its id,
    for messages.
    """
    argv = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T %D"]
    result = _run_slurm_command(argv, environment, _COMMAND_TIMEOUT_SECONDS)
    state, _, host_count = result.stdout.strip().partition(" ")
    if result.returncode and "Invalid job id" not in result.stderr:
        raise UnreachableError(f"squeue: {_last_line(result.stderr)}")
    if state != "RUNNING":
        problem = f"is {state}" if state else "does not exist, or has ended"
        raise ConfigError(f"{source}: the job {problem}; expected a running one")
    if int(host_count) < placement.nodes:
        raise ConfigError(
            f"{source}: the job has {host_count} hosts, but -N requests {placement.nodes}"
        )


def _run_slurm_command(
    argv: Sequence[str], environment: Mapping[str, str], timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{argv[0]} does not answer within {timeout_seconds:g} s") from error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it gives no reason"])[-1]
