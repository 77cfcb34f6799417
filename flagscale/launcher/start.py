"""Waiting until a run that was just started has really started.

A program of ours reports ``joined`` from every rank, ``ready`` once model, data and checkpoint are
there, and ``progress`` after its first step; ``runner.wait_for`` says which of them is waited for.
Another program that reports knows no ``ready``: it counts as ready once it has joined. One that
reports nothing counts as started once all its rank processes exist and have lived for a few
seconds.
"""

from __future__ import annotations

import math
import time
from typing import Any, NoReturn

from flagscale.errors import JobError
from flagscale.files import read_json
from flagscale.hosts import processes
from flagscale.hosts.names import compress, some
from flagscale.launcher.failures import first_failure, job_record
from flagscale.launcher.layout import Layout
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.liveness.diagnosis import Failure, last_lines
from flagscale.launcher.runners.base import Runner
from flagscale.launcher.snapshot import EventReader
from flagscale.launcher.state import RunState
from flagscale.records import from_record

EXTERNAL_SECONDS = 3.0
# torchrun needs a moment to see that a rank failed, and to write its table.
_FAILURE_SECONDS = 5.0
_SCAN_SECONDS = 0.25
# Between two lines about a start that takes its time.
_TELL_SECONDS = 15.0
# The agents themselves end a restart whose ranks do not join; they get the first word.
_RESTART_MARGIN_SECONDS = 30.0

_READY = ("ready", "progress", "finished")
_REPORTS = {"joined": ("joined", *_READY), "ready": _READY}
_WAITED_FOR = {"ready": "the model, the data and the checkpoint", "step": "the first step"}


def wait_until_started(
    state: RunState, runner: Runner, timeout: float, wait_for: str = "ready"
) -> str:
    """Return what was seen once every rank is as far as ``wait_for``: ``none``, ``joined``,
    ``ready`` or ``step``. What takes its time is told on stderr meanwhile.

    A failure that the agents answer by starting the job again is told and waited through. Raises
    :class:`JobError` with the first failure when the run fails for good before, and when
    ``timeout`` seconds pass before every rank has joined; the run is ended then. Ranks that have
    joined and take longer than ``timeout`` to get ready are left to it.
    """
    if wait_for == "none":
        return "its scripts were started"
    return _Start(state, runner, timeout, wait_for).wait()


