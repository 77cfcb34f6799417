"""Slurm's commands and the parsing of their output; no other module runs them.

A missing answer is not taken for the end of a job: if the controller cannot be reached, functions
raise :class:`UnreachableError`, because jobs continue without it. Output is requested as text with
explicit fields, because JSON output of older versions includes other jobs or is silently empty.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from flagscale.config.secrets import is_secret
from flagscale.errors import UnreachableError

_COMMAND_TIMEOUT_SECONDS = 60.0
_INVALID_JOB_ERROR = re.compile(r"Invalid job id|Invalid job name", re.IGNORECASE)
_CONNECTION_ERROR = re.compile(r"contact|timed out|Zero Bytes|connect", re.IGNORECASE)
_PARTITION = re.compile(
    r"^ *([^|*]+)(\*?) *\|([^|]+)\|([^|]+)\|([^|]+)\|(\d+)[^|\n]*\|(\d+)", re.MULTILINE
)
# Reasons that Slurm itself gives for the state of a node, with their time.
_FAILURE_REASON = re.compile(
    r"\bReason=(?:Not responding|Node unexpectedly rebooted)[^\[]*\[[^@\]]*@([^\]]+)\]"
)
_QUEUE_FORMAT = "%T|%r|%S|%j"
_RETRY_SECONDS = 1.0
_MAX_PREDICTION_DAYS = 360
# Variables of the job that this process runs in do not belong to a new job.
_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SRUN_", "PMI")
_CLIENT_VARIABLES = ("SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER")
# Defaults that users set for all their jobs. Other SBATCH_ variables would submit a different kind
# of job than the one that is shown.
DEFAULT_VARIABLES = tuple(
    f"SBATCH_{name}"
    for name in (
        "ACCOUNT",
        "CONSTRAINT",
        "PARTITION",
        "QOS",
        "RESERVATION",
        "TIMELIMIT",
        "WCKEY",
        "CLUSTER_CONSTRAINT",
        "GRES",
        "MEM_PER_CPU",
        "MEM_PER_GPU",
        "NETWORK",
        "SWITCHES",
    )
)

WAITING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
ENDED_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True)
class SlurmJob:
    """State of a job as reported by squeue.

    Attributes:
        state: Empty if Slurm does not know the job (any more).
        reason: Reason of a pending job.
        start: Expected start time of a pending job, as Slurm formats it.
    """

    state: str = ""
    reason: str = ""
    start: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def over(self) -> bool:
        return not self.state or self.state in ENDED_STATES


class JobRejectedError(Exception):
    """Rejection of a job by Slurm, with Slurm's reason."""


def command_environment() -> dict[str, str]:
    """Return the environment for Slurm's commands, which sbatch passes on to the job.

    It has no secrets, because accounting may store them, and no variables of a job that this
    process runs in.
    """
    passed_on = {}
    for name, value in os.environ.items():
        unsupported = name.startswith("SBATCH_") and name not in DEFAULT_VARIABLES
        of_this_job = name.startswith(_JOB_PREFIXES) and name not in _CLIENT_VARIABLES
        secret = name != "SLURM_JWT" and is_secret(name, value)
        if not (unsupported or of_this_job or secret):
            passed_on[name] = value
    return passed_on


