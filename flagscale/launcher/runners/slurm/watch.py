"""Status of a run's job, from the job's files and, rarely, from Slurm.

Most of the status follows from files on the shared file system. The controller serves thousands of
users, so it is queried at the beginning and then every 30 seconds: for the reason of a pending job,
and to find out whether a job that writes nothing is alive.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from flagscale.errors import RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.hosts.names import compress_names
from flagscale.launcher.failures import find_first_failure
from flagscale.launcher.job_hosts import select_job_members
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runners.slurm import files, scheduler
from flagscale.launcher.runners.slurm.reasons import explain_reason
from flagscale.launcher.runners.slurm.scheduler import SlurmJob
from flagscale.launcher.state import HostState, RunState, load_state

QUERY_SECONDS = 30.0
_FIRST_QUERY_SECONDS = 1.0
"""Interval before the second query of Slurm. Later intervals double, up to :data:`QUERY_SECONDS`.
"""
# A job that has just ended may still be about to record how: files take a moment to be visible.
_SETTLE_SECONDS = 2.0

_END_DESCRIPTIONS = {
    "TIMEOUT": "reached its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted",
    "OUT_OF_MEMORY": "was killed because it ran out of memory",
    "CANCELLED": "was cancelled",
    "BOOT_FAIL": "failed because a node did not boot",
    "DEADLINE": "missed its deadline",
}
_STOP_STATES = frozenset({"TIMEOUT", "PREEMPTED", "CANCELLED", "DEADLINE"})
_RECORDED_END_DESCRIPTIONS = {
    files.TIME: "reached its time limit; its ranks were signalled to save before",
    files.CANCELLED: "was ended by Slurm: cancelled, preempted, or at its time limit",
    **dict.fromkeys(
        files.TOO_MANY_REQUEUES, "was started by Slurm more often than slurm.requeue allows"
    ),
    files.DISK: "could not write to its directory",
    files.PORT: "found no free port on its first node",
    files.BATCH_NODE_LOST: "lost the node that ran its batch script",
}
# A job that has requeued itself is pending: how it ended after that, only Slurm knows.
_ENDS_EXPLAINED_BY_SLURM = frozenset({files.CANCELLED, *files.REQUEUED})


@dataclass(frozen=True)
class JobStatus:
    """Status of a job: pending, alive, unknown or over.

    Attributes:
        alive: True if the job is running.
        pending_reason: Reason why the job is pending; empty if it is not.
        trouble: Reason why the status is unknown.
        end: Description of how the job ended, unless its ranks ended by themselves.
        cancelled: True if the job was ended from outside.
        lost: Nodes whose loss ended the job.
        suspected: Nodes of which one or more were lost, if it is not known which.
        suspended: True if Slurm has suspended the job.
    """

    alive: bool = False
    pending_reason: str = ""
    trouble: str = ""
    end: str = ""
    cancelled: bool = False
    lost: str = ""
    suspected: str = ""
    suspended: bool = False

    @property
    def over(self) -> bool:
        return not (self.alive or self.pending_reason or self.trouble)


@lru_cache(maxsize=512)
def monitor_of_run(run_id: str) -> JobMonitor:
    """Return the monitor of a run, one per process, so that repeated queries share its cache."""
    return JobMonitor()


class JobMonitor:
    """Monitor of the job of one run, with a cache of Slurm's answers."""

    def __init__(self) -> None:
        self.invalidate()
        self._changed_at = self._queried_at
        self._answer: SlurmJob | UnreachableError | None = None
        self._files: tuple[files.JobStart | None, files.JobEnd | None] = (None, None)
        self._final: JobStatus | None = None

    def invalidate(self) -> None:
        """Query Slurm again at the next call of :meth:`status`."""
        # The interval is doubled when it is first used.
        self._queried_at, self._query_interval = float("-inf"), _FIRST_QUERY_SECONDS / 2

    def status(self, state: RunState) -> JobStatus:
        """Return the current status of the job."""
        status = self._final or _recorded_status(state) or self._determine_status(state)
        self._final = status if status.over else None
        return status

    def _determine_status(self, state: RunState) -> JobStatus:
        # The handle is the record of the job in state.json: job id, name, requeue, and its end.
        directory, handle = files.job_directory(state.exp_dir, state.run_id), state.runner.handle
        start, end = files.read_start(directory), files.read_end(directory)
        # `start` counts the job's starts, of which Slurm makes several if it requeues the job.
        if end is not None and start is not None and end.start < start.start:
            end = None  # of an earlier start
        # With requeue, Slurm may start a job again unless its ranks ended by themselves or
        # `action=stop` ended them.
        final = end is not None and (not handle.get("requeue") or end.reason in ("", files.STOP))
        if (start, end) != self._files:
            # The cached answer concerns an earlier start of the job, or none.
            self._files, self._changed_at = (start, end), time.monotonic()
            self.invalidate()
        explained = end is not None and end.reason not in _ENDS_EXPLAINED_BY_SLURM
        job = SlurmJob() if final and explained else self._query_slurm(state)
        if final and (isinstance(job, UnreachableError) or not job.over):
            # The job has ended: Slurm gives the reason once it has finished with the job.
            if isinstance(job, SlurmJob) and time.monotonic() - self._changed_at < QUERY_SECONDS:
                return JobStatus(alive=True)
            return JobStatus(
                end=_describe_job(state, _RECORDED_END_DESCRIPTIONS[files.CANCELLED]),
                cancelled=True,
            )
        if isinstance(job, UnreachableError):
            return JobStatus(trouble=job.message)
        if not job.over:
            return JobStatus(
                alive=not job.is_pending,
                pending_reason=describe_pending_job(state, job) if job.is_pending else "",
                suspended=job.state == "SUSPENDED",
            )
        if end is not None and explained:
            description = (
                _describe_job(state, _RECORDED_END_DESCRIPTIONS[end.reason])
                if end.reason in _RECORDED_END_DESCRIPTIONS
                else ""
            )
            return _record_end(
                state, JobStatus(end=description, cancelled=end.reason == files.TIME)
            )
        return self._explain_end(state, directory, job)

    def _query_slurm(self, state: RunState) -> SlurmJob | UnreachableError:
        """Return Slurm's answer, cached for up to 30 seconds."""
        now, answer, (start, end) = time.monotonic(), self._answer, self._files
        if answer is None or now - self._queried_at >= self._query_interval:
            answer = self._answer = query_job(state)
            # Slurm takes a moment to determine why a new job is pending, and a job to record its
            # start or end. That may take long, so the interval doubles with each query.
            is_incomplete = isinstance(answer, SlurmJob) and (
                not answer.reason if answer.is_pending else start is None or end is not None
            )
            self._query_interval = (
                min(self._query_interval * 2, QUERY_SECONDS) if is_incomplete else QUERY_SECONDS
            )
            self._queried_at = now
        return answer

    def _explain_end(self, state: RunState, directory: Path, answer: SlurmJob) -> JobStatus:
        """Return the status of a job that ended without a record, or that Slurm has ended."""
        start, end = self._files
        # A job that was cancelled before it had nodes has no script that could record its end.
        may_record_end = end is None and (answer.state != "CANCELLED" or start is not None)
        if may_record_end and processes.wait_until(
            lambda: bool(files.read_end(directory)), _SETTLE_SECONDS
        ):
            self.invalidate()
            return JobStatus(alive=True)
        job_id, name = str(state.runner.handle.get("job", "")), str(state.runner.handle["name"])
        accounting_error = ""
        if answer.state in ("", "CANCELLED") and job_id:
            try:
                accounting_record = scheduler.query_accounting(job_id, name)
                answer = (
                    accounting_record
                    if accounting_record.state and accounting_record.over
                    else answer
                )
            except UnreachableError as error:
                accounting_error = "" if answer.state else error.message
        lost_nodes = suspected_nodes = ""
        if answer.state == "NODE_FAIL":
            lost_nodes = _find_lost_nodes(state)
            if not lost_nodes:
                suspected_nodes = _find_suspected_nodes(state)
        ended_by_slurm = end is not None and answer.state not in _END_DESCRIPTIONS
        cancelled = ended_by_slurm or answer.state in _STOP_STATES
        description = _describe_job(
            state,
            _RECORDED_END_DESCRIPTIONS[files.CANCELLED]
            if ended_by_slurm
            else _describe_end(answer),
        )
        if lost_nodes:
            description += f": {lost_nodes}"
        elif suspected_nodes:
            description += f"; which one of {suspected_nodes} is not known"
        if start is None and not cancelled:
            description += (
                f"; its batch script wrote nothing to {directory}, which nodes have to share with "
                "this machine"
            )
        if accounting_error:
            # Not recorded, because a later query may get a better answer.
            return JobStatus(end=f"{description}; {accounting_error}", cancelled=cancelled)
        return _record_end(
            state,
            JobStatus(
                end=description, cancelled=cancelled, lost=lost_nodes, suspected=suspected_nodes
            ),
        )


