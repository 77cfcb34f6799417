"""Runner for Slurm: each run is one job.

This machine reads the files that the job's nodes write, because they share the file system of
``exp_dir``. Slurm is queried only for information that is not in these files, see :mod:`.watch`,
and nodes are never contacted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, JobError, Problem, RunStateError, UnreachableError
from flagscale.files import write_atomic
from flagscale.hosts import processes
from flagscale.hosts.names import compress_names, expand_list
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher.job_hosts import select_job_members
from flagscale.launcher.layout import SCRIPT_FILE
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runners.base import ConfigTexts, PreparedRun
from flagscale.launcher.runners.slurm import files, scheduler, watch
from flagscale.launcher.runners.slurm.job import RUNNER_TYPE, plan_with_job
from flagscale.launcher.state import (
    RunState,
    alive_message,
    load_state,
    make_state,
    save_plan,
    start_lock,
)

if TYPE_CHECKING:
    from flagscale.launcher.snapshot import EventReader, Snapshot
    from flagscale.launcher.stop_result import StopResult

# Time that a job takes to end after its signal, in addition to runner.stop_grace, and after a kill.
_ENDING_SECONDS = 20.0
_KILLING_SECONDS = 120.0
_POLL_SECONDS = 0.25
# Slurm is queried more often while a command waits for the end of a job.
_ENDING_POLL_SECONDS = 3.0
_STOPPED_CODE = 128 + signal.SIGTERM
_SUSPENDED = "Slurm has suspended the job"
# All nodes start at the same time, unless Slurm is still preparing one.
_LATE_SECONDS = 3.0


class SlurmRunner:
    """Starts, watches and ends runs as Slurm jobs."""

    def __init__(self) -> None:
        self._reader: EventReader | None = None

    def close(self) -> None:
        """Do nothing: the runner holds no connections open."""

    # -- before a run ---------------------------------------------------------------------------

    def plan(self, experiment: Experiment) -> LaunchPlan:
        plan = plan_with_job(experiment)
        notes = [
            f"{name}={os.environ[name]} from the environment is used by sbatch"
            for name in scheduler.DEFAULT_VARIABLES
            if name in os.environ
        ]
        return replace(plan, notes=(*plan.notes, *notes))

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[PreparedRun]:
        from flagscale.launcher.runners.slurm.checks import check_job

        plan = self.plan(experiment)
        yield PreparedRun(plan, check_job(experiment, plan, fresh=fresh) if checking else [])

    # -- start ----------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan, texts: ConfigTexts, *, foreground: bool) -> RunState:
        """Submit the job of a plan.

        The job is never a child of this process; in the foreground, the caller ends it with
        :meth:`stop`.
        """
        layout = plan.layout
        if plan.job is None:
            raise RunStateError("this plan has no job; was it created by another runner?")
        with start_lock(layout):
            previous = load_state(layout.state)
            if previous is not None and previous.runner.type == RUNNER_TYPE:
                _require_ended(previous)
            directory = files.job_directory(plan.exp_dir, plan.run_id)
            self._write_files(plan, texts, previous, directory)
            state = make_state(plan)
            # Saved before the submission, so that a job is found by its name if this launcher dies
            # here.
            state.save(layout.state)
            try:
                submitted = scheduler.submit_job(plan.job.command, str(plan.runner.handle["name"]))
            except scheduler.JobRejectedError as error:
                files.remove_secrets(directory)
                if previous is not None:
                    previous.save(layout.state)
                else:
                    layout.state.unlink(missing_ok=True)
                problem = Problem("experiment.runner.slurm", f"Slurm rejects the job: {error}")
                raise ConfigError(problem) from None
            job = submitted.job_id
            handle = {**state.runner.handle, "job": job}
            state = replace(state, runner=RunnerHandle(RUNNER_TYPE, handle))
            state.save(layout.state)
        print(f"submitted job {job} for {len(state.hosts)} node(s)", file=sys.stderr, flush=True)
        if submitted.message:
            log_line(f"note: Slurm says about job {job}: {submitted.message}")
        return state

    def _write_files(
        self, plan: LaunchPlan, texts: ConfigTexts, previous: RunState | None, directory: Path
    ) -> None:
        """Write the scripts and the job's files."""
        from flagscale.launcher.planning.script import render

        save_plan(plan, **vars(texts))
        files.write_job_files(plan, directory, has_host_names=bool(plan.runner.handle.get("named")))
        for host in plan.hosts:
            write_atomic(host.script, render(plan, host), mode=0o700, durable=False)
        if plan.job is not None:
            write_atomic(plan.job.file, plan.job.script, mode=0o700)
        for previous_host in previous.hosts if previous is not None else ():
            previous_host.set_output_aside()

    def await_hosts(self, state: RunState) -> RunState:
        """Wait until Slurm has allocated the job's nodes, and print why it is pending.

        Raises:
            JobError: If the job ends before.
        """
        directory = files.job_directory(state.exp_dir, state.run_id)
        reported_text = ""
        while files.read_start(directory) is None:
            status = watch.monitor_of_run(state.run_id).status(state)
            if status.over:
                code = _STOPPED_CODE if status.cancelled else 1
                raise JobError(f"run {state.run_id} has not started: {status.end}", exit_code=code)
            text = status.pending_reason
            if status.trouble and not text:
                text = f"{status.trouble}; the job may be pending or running"
            if text and text != reported_text and "(" in text:
                log_line(text)
                reported_text = text
            time.sleep(_POLL_SECONDS)
        watch.monitor_of_run(state.run_id).invalidate()
        return self._resolve_node_names(state)

    # -- watch ----------------------------------------------------------------------------------

    def _resolve_node_names(self, state: RunState) -> RunState:
        """Return the state with the names of the job's nodes, if they are allocated."""
        start = files.read_start(files.job_directory(state.exp_dir, state.run_id))
        if start is None or len(start.nodes) != len(state.hosts):
            return state
        hosts = tuple(
            replace(host, name=name) for host, name in zip(state.hosts, start.nodes, strict=True)
        )
        handle = {**state.runner.handle, "job": start.job}
        named_state = replace(state, hosts=hosts, runner=RunnerHandle(RUNNER_TYPE, handle))
        if named_state != state:
            watch.record_job(state, hosts, job=start.job)
        return named_state

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        from flagscale.launcher.snapshot import EventReader, HostObservation, take_snapshot

        state = self._resolve_node_names(state)
        status = watch.monitor_of_run(state.run_id).status(state)
        if status.cancelled and state.stop_requested is None:
            state = replace(state, stop_requested=time.time())
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        alive, waits = "script" if status.alive else "", status.pending_reason
        if alive and state.runner.handle.get("requeue") and self._any_host_ended(state):
            # Reported as ended, this start would be taken for the last one.
            waits = f"job {state.runner.handle.get('job', '')} is ending, and may be started again"
        observation = HostObservation(alive=alive, trouble=status.trouble, waits=waits)
        observations = dict.fromkeys(range(len(state.hosts)), observation)
        snapshot = take_snapshot(state, observations, self._reader, with_lines=with_lines)
        warnings = [status.end]
        if status.suspended:
            warnings.append(_SUSPENDED)
        elif status.alive:
            warnings.append(_warn_of_late_nodes(state))
        snapshot = replace(snapshot, warnings=(*filter(None, warnings), *snapshot.warnings))
        is_lost = status.lost or status.suspected
        return _mark_lost_nodes(state, snapshot, status) if is_lost else snapshot

    def bring_output(self, state: RunState) -> None:
        self._resolve_node_names(state)

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        if any_host and self._any_host_ended(state):
            return True
        return watch.monitor_of_run(state.run_id).status(state).over

    def _any_host_ended(self, state: RunState) -> bool:
        """Return True if a host has ended its part of the job. Hosts that left it do not count."""
        return any(host.exit() is not None for host in select_job_members(state).hosts)

    def rank_count(self, state: RunState) -> int:
        from flagscale.launcher.liveness.diagnosis import rank_logs

        members = select_job_members(state).hosts
        ranks = ((host, rank) for host in members for rank in host.ranks)
        return sum(bool(rank_logs(host, rank, "stdout.log")) for host, rank in ranks)

    def wait(self, state: RunState) -> int:
        from flagscale.launcher.failures import compute_job_code, find_first_failure

        while not (status := watch.monitor_of_run(state.run_id).status(state)).over:
            time.sleep(_POLL_SECONDS)
        state = select_job_members(self._resolve_node_names(state))
        exits = [host.exit() for host in state.hosts]
        code = compute_job_code(state, exits, find_first_failure(state, {})) or 0
        if code or None not in exits:
            return code or bool(status.lost or status.suspected)
        end = files.read_end(files.job_directory(state.exp_dir, state.run_id))
        code = end.code if end is not None else 0
        return code or (_STOPPED_CODE if status.cancelled else 1)

    # -- stop -----------------------------------------------------------------------------------

    def stop(self, state: RunState) -> StopResult:
        """End the job.

        A pending job is cancelled. A running job is signalled to save and end within
        ``stop_grace``, and is cancelled after that.

        Raises:
            UnreachableError: If Slurm does not answer, so that the job may live on.
        """
        from flagscale.launcher.stop_result import StopResult, record_stop

        state = self._resolve_node_names(state)
        watch.monitor_of_run(state.run_id).invalidate()
        status = watch.monitor_of_run(state.run_id).status(state)
        if status.over:
            return StopResult()
        if status.trouble:
            raise _unreachable(state, status.trouble)
        stopping_state = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping_state)
        job_id = watch.find_job_id(state)
        start_time = time.monotonic()
        try:
            if not self._signal_end(state, job_id, status):
                scheduler.cancel_job(job_id)
                self._wait_until_over(state, _KILLING_SECONDS)
        except UnreachableError as error:
            raise _unreachable(state, error.message) from None
        if not watch.monitor_of_run(state.run_id).status(state).over:
            raise RunStateError(
                f"run {state.run_id} of {state.name}: job {job_id} was cancelled, and Slurm still "
                "shows it as ending",
                hint=f"squeue -j {job_id} shows when it has ended",
            )
        if unrecorded is not None:
            unrecorded = record_stop(stopping_state)
        grace_expired = (
            time.monotonic() - start_time >= state.stop_grace and not status.pending_reason
        )
        return StopResult(
            self._killed_processes(state, grace_expired=grace_expired), unrecorded=unrecorded
        )

    def _signal_end(self, state: RunState, job_id: str, status: watch.JobStatus) -> bool:
        """Signal a running job to save and end, and return True if it ended in time."""
        if status.pending_reason or status.suspended:
            return False
        with suppress(OSError):
            (files.job_directory(state.exp_dir, state.run_id) / "stop").touch(mode=0o600)
        scheduler.cancel_job(job_id, "USR1")
        return self._wait_until_over(state, state.stop_grace + _ENDING_SECONDS)

    def _wait_until_over(self, state: RunState, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the job, and return True if it ended."""
        queried_at = float("-inf")

        def is_over() -> bool:
            nonlocal queried_at
            if time.monotonic() - queried_at >= _ENDING_POLL_SECONDS:
                queried_at = time.monotonic()
                watch.monitor_of_run(state.run_id).invalidate()
            return watch.monitor_of_run(state.run_id).status(state).over

        return processes.wait_until(is_over, seconds)

    def _killed_processes(
        self, state: RunState, *, grace_expired: bool
    ) -> dict[str, KilledProcesses]:
        """Return the killed processes by node; none if the grace period did not expire."""
        by_host = {}
        for host in select_job_members(state).hosts:
            with suppress(OSError):
                pids = tuple(host.exit_record().get("swept", ())) if grace_expired else ()
                by_host[host.name] = KilledProcesses(killed=pids)
        return by_host


def _mark_lost_nodes(state: RunState, snapshot: Snapshot, status: watch.JobStatus) -> Snapshot:
    """Return the snapshot of a run that has lost nodes, which otherwise looks like a stop."""
    from flagscale.launcher.liveness.diagnosis import host_failure
    from flagscale.launcher.snapshot import Phase

    if status.lost:
        reason = "was lost: Slurm reported it as down and ended the job"
        lost_names = expand_list(status.lost)
        host = next((host for host in state.hosts if host.name in lost_names), state.hosts[0])
        name = host.name
    else:
        reason = "one of these nodes was lost, and Slurm ended the job; which one is not known"
        name, host = status.suspected, state.hosts[0]
    failure = snapshot.failure or host_failure(name, reason, host.output)
    return replace(snapshot, phase=Phase.FAILED, failure=failure, exit_code=snapshot.exit_code or 1)


def _warn_of_late_nodes(state: RunState) -> str:
    """Return a warning that names the nodes which have not started while others wait for them."""
    directory = files.job_directory(state.exp_dir, state.run_id)
    late_nodes = [
        host.name
        for host in state.hosts
        if not (host.run_dir / SCRIPT_FILE).exists() and host.exit() is None
    ]
    with suppress(OSError):
        seconds = time.time() - (directory / files.NODES).stat().st_mtime
        if 0 < len(late_nodes) < len(state.hosts) and seconds > _LATE_SECONDS:
            return (
                f"{compress_names(late_nodes)} has not started: Slurm is still preparing it, or it "
                f"does not share {state.exp_dir} with the others"
            )
    return ""


def _require_ended(previous: RunState) -> None:
    """Check that the previous run has ended.

    Raises:
        RunStateError: If it is alive.
        UnreachableError: If its status is unknown.
    """
    status = watch.monitor_of_run(previous.run_id).status(previous)
    if status.trouble:
        raise _unreachable(previous, status.trouble)
    if not status.over:
        message, hint = alive_message(previous)
        raise RunStateError(message, hint=hint)


def _unreachable(state: RunState, trouble: str) -> UnreachableError:
    return UnreachableError(
        f"run {state.run_id} of {state.name} may live: {trouble}", hint="try again once it answers"
    )