def run_command(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Raises:
        UnreachableError: If the command does not exist or does not end within 60 seconds.
    """
    try:
        return subprocess.run(
            argv,
            env=command_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMMAND_TIMEOUT_SECONDS,
            # Ctrl-C is handled by this program: it would end sbatch, but not the job.
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError):
        # PermissionError: a directory on PATH, or the command in it, is not accessible to this
        # user.
        raise UnreachableError(
            f"there is no {argv[0]} on this machine: Slurm cannot be used from it",
            hint="start the run from a login node of the cluster",
        ) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"Slurm does not answer: {argv[0]} took {_COMMAND_TIMEOUT_SECONDS:g} s"
        ) from None


def _read_output(*argv: str) -> str:
    """Return the output of a command.

    Raises:
        UnreachableError: If the command fails, with Slurm's reason.
    """
    result = run_command(*argv)
    if result.returncode:
        raise UnreachableError(f"Slurm does not answer: {error_summary(result)}")
    return result.stdout


def error_summary(result: subprocess.CompletedProcess[str]) -> str:
    """Return the error messages of a command, in one line."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    messages = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in lines]
    return "; ".join(dict.fromkeys(messages)) or f"{result.args[0]} ended with {result.returncode}"


@dataclass(frozen=True)
class SubmittedJob:
    """Job that Slurm has accepted, with its message about it."""

    job_id: str
    message: str = ""


def submit_job(command: Sequence[str], name: str) -> SubmittedJob:
    """Submit a job.

    Raises:
        JobRejectedError: If Slurm rejects the job.
        UnreachableError: If it is unknown whether Slurm accepted the job.
    """
    try:
        result = run_command(*command)
        job_id = re.match(r"(\d+)", result.stdout.strip())
        if result.returncode == 0 and job_id is not None:
            # A plug-in of the cluster (job_submit) may explain what it has changed in the job.
            return SubmittedJob(job_id[1], error_summary(result) if result.stderr.strip() else "")
        # Slurm may have accepted the job although its answer was lost.
        if result.returncode < 0 or _CONNECTION_ERROR.search(result.stderr):
            if accepted := find_job(name):
                return SubmittedJob(accepted)
            raise UnreachableError(f"Slurm does not answer: {error_summary(result)}")
    except UnreachableError as error:
        hint = error.hint or f"it may have accepted the job: scancel --name={name} cancels it"
        raise UnreachableError(error.message, hint=hint) from None
    raise JobRejectedError(error_summary(result))


def find_job(name: str) -> str:
    """Return the id of the job with this unique name; empty if there is none."""
    ids = _read_output(
        "squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"
    ).split()
    # A heterogeneous job is listed by component: 12+0, 12+1.
    return ids[-1].partition("+")[0] if ids else ""


def query_job(job_id: str, name: str) -> SlurmJob:
    """Return the state of a job. A job that is not listed is queried twice.

    Raises:
        UnreachableError: If Slurm does not answer.
    """
    job = _query_once(job_id, name)
    if not job.state:
        time.sleep(_RETRY_SECONDS)
        job = _query_once(job_id, name)
    return job


def _query_once(job_id: str, name: str) -> SlurmJob:
    result = run_command(
        "squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={_QUEUE_FORMAT}"
    )
    if result.returncode:
        if _INVALID_JOB_ERROR.search(result.stderr):
            return SlurmJob()
        raise UnreachableError(f"Slurm does not answer: {error_summary(result)}")
    return parse_queue(result.stdout, name)


def is_unpredictable(start: str) -> bool:
    """Return True if an expected start time is meaningless.

    If Slurm cannot predict the start, it reports a year from now, or a date in centuries.
    """
    try:
        start_time = datetime.fromisoformat(start)
    except ValueError:
        return True
    return (start_time - datetime.now(start_time.tzinfo)).days > _MAX_PREDICTION_DAYS


def parse_queue(text: str, name: str) -> SlurmJob:
    """Parse squeue's output for the job of this name.

    The name is checked because ids are reused when a controller has lost its state. For a
    heterogeneous job, returns the component that starts last, since the others wait for it.
    """
    components = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == _QUEUE_FORMAT.count("|") + 1 and fields[3] == name:
            state, reason, start, _ = fields
            start = "" if is_unpredictable(start) else start
            components.append(SlurmJob(state, reason if reason != "None" else "", start))
    return max(
        components,
        key=lambda job: (job.is_pending, not job.over, not job.start, job.start),
        default=SlurmJob(),
    )


def query_accounting(job_id: str, name: str) -> SlurmJob:
    """Return the accounting record of a job that the controller has forgotten, if accounting is
    enabled.

    ``reason`` is the user who cancelled the job, or its exit code.

    Raises:
        UnreachableError: If accounting is enabled but does not answer.
    """
    if shutil.which("sacct") is None:
        return SlurmJob()
    columns = "--format=State,ExitCode,JobName"
    result = run_command("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job_id}", columns)
    if result.returncode:
        if "disabled" in result.stderr:
            return SlurmJob()
        raise UnreachableError(f"Slurm's accounting does not answer: {error_summary(result)}")
    return parse_accounting(result.stdout, name)


def parse_accounting(text: str, name: str) -> SlurmJob:
    """Parse sacct's output for the job of this name."""
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[2] == name:
            state, _, by_user = fields[0].partition(" ")
            exit_code = "" if fields[1] == "0:0" else f"exit code {fields[1]}"
            return SlurmJob(state, _describe_user(by_user) or exit_code)
    return SlurmJob()


def _describe_user(by_user: str) -> str:
    """Return ``by root`` for ``by 0``."""
    number = by_user.removeprefix("by ")
    try:
        return f"by {pwd.getpwuid(int(number)).pw_name}"
    except (KeyError, ValueError, OverflowError):
        return by_user and f"by user {number}"


def cancel_job(job_id: str, signal: str | None = None) -> None:
    """Cancel a job; with a ``signal``, send it to the job's batch script instead.

    Does nothing if the job has ended.

    Raises:
        UnreachableError: If Slurm does not answer.
    """
    options = ("--batch", f"--signal={signal}") if signal else ()
    result = run_command("scancel", *options, job_id)
    if result.returncode and re.search(r"contact|timed out", result.stderr, re.IGNORECASE):
        raise UnreachableError(f"Slurm does not answer: {error_summary(result)}")


def test_submission(command: Sequence[str]) -> tuple[bool, str]:
    """Return whether Slurm would accept a job now, and its message."""
    result = run_command(command[0], "--test-only", *command[1:])
    if re.search(r"Unable to contact|timed out", result.stderr, re.IGNORECASE):
        raise UnreachableError(f"Slurm does not answer: {error_summary(result)}")
    return result.returncode == 0, error_summary(result)


def srun_has_option(name: str) -> bool:
    """Return True if srun has an option, including those of its plug-ins."""
    return name in run_command("srun", "--help").stdout


def tracks_process_groups() -> bool:
    """Return True if Slurm tracks the processes of a job by process group, which most of them
    leave.
    """
    return "proctrack/pgid" in _read_output("scontrol", "show", "config")


def find_down_nodes(nodes: Sequence[str]) -> list[str]:
    """Return the nodes among these that Slurm reports as down."""
    output = _read_output(
        "sinfo",
        "--noheader",
        "--Node",
        f"--nodes={','.join(nodes)}",
        "--states=down",
        "--format=%N",
    )
    return list(dict.fromkeys(output.split()))


def find_failed_nodes(nodes: Sequence[str], since: float) -> list[str]:
    """Return the nodes among these that have booted, or did not respond, after ``since`` (in Unix
    seconds). They may be up again.
    """
    output = _read_output("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    return parse_failed_nodes(output, since)


def parse_failed_nodes(text: str, since: float) -> list[str]:
    """Parse the output of ``scontrol --oneliner show node``."""
    failed_nodes = []
    for line in text.splitlines():
        name = re.search(r"\bNodeName=(\S+)", line)
        boot, reason = re.search(r"\bBootTime=(\S+)", line), _FAILURE_REASON.search(line)
        times = [match[1] for match in (boot, reason) if match is not None]
        if name is not None and any(_unix_seconds(text) > since for text in times):
            failed_nodes.append(name[1])
    return failed_nodes


def _unix_seconds(text: str) -> float:
    """Return a time of Slurm's in Unix seconds; minus infinity if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return -math.inf


@dataclass(frozen=True)
class Partition:
    """A Slurm partition.

    Attributes:
        name: Name of the partition.
        default: True if it is the default partition of the cluster.
        availability: ``up``, ``down``, ``drain`` or ``inact``.
        limit: Maximum time of a job, as Slurm formats it.
        default_limit: Time limit of a job that does not request one.
        nodes: Number of nodes.
        cpus: Number of CPUs of the largest node.
    """

    name: str
    default: bool
    availability: str
    limit: str
    default_limit: str
    nodes: int
    cpus: int


def query_partitions() -> Mapping[str, Partition]:
    """Return the partitions by name.

    Raises:
        UnreachableError: If Slurm does not answer.
    """
    text = _read_output("sinfo", "--noheader", "--format=%P|%a|%l|%L|%D|%c")
    by_name: dict[str, Partition] = {}
    for name, default, up, limit, usual, nodes, cpus in _PARTITION.findall(text):
        # sinfo prints one line per kind of node.
        partition = by_name.get(name, Partition(name, bool(default), up, limit, usual, 0, 0))
        by_name[name] = replace(
            partition, nodes=partition.nodes + int(nodes), cpus=max(partition.cpus, int(cpus))
        )
    return by_name


def query_states(job_ids: Sequence[str]) -> Mapping[str, str]:
    """Return the states of jobs by id, without jobs that Slurm does not know."""
    result = run_command(
        "squeue", "--noheader", "--states=all", f"--jobs={','.join(job_ids)}", "--format=%i|%T"
    )
    fields = (line.strip().partition("|") for line in result.stdout.splitlines())
    return {job_id: state for job_id, _, state in fields if job_id in job_ids}