def find_job_id(state: RunState) -> str:
    """Return the id of the job; a launcher that was killed early may not have recorded it."""
    handle = state.runner.handle
    return str(handle.get("job") or scheduler.find_job(str(handle["name"])))


def query_job(state: RunState) -> SlurmJob | UnreachableError:
    """Query Slurm for the job; returns the error if Slurm does not answer."""
    try:
        job = find_job_id(state)
        return scheduler.query_job(job, str(state.runner.handle["name"])) if job else SlurmJob()
    except UnreachableError as error:
        return error


def _describe_end(answer: SlurmJob) -> str:
    """Describe how a job ended, according to Slurm."""
    if not answer.state:
        return "is unknown to Slurm and left no record of its end"
    by = f" {answer.reason}" if answer.reason.startswith("by ") else ""
    if answer.state in _END_DESCRIPTIONS:
        return _END_DESCRIPTIONS[answer.state] + by
    return f"ended as {answer.state}" + (f" ({answer.reason})" if answer.reason else "")


def _find_lost_nodes(state: RunState) -> str:
    """Return the nodes that a job has lost, as a range expression; empty if they are not known.

    These are the nodes that Slurm reports as down, else those that have booted or did not respond
    since the job started, else the node that the other nodes' agents have lost, else the only node
    without a record of its end. Nodes that had left the job before are none of them.
    """
    state = select_job_members(state)
    names = [host.name for host in state.hosts]
    directory = files.job_directory(state.exp_dir, state.run_id)
    with suppress(UnreachableError):
        if down := scheduler.find_down_nodes(names):
            return compress_names(down)
        if failed := scheduler.find_failed_nodes(names, files.start_time(directory)):
            return compress_names(failed)
    failure = find_first_failure(state, {})
    if failure is not None and failure.host in names and failure.is_lost_host:
        return failure.host
    unrecorded = _find_unrecorded_nodes(state)
    return unrecorded[0] if len(unrecorded) == 1 else ""


