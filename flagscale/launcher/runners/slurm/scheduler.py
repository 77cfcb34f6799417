"""Slurm's commands, and what they answer. Nobody else starts one.

An answer is believed where it says something. Silence is no end: a controller that cannot be
reached raises :class:`UnreachableError`, and jobs run on without it. Answers are asked for as text,
field by field: JSON of older versions has other jobs in it, or none without a word.
"""

from __future__ import annotations

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

_SECONDS = 60.0
_INVALID = re.compile(r"Invalid job id|Invalid job name", re.IGNORECASE)
_LOST_ANSWER = re.compile(r"contact|timed out|Zero Bytes|connect", re.IGNORECASE)
_PARTITION = re.compile(
    r"^ *([^|*]+)(\*?) *\|([^|]+)\|([^|]+)\|([^|]+)\|(\d+)[^|\n]*\|(\d+)", re.MULTILINE
)
_FIELDS = "%T|%r|%S|%j"
_AGAIN_SECONDS = 1.0
_MOST_DAYS = 360
# A job starts no other: what is Slurm's own of the job that this process is in is not for a new
# one.
_SLURMS = ("SLURM_", "SLURMD_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SRUN_", "PMI")
_KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER")
# What users set for all their jobs. Others would make another kind of job than the one that is
# shown.
DEFAULTS = tuple(
    f"SBATCH_{name}"
    for name in (
        *("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION", "TIMELIMIT", "WCKEY"),
        *("CLUSTER_CONSTRAINT", "GRES", "MEM_PER_CPU", "MEM_PER_GPU", "NETWORK", "SWITCHES"),
    )
)

WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it. ``state``: empty where Slurm does not know it (any more);
    ``start``: when a waiting one may begin, in Slurm's words."""

    state: str = ""
    reason: str = ""
    start: str = ""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def over(self) -> bool:
        return not self.state or self.state in ENDED


class RefusedError(Exception):
    """Slurm does not take a job; the text says why."""


def environment() -> dict[str, str]:
    """This process's environment as Slurm's commands get it, and sbatch hands it to the job:
    without secrets, which accounting may keep, and without what belongs to a job that this process
    is in."""
    kept = {}
    for name, value in os.environ.items():
        foreign = name.startswith("SBATCH_") and name not in DEFAULTS
        slurms = name.startswith(_SLURMS) and name not in _KEPT
        if not (foreign or slurms or (name != "SLURM_JWT" and is_secret(name, value))):
            kept[name] = value
    return kept


def call(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run one of the commands. Raises :class:`UnreachableError` where there is none, or where it
    does not come to an end."""
    try:
        return subprocess.run(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            # Ctrl-C is this program's to answer: it would end sbatch, and not the job.
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError):
        # The latter where a directory on PATH, or the command in it, is not for this user.
        raise UnreachableError(
            f"there is no {argv[0]} on this machine: it is none from which Slurm is used",
            hint="start the run from a login node of the cluster",
        ) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"Slurm does not answer: {argv[0]} took {_SECONDS:g} s") from None


def _asked(*argv: str) -> str:
    """What a command says. Raises :class:`UnreachableError` with Slurm's reason where it fails."""
    done = call(*argv)
    if done.returncode:
        raise UnreachableError(f"Slurm does not answer: {said(done)}")
    return done.stdout


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command has complained of, in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    plain = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in lines]
    return "; ".join(dict.fromkeys(plain)) or f"{done.args[0]} ended with {done.returncode}"


def submit(command: Sequence[str], name: str) -> str:
    """Submit a job; its id. Raises :class:`RefusedError`, and :class:`UnreachableError` where
    nobody knows whether it was taken."""
    try:
        done = call(*command)
        found = re.match(r"(\d+)", done.stdout.strip())
        if done.returncode == 0 and found is not None:
            return found[1]
        # The answer may be lost, but not the job.
        if done.returncode < 0 or _LOST_ANSWER.search(done.stderr):
            if taken := named(name):
                return taken
            raise UnreachableError(f"Slurm does not answer: {said(done)}")
    except UnreachableError as error:
        hint = error.hint or f"it may have taken the job: scancel --name={name} ends it, if so"
        raise UnreachableError(error.message, hint=hint) from None
    raise RefusedError(said(done))


def named(name: str) -> str:
    """The id of the job of this name, which no two have; empty where there is none."""
    found = _asked("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i").split()
    # Of a heterogeneous job every component is shown: 12+0, 12+1.
    return found[-1].partition("+")[0] if found else ""


def look(job: str, name: str) -> Job:
    """How a job stands. One that is not there is asked for twice. Raises
    :class:`UnreachableError`."""
    found = _look(job, name)
    if not found.state:
        time.sleep(_AGAIN_SECONDS)
        found = _look(job, name)
    return found