class _Start:
    """One start that is being waited for."""

    def __init__(self, state: RunState, runner: Runner, timeout: float, wait_for: str) -> None:
        self._state = state
        self._runner = runner
        self._timeout = timeout
        joining = wait_for == "joined" or (wait_for == "ready" and state.external)
        self._wait_for = "joined" if joining else wait_for
        self._reader = EventReader(state.hosts)
        self._began = self._attempt_began = time.monotonic()
        self._joined_at: float | None = None
        self._told_at = self._began
        self._restarts = 0
        self._counted_at, self._running_since = 0.0, math.inf

    def wait(self) -> str:
        while True:
            self._reader.refresh()
            job = job_record(self._state.hosts)
            if self._runner.ended(self._state, any_host=True) or self._failed_for_good(job):
                return self._ended_early()
            self._tell_restarts(job)
            seen = (self._seen() if self._is_current(job) else "") or self._late()
            if seen:
                return seen
            self._tell()
            time.sleep(processes.POLL_SECONDS)

    # -- how far it is ------------------------------------------------------------------------

    def _seen(self) -> str:
        """What there is to say of a start that is as far as it is waited for; empty before."""
        world, events = self._state.world_size, self._reader.events
        if self._state.external and not events and self._processes_run():
            return f"{world} rank process(es) are running"
        if len(self._reached("joined")) < world:
            return ""
        now = time.monotonic()
        joined = f"{world} rank(s) joined"
        if self._joined_at is None:
            self._joined_at = self._told_at = now
            if self._wait_for != "joined" and not self._done():
                what = _WAITED_FOR[self._wait_for]
                say(f"{joined} in {now - self._began:.1f} s; waiting for {what}")
        if not self._done():
            return ""
        seconds = now - self._began
        if self._wait_for == "joined":
            return f"{joined} in {seconds:.1f} s"
        what = "ready" if self._wait_for == "ready" else "past the first step"
        return f"{joined} and are {what} in {seconds:.1f} s"

    def _processes_run(self) -> bool:
        """Whether all rank processes of a program that reports nothing have lived for a while."""
        now = time.monotonic()
        if now - self._counted_at < _SCAN_SECONDS:
            return False
        self._counted_at = now
        everybody = self._runner.rank_count(self._state) >= self._state.world_size
        self._running_since = min(self._running_since, now) if everybody else math.inf
        return now - self._running_since >= EXTERNAL_SECONDS

    def _is_current(self, job: dict[str, Any]) -> bool:
        """Whether what the ranks have reported is all of the attempt that is under way."""
        running = job.get("phase", "running") == "running"
        return running and self._reader.attempts() <= {job.get("attempt", 1)}

    def _done(self) -> bool:
        if self._wait_for == "step":
            # One rank reports for all: no rank's step ends without the others.
            return bool(self._reader.ranks("progress") or self._reader.ranks("finished"))
        return len(self._reached(self._wait_for)) >= self._state.world_size

    def _reached(self, stage: str) -> set[int]:
        return set().union(*(self._reader.ranks(event) for event in _REPORTS[stage]))

    def _missing(self) -> str:
        """The ranks that are waited for, shortened."""
        stage = "ready" if self._joined_at is not None and self._wait_for == "ready" else "joined"
        missing = sorted(set(range(self._state.world_size)) - self._reached(stage))
        return f"; missing: {some(missing)}" if missing else ""

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        if self._joined_at is None:
            what = f"{len(self._reached('joined'))} of {self._state.world_size} rank(s) joined"
        else:
            what = f"waiting for {_WAITED_FOR[self._wait_for]}"
        say(f"{now - self._began:.0f} s: {what}{self._missing()}")

    def _late(self) -> str:
        """What there is to say once the time is over. Raises :class:`JobError`, and ends the run,
        where not even every rank has joined; empty while there is time."""
        since = self._joined_at if self._joined_at is not None else self._attempt_began
        restarted = _RESTART_MARGIN_SECONDS if self._restarts else 0.0
        if time.monotonic() - since <= self._timeout + restarted:
            return ""
        if self._joined_at is not None:
            return (
                f"{self._state.world_size} rank(s) joined, and {self._timeout:g} s later are still "
                f"busy with {_WAITED_FOR[self._wait_for]}{self._missing()}. The run goes on"
            )
        missing = self._missing()
        self._runner.stop(self._state)
        raise JobError(
            f"run {self._state.run_id}: not every rank joined within {self._timeout:g} s{missing}. "
            f"The run was stopped\n  log: {self._state.hosts[0].output}",
            hint="raise experiment.runner.start_timeout if the start just takes longer"
            + _meeting_points(self._state),
        )

    # -- failures -----------------------------------------------------------------------------

    def _failed_for_good(self, job: dict[str, Any]) -> bool:
        """Whether a rank has failed and nothing is started again, as the agents decide: until they
        have, the failure may be of an attempt that is over already."""
        final = job.get("attempts") == 1 or job.get("phase") == "over"
        return final and bool(self._reader.ranks("failed"))

    def _tell_restarts(self, job: dict[str, Any]) -> None:
        """Tell of attempts that are followed by another, which gets a time of its own."""
        restarts = job.get("restarts", [])
        for number, restart in enumerate(restarts[self._restarts :], self._restarts + 1):
            failure = from_record(Failure, restart.get("failure"))
            why = failure.headline() if failure is not None else "for no reason that is known"
            say(f"attempt {number} of {job.get('attempts')} failed: {why}; the job starts again")
        if len(restarts) != self._restarts:
            self._restarts = len(restarts)
            self._joined_at, self._attempt_began = None, time.monotonic()

    def _ended_early(self) -> str:
        """The run ended, or a rank failed for good, before all were as far as is waited for."""
        state, runner = self._state, self._runner
        everywhere = processes.wait_until(lambda: runner.ended(state), _FAILURE_SECONDS)
        runner.bring_output(state)
        failure = first_failure(state, self._reader.refresh())
        if failure is None and everywhere:
            code = runner.wait(state)
            if code == 0:
                return "the job has ended already, with exit code 0"
            output = state.hosts[0].output
            raise JobError(
                f"run {state.run_id} ended with exit code {code} before its ranks had started\n"
                f"{last_lines(output)}\n  log: {output}",
                exit_code=1,
            )
        if failure is None and self._reader.ranks("failed"):
            return "a rank reported a failure, but the job goes on"
        if failure is None:
            ends = [ended for host in state.hosts if (ended := host.exit()) is not None]
            if ends and not any(ended.code for ended in ends):
                return "the job has ended well on some hosts already and is ending on the others"
            _half_ended(state, runner)
        which = f" in attempt {self._restarts + 1}" if self._restarts else ""
        raise JobError(f"run {state.run_id} failed{which}: {failure.describe()}", exit_code=1)


def _meeting_points(state: RunState) -> str:
    """What several hosts need of their network, which no look at one of them tells."""
    plan = read_json(Layout(state.exp_dir).plan) or {}
    if len(state.hosts) == 1 or not plan.get("master_port"):
        return ""
    return (
        f"; every host has to reach {plan['master_addr']} at ports {plan['master_port']} "
        f"(runner.master_port) and {plan['liveness_port']} (runner.liveness_port), which a "
        "firewall may drop"
    )


def _half_ended(state: RunState, runner: Runner) -> NoReturn:
    """The script of some host ended and nobody said why: the others would wait for it."""
    snapshot = runner.query(state)
    gone = [row.host for row in snapshot.hosts if row.phase.ended]
    ended = next((host for host in state.hosts if host.name in gone), state.hosts[0])
    runner.stop(state)
    raise JobError(
        f"run {state.run_id}: the script ended on {compress(gone)} before every rank had joined. "
        f"The run was stopped\n{last_lines(ended.output)}\n  log: {ended.output}"
    )