def _find_suspected_nodes(state: RunState) -> str:
    """Return the nodes without a record of their end, or all, as a range expression."""
    state = select_job_members(state)
    return compress_names(_find_unrecorded_nodes(state) or (host.name for host in state.hosts))


def _find_unrecorded_nodes(state: RunState) -> list[str]:
    return [host.name for host in state.hosts if host.exit() is None]


def _recorded_status(state: RunState) -> JobStatus | None:
    """Return the recorded status of a job whose end was detected before."""
    record = {
        name: value
        for name, value in state.runner.handle.items()
        if name in ("end", "cancelled", "lost", "suspected")
    }
    return JobStatus(**record) if "end" in record else None


def _describe_job(state: RunState, predicate: str) -> str:
    return f"job {state.runner.handle.get('job') or state.runner.handle['name']} {predicate}"


def _record_end(state: RunState, status: JobStatus) -> JobStatus:
    """Record how a job ended, because Slurm forgets it within minutes, and return the status."""
    files.remove_secrets(files.job_directory(state.exp_dir, state.run_id))
    record_job(
        state,
        end=status.end,
        cancelled=status.cancelled,
        lost=status.lost,
        suspected=status.suspected,
    )
    return status


def record_job(state: RunState, hosts: tuple[HostState, ...] = (), **properties: object) -> None:
    """Update the state of a run with properties of its job and its ``hosts``.

    Does nothing if another run has replaced this one in the directory.
    """
    path = Layout(state.exp_dir).state
    # If the disk is full or the state damaged, the result is at least reported by this process.
    with suppress(OSError, RunStateError):
        current = load_state(path)
        if current is not None and current.run_id == state.run_id:
            handle = {**current.runner.handle, **properties}
            runner = RunnerHandle(current.runner.type, handle)
            replace(current, runner=runner, hosts=hosts or current.hosts).save(path)


def describe_pending_job(state: RunState, job: SlurmJob) -> str:
    """Describe why a job has not started, and when it may."""
    job_id = state.runner.handle.get("job", "")
    explanation = ": ".join(filter(None, (job.reason, explain_reason(job.reason))))
    text = f"job {job_id} is pending"
    if explanation:
        text += f" ({explanation})"
    if job.start:
        text += f"; it may start at {job.start}"
    return text
