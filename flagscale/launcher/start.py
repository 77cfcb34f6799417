"""Waiting until a run that was just launched has really started.

The training program of this project reports ``joined`` from every rank, ``ready`` once model, data
and checkpoint are loaded, and ``progress`` after its first step; ``runner.wait_for`` selects the
event to wait for. Other programs that report status have no ``ready``; they count as ready once
they have joined. A program that reports nothing counts as started after all its rank processes have
run for a few seconds.
"""

from __future__ import annotations

import math
import time
from typing import Any, NoReturn

from flagscale.errors import JobError
from flagscale.files import read_json
from flagscale.hosts import processes
from flagscale.hosts.names import compress_names, list_first
from flagscale.launcher.failures import find_first_failure, read_job_record
from flagscale.launcher.job_hosts import select_job_members
from flagscale.launcher.layout import Layout
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.liveness.diagnosis import Failure, last_lines
from flagscale.launcher.runners.base import Runner
from flagscale.launcher.snapshot import EventReader
from flagscale.launcher.state import RunState, reload_state
from flagscale.records import from_record

STABLE_PROCESS_SECONDS = 3.0
# torchrun needs a moment to detect a failed rank and to write its table.
_FAILURE_REPORT_SECONDS = 5.0
_SCAN_SECONDS = 0.25
# Interval of progress lines about a slow start.
_PROGRESS_LINE_SECONDS = 15.0
# The agents end a restart whose ranks do not join. This margin lets them do so first.
_RESTART_MARGIN_SECONDS = 30.0

_READY_EVENTS = ("ready", "progress", "finished")
# Events that show that a rank has reached a stage, or one after it.
_EVENTS_BY_STAGE = {"joined": ("joined", *_READY_EVENTS), "ready": _READY_EVENTS}
_AWAITED_WORK = {"ready": "the model, the data and the checkpoint", "step": "the first step"}


def wait_until_started(
    state: RunState, runner: Runner, timeout: float, wait_for: str = "ready"
) -> str:
    """Wait until every rank has reached ``wait_for``, and return a description of the progress.

    ``wait_for`` is ``none``, ``joined``, ``ready`` or ``step``. Progress of a slow start is printed
    to stderr. If the agents answer a failure with a restart, it is reported and waiting continues.
    Ranks that have joined and need longer than ``timeout`` to get ready are left alone.

    Raises:
        JobError: the run failed for good, with its first failure; or not every rank joined within
            ``timeout`` seconds, and the run was ended.
    """
    if wait_for == "none":
        return "its scripts were started"
    return _StartWait(state, runner, timeout, wait_for).wait()