def _look(job: str, name: str) -> Job:
    done = call("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={_FIELDS}")
    if done.returncode:
        if _INVALID.search(done.stderr):
            return Job()
        raise UnreachableError(f"Slurm does not answer: {said(done)}")
    return parse(done.stdout, name)


def endless(start: str) -> bool:
    """Whether a time at which a job may start is none: Slurm says a year from now, or a day in
    centuries, of one that it cannot foresee."""
    try:
        begins = datetime.fromisoformat(start)
    except ValueError:
        return True
    return (begins - datetime.now(begins.tzinfo)).days > _MOST_DAYS


def parse(text: str, name: str) -> Job:
    """The job of this name in squeue's answer: ids come again where a controller has lost its
    state. Of a heterogeneous job it is the component that comes last, for which the others wait."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == _FIELDS.count("|") + 1 and fields[3] == name:
            state, reason, start, _ = fields
            start = "" if endless(start) else start
            found.append(Job(state, reason if reason != "None" else "", start))
    late = [(job.waits, not job.over, not job.start, job.start) for job in found]
    return found[late.index(max(late))] if found else Job()


def account(job: str, name: str) -> Job:
    """What the accounting keeps of a job that the controller has forgotten, where there is one.
    Its ``reason`` is who cancelled it, or the code that it ended with. Raises
    :class:`UnreachableError` where it is kept and not told."""
    if shutil.which("sacct") is None:
        return Job()
    form = "--format=State,ExitCode,JobName"
    done = call("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job}", form)
    if done.returncode:
        if "disabled" in done.stderr:
            return Job()
        raise UnreachableError(f"Slurm's accounting does not answer: {said(done)}")
    return parse_account(done.stdout, name)


def parse_account(text: str, name: str) -> Job:
    """The job of this name in sacct's answer."""
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[2] == name:
            word, _, by = fields[0].partition(" ")
            return Job(word, _user(by) or ("" if fields[1] == "0:0" else f"exit code {fields[1]}"))
    return Job()


def _user(by: str) -> str:
    """``by root`` for ``by 0``."""
    number = by.removeprefix("by ")
    try:
        return f"by {pwd.getpwuid(int(number)).pw_name}"
    except (KeyError, ValueError, OverflowError):
        return by and f"by user {number}"


def cancel(job: str, signal: str | None = None) -> None:
    """End a job; with a ``signal``, send it to its batch script alone. Raises
    :class:`UnreachableError`; a job that has ended is none's trouble."""
    words = ("--batch", f"--signal={signal}") if signal else ()
    done = call("scancel", *words, job)
    if done.returncode and re.search(r"contact|timed out", done.stderr, re.IGNORECASE):
        raise UnreachableError(f"Slurm does not answer: {said(done)}")


def test_only(command: Sequence[str]) -> tuple[bool, str]:
    """Whether Slurm would take a job now, and what it says."""
    done = call(command[0], "--test-only", *command[1:])
    if re.search(r"Unable to contact|timed out", done.stderr, re.IGNORECASE):
        raise UnreachableError(f"Slurm does not answer: {said(done)}")
    return done.returncode == 0, said(done)


def knows_option(name: str) -> bool:
    """Whether srun has an option, its plug-ins' among them."""
    return name in call("srun", "--help").stdout


def finds_by_groups() -> bool:
    """Whether Slurm finds the processes of a job by their group, which most leave."""
    return "proctrack/pgid" in _asked("scontrol", "show", "config")


def down(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm takes for down."""
    words = ("--noheader", "--Node", f"--nodes={','.join(nodes)}", "--states=down", "--format=%N")
    return list(dict.fromkeys(_asked("sinfo", *words).split()))


@dataclass(frozen=True)
class Partition:
    """A partition: ``up`` is ``up``, ``down``, ``drain`` or ``inact``; ``limit`` its longest time
    as Slurm writes it, ``usual`` that of a job which asks for none; ``nodes`` and ``cpus`` are what
    it has, the latter of its largest node."""

    name: str
    default: bool
    up: str
    limit: str
    usual: str
    nodes: int
    cpus: int


def partitions() -> Mapping[str, Partition]:
    """The partitions by name. Raises :class:`UnreachableError`."""
    text = _asked("sinfo", "--noheader", "--format=%P|%a|%l|%L|%D|%c")
    found: dict[str, Partition] = {}
    for name, default, up, limit, usual, nodes, cpus in _PARTITION.findall(text):
        # A line for each kind of node.
        before = found.get(name, Partition(name, bool(default), up, limit, usual, 0, 0))
        most = max(before.cpus, int(cpus))
        found[name] = replace(before, nodes=before.nodes + int(nodes), cpus=most)
    return found


def states(jobs: Sequence[str]) -> Mapping[str, str]:
    """The states of these jobs, by id; those that Slurm does not know are left out."""
    done = call(
        "squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T"
    )
    pairs = (line.strip().partition("|") for line in done.stdout.splitlines())
    return {job: state for job, _, state in pairs if job in jobs}
