"""Running the benchmark inside Slurm: in an allocation that exists, or in one of its own.

Slurm's refusals (no such job, too few hosts, a queue that does not move) come from ``salloc`` and
``squeue``, before ``srun`` runs anything: so what ``srun`` returns is the measurement's own code.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from flagscale.bench.files import read_text
from flagscale.bench.placement import Placement
from flagscale.bench.rank import Job
from flagscale.bench.spawn import call, call_starter, interruptible, log_path, own_code, python_path
from flagscale.errors import ConfigError, JobError, UnreachableError

_PROGRAMS = ("srun", "salloc", "squeue", "scancel")
_ANSWER_SECONDS = 30.0
# Ranks end within moments of each other; one that is still there after this hangs.
_LAST_RANK_SECONDS = 30
_LONGEST_SCRIPT = 100 * 1024


def run_in_slurm(
    place: Placement, job: Job, environment: Mapping[str, str], *, note: bool = True
) -> int:
    """Carry out ``job`` as the ranks of ``place``; the exit code.

    An allocation made here is given back at the end, also when a signal ends this process.

    Raises:
        UnreachableError: Slurm is not installed, does not answer or has no hosts for us in time.
        ConfigError: the job is not one that the ranks fit in; the setup script cannot be read.
        JobError: the setup script failed.
    """
    missing = [n for n in _PROGRAMS if shutil.which(n, path=environment.get("PATH")) is None]
    if missing:
        raise UnreachableError(f"--slurm-mode: {', '.join(missing)} is not installed here")
    setup = _setup_text(place)
    environment = {**environment, **job.variable(), "PYTHONPATH": python_path()}
    with interruptible(), _allocation(place, environment) as allocation:
        if setup is not None and call(setup_argv(place, allocation, setup), environment):
            raise JobError(f"--slurm-setup-script {place.slurm_setup} failed; nothing was measured")
        if note:
            print(f"# Slurm job {allocation}", flush=True)
        # srun returns its tasks' largest code.
        line = srun_argv(place, allocation, job.command)
        return own_code(call_starter(line, environment, place.log_dir))


def srun_argv(place: Placement, job: str, program: Sequence[str]) -> list[str]:
    """srun's line for the ranks.

    Not ``--kill-on-bad-exit``: with it srun returns what the killed ranks ended with, not the code
    of the one that failed.
    """
    command = ["srun", f"--jobid={job}", "--overlap", *_shape(place)]
    command += ["--kill-on-bad-exit=0", f"--wait={_LAST_RANK_SECONDS}"]
    if place.log_dir is not None:
        command.append(f"--output={log_path(place.log_dir.absolute(), '%t')}")
    return [*command, *program]


def setup_argv(place: Placement, job: str, script: str) -> list[str]:
    """srun's line that runs the setup script once on each host. Its text is an argument, so that
    no disk needs to be shared."""
    command = ["srun", f"--jobid={job}", "--overlap", f"--nodes={place.nodes}"]
    command += [f"--ntasks={place.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return [*command, "bash", "-c", script, str(place.slurm_setup)]


def salloc_argv(place: Placement) -> list[str]:
    """salloc's line for an allocation that outlives it."""
    waiting = f"--immediate={max(1, round(place.slurm_wait))}"
    return ["salloc", "--no-shell", "--job-name=flagscale-bench", waiting, *_shape(place)]


def _shape(place: Placement) -> list[str]:
    """Equally many ranks on each host."""
    ranks = place.workers or 1
    each = ranks // place.nodes
    shape = [f"--nodes={place.nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={each}"]
    if place.slurm_cpus is not None:
        shape.append(f"--cpus-per-task={max(1, place.slurm_cpus // each)}")
    return shape


def _setup_text(place: Placement) -> str | None:
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
def _allocation(place: Placement, environment: Mapping[str, str]) -> Iterator[str]:
    """The id of the job to run in: the one asked for, the one around this process, or a new one
    for the length of the block."""
    given = place.slurm_job or environment.get("SLURM_JOB_ID")
    if given is not None:
        _check(place, given, environment)
        yield given
        return
    done = _ask(salloc_argv(place), environment, place.slurm_wait + _ANSWER_SECONDS)
    granted = re.search(r"Granted job allocation (\d+)", done.stderr + done.stdout)
    if done.returncode or granted is None:
        raise UnreachableError(
            f"Slurm gives no {place.nodes} hosts for {place.workers} ranks within "
            f"{place.slurm_wait:g} s: {_last_line(done.stderr)}",
            hint="sinfo shows what there is; --slurm-wait waits longer",
        )
    try:
        yield granted[1]
    finally:
        _ask(["scancel", granted[1]], environment, _ANSWER_SECONDS)


def _check(place: Placement, job: str, environment: Mapping[str, str]) -> None:
    """Whether the ranks can run in ``job``."""
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %D"]
    done = _ask(words, environment, _ANSWER_SECONDS)
    state, _, hosts = done.stdout.strip().partition(" ")
    if done.returncode and "Invalid job id" not in done.stderr:
        raise UnreachableError(f"squeue: {_last_line(done.stderr)}")
    if state != "RUNNING":
        found = f"is {state}" if state else "does not exist, or has ended"
        raise ConfigError(f"--slurm-job-id {job}: the job {found}; expected a running one")
    if int(hosts) < place.nodes:
        raise ConfigError(f"--slurm-job-id {job}: it has {hosts} hosts, and -N asks {place.nodes}")


def _ask(
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