class _StartWait:
    """State of waiting for one start."""

    def __init__(self, state: RunState, runner: Runner, timeout: float, wait_for: str) -> None:
        self._state = state
        self._world_size = state.world_size
        self._runner = runner
        self._timeout = timeout
        # Other programs never report ``ready``.
        has_no_ready = wait_for == "ready" and state.external
        self._wait_for = "joined" if has_no_ready else wait_for
        self._reader = EventReader(state.hosts)
        self._start_time = self._attempt_start_time = time.monotonic()
        self._joined_at: float | None = None
        self._last_line_at = self._start_time
        self._restarts = 0
        self._last_count_at, self._running_since = 0.0, math.inf

    def wait(self) -> str:
        while True:
            job_state = select_job_members(self._state)
            self._world_size = job_state.world_size
            self._reader.follow(job_state.hosts)
            self._reader.refresh()
            job = read_job_record(self._state.hosts)
            # Also of ranks that have joined and failed since the last look.
            if self._reader.attempts() <= {job.get("attempt", 1)}:
                self._notice_joined_ranks()
            if self._runner.ended(self._state, any_host=True) or self._failed_for_good(job):
                return self._handle_early_end()
            self._print_restarts(job)
            description = (
                self._describe_if_reached() if self._is_current(job) else ""
            ) or self._describe_if_late()
            if description:
                return description
            self._print_progress()
            time.sleep(processes.POLL_SECONDS)

    # -- progress -----------------------------------------------------------------------------

    def _describe_if_reached(self) -> str:
        """Describe the progress if ``wait_for`` is reached; otherwise return an empty string."""
        world_size, events = self._world_size, self._reader.events
        if self._state.external and not events and self._all_processes_run():
            return f"{world_size} rank process(es) are running"
        if self._joined_at is None or not self._stage_reached():
            return ""
        joined, seconds = f"{world_size} rank(s) joined", time.monotonic() - self._start_time
        if self._wait_for == "joined":
            return f"{joined} in {seconds:.1f} s"
        stage = "ready" if self._wait_for == "ready" else "past the first step"
        return f"{joined} and are {stage} in {seconds:.1f} s"

    def _notice_joined_ranks(self) -> None:
        """Print that all ranks have joined, once in an attempt, if there is more to wait for."""
        if self._joined_at is not None or len(self._ranks_at("joined")) < self._world_size:
            return
        self._joined_at = self._last_line_at = time.monotonic()
        if self._wait_for != "joined" and not self._stage_reached():
            log_line(
                f"{self._world_size} rank(s) joined in {self._joined_at - self._start_time:.1f} s; "
                f"waiting for {_AWAITED_WORK[self._wait_for]}"
            )

    def _all_processes_run(self) -> bool:
        """Return whether all rank processes of a program without status have run long enough."""
        now = time.monotonic()
        if now - self._last_count_at < _SCAN_SECONDS:
            return False
        self._last_count_at = now
        all_running = self._runner.rank_count(self._state) >= self._world_size
        self._running_since = min(self._running_since, now) if all_running else math.inf
        return now - self._running_since >= STABLE_PROCESS_SECONDS

    def _is_current(self, job: dict[str, Any]) -> bool:
        """Return whether the attempt is running and all events that were read belong to it."""
        running = job.get("phase", "running") == "running"
        return running and self._reader.attempts() <= {job.get("attempt", 1)}

    def _stage_reached(self) -> bool:
        if self._wait_for == "step":
            # One rank reports for all, because no rank finishes a step without the others.
            return bool(self._reader.ranks_with("progress") or self._reader.ranks_with("finished"))
        return len(self._ranks_at(self._wait_for)) >= self._world_size

    def _ranks_at(self, stage: str) -> set[int]:
        return set().union(*(self._reader.ranks_with(event) for event in _EVENTS_BY_STAGE[stage]))

    def _list_missing(self) -> str:
        """Return a shortened list of the ranks that have not reached the stage, for messages."""
        stage = "ready" if self._joined_at is not None and self._wait_for == "ready" else "joined"
        ranks = sorted(set(range(self._world_size)) - self._ranks_at(stage))
        return f"; missing: {list_first(ranks)}" if ranks else ""

    def _print_progress(self) -> None:
        now = time.monotonic()
        if now - self._last_line_at < _PROGRESS_LINE_SECONDS:
            return
        self._last_line_at = now
        if self._joined_at is None:
            progress = f"{len(self._ranks_at('joined'))} of {self._world_size} rank(s) joined"
        else:
            progress = f"waiting for {_AWAITED_WORK[self._wait_for]}"
        log_line(f"{now - self._start_time:.0f} s: {progress}{self._list_missing()}")

    def _describe_if_late(self) -> str:
        """Describe a start that takes too long; empty while there is time.

        Raises:
            JobError: not even every rank has joined; the run is ended.
        """
        stage_start = self._joined_at if self._joined_at is not None else self._attempt_start_time
        margin = _RESTART_MARGIN_SECONDS if self._restarts else 0.0
        if time.monotonic() - stage_start <= self._timeout + margin:
            return ""
        if self._joined_at is not None:
            work = _AWAITED_WORK[self._wait_for]
            return (
                f"{self._world_size} rank(s) joined, and {self._timeout:g} s later are still "
                f"busy with {work}{self._list_missing()}. The run continues"
            )
        missing = self._list_missing()
        self._runner.stop(self._state)
        raise JobError(
            f"run {self._state.run_id}: not every rank joined within {self._timeout:g} s{missing}. "
            f"The run was stopped\n  log: {self._state.hosts[0].output}",
            hint="raise experiment.runner.start_timeout if the start takes longer than that"
            + _describe_required_ports(self._state),
        )

    # -- failures -----------------------------------------------------------------------------

    def _failed_for_good(self, job: dict[str, Any]) -> bool:
        """Return whether a rank has failed and the agents will not restart the job.

        Until they have decided, the failure may belong to an earlier attempt.
        """
        is_final = job.get("attempts") == 1 or job.get("phase") == "over"
        return is_final and bool(self._reader.ranks_with("failed"))

    def _print_restarts(self, job: dict[str, Any]) -> None:
        """Print the failed attempts that were followed by a restart, whose timeout starts anew."""
        restarts = job.get("restarts", [])
        for number, restart in enumerate(restarts[self._restarts :], self._restarts + 1):
            failure = from_record(Failure, restart.get("failure"))
            attempt = f"attempt {number} of {job.get('attempts')}"
            if failure is None:
                log_line(f"{attempt} was ended, so that a host can join the job")
            else:
                log_line(f"{attempt} failed: {failure.headline()}; the job starts again")
        if len(restarts) != self._restarts:
            self._restarts = len(restarts)
            self._joined_at, self._attempt_start_time = None, time.monotonic()

    def _handle_early_end(self) -> str:
        """Handle a run that ended, or a rank that failed for good, before ``wait_for``."""
        state, runner = self._state, self._runner
        ended_everywhere = processes.wait_until(
            lambda: runner.ended(state), _FAILURE_REPORT_SECONDS
        )
        runner.bring_output(state)
        failure = find_first_failure(select_job_members(state), self._reader.refresh())
        if failure is None and ended_everywhere:
            code = runner.wait(state)
            if code == 0:
                return "the job has ended already, with exit code 0"
            if _was_stopped(state):
                raise JobError(
                    f"run {state.run_id} was stopped before its ranks had started", exit_code=code
                )
            output = state.hosts[0].output
            raise JobError(
                f"run {state.run_id} ended with exit code {code} before its ranks had started\n"
                f"{last_lines(output)}\n  log: {output}",
                exit_code=1,
            )
        if failure is None and self._reader.ranks_with("failed"):
            return "a rank reported a failure, but the job continues"
        if failure is None:
            exits = [exit_ for host in state.hosts if (exit_ := host.exit()) is not None]
            if exits and not any(exit_.code for exit_ in exits):
                return (
                    "the job has ended on some hosts, without an error, and is ending on the rest"
                )
            _stop_half_ended(state, runner)
        attempt_text = f" in attempt {self._restarts + 1}" if self._restarts else ""
        raise JobError(
            f"run {state.run_id} failed{attempt_text}: {failure.describe()}", exit_code=1
        )


def _was_stopped(state: RunState) -> bool:
    """Return whether ``action=stop`` or a signal has ended the run."""
    exits = [host.exit() for host in state.hosts]
    signalled = any(exit_ is not None and exit_.signal is not None for exit_ in exits)
    return signalled or reload_state(state).stop_requested is not None


def _describe_required_ports(state: RunState) -> str:
    """Describe the ports that hosts must reach on the first one, which checks cannot test."""
    plan = read_json(Layout(state.exp_dir).plan) or {}
    if len(state.hosts) == 1 or not plan.get("master_port"):
        return ""
    return (
        f"; every host has to reach {plan['master_addr']} at ports {plan['master_port']} "
        f"(runner.master_port) and {plan['liveness_port']} (runner.liveness_port), which a "
        "firewall may drop"
    )


def _stop_half_ended(state: RunState, runner: Runner) -> NoReturn:
    """Stop a run if some host's script ended without a reported failure; the others would wait for
    it.
    """
    snapshot = runner.query(state)
    ended_hosts = [row.host for row in snapshot.hosts if row.phase.ended]
    ended_host = next((host for host in state.hosts if host.name in ended_hosts), state.hosts[0])
    runner.stop(state)
    raise JobError(
        f"run {state.run_id}: the script ended on {compress_names(ended_hosts)} before every rank "
        f"had joined. The run was stopped\n{last_lines(ended_host.output)}\n"
        f"  log: {ended_host.output}"
    )
