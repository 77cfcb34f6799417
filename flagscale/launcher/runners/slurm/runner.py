"""The verbs of a runner, for a run that is one job of Slurm's.

What the job's nodes write, this machine reads: they share the file system that ``exp_dir`` is on.
So Slurm is asked only what files cannot tell, see :mod:`.watch`, and nothing is asked of nodes.
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
from flagscale.hosts.names import compress, expand_list
from flagscale.hosts.processes import Swept
from flagscale.launcher.layout import SCRIPT_FILE
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runners.base import Prepared, Texts
from flagscale.launcher.runners.slurm import files, scheduler, watch
from flagscale.launcher.runners.slurm.job import TYPE, plan_of
from flagscale.launcher.state import (
    RunState,
    alive_message,
    keep_plan,
    load_state,
    start_lock,
    state_of,
)

if TYPE_CHECKING:
    from flagscale.launcher.snapshot import EventReader, Snapshot
    from flagscale.launcher.stop_result import Stopped

# What a job takes beside runner.stop_grace to end once it is told, and once it is killed.
_ENDING_SECONDS = 20.0
_KILLING_SECONDS = 120.0
_POLL_SECONDS = 0.25
# While a job ends Slurm is asked more often, for as long as somebody waits for it.
_ENDING_POLL_SECONDS = 3.0
_STOPPED = 128 + signal.SIGTERM
_RESTS = "Slurm has suspended the job"
# Nodes begin at the same time, unless one is still being prepared.
_MOMENT_SECONDS = 3.0


class SlurmRunner:
    """Starts, watches and ends runs as jobs."""

    def __init__(self) -> None:
        self._reader: EventReader | None = None

    def close(self) -> None:
        """Nothing is held open."""

    # -- before a run ---------------------------------------------------------------------------

    def plan(self, experiment: Experiment) -> LaunchPlan:
        made = plan_of(experiment)
        given = [name for name in scheduler.DEFAULTS if name in os.environ]
        notes = [f"{name}={os.environ[name]} of this shell: sbatch takes it" for name in given]
        return replace(made, notes=(*made.notes, *notes))

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[Prepared]:
        from flagscale.launcher.runners.slurm.checks import check_job

        made = self.plan(experiment)
        yield Prepared(made, check_job(experiment, made, fresh=fresh) if checking else [])

    # -- start ----------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan, texts: Texts, *, foreground: bool) -> RunState:
        """Submit the job of a plan. In the foreground, too, the job is no child of this process:
        what ends with it is ended by :meth:`stop`."""
        layout = plan.layout
        if plan.job is None:
            raise RunStateError("this plan has no job; was it made by another runner?")
        with start_lock(layout):
            previous = load_state(layout.state)
            if previous is not None and previous.runner.type == TYPE:
                _refuse_beside(previous)
            directory = files.of_run(plan.exp_dir, plan.run_id)
            self._write(plan, texts, previous, directory)
            state = state_of(plan)
            # Saved before Slurm is asked: a launch that dies here leaves a job that has a name.
            state.save(layout.state)
            try:
                job = scheduler.submit(plan.job.command, str(plan.runner.handle["name"]))
            except scheduler.RefusedError as error:
                files.forget_secrets(directory)
                if previous is not None:
                    previous.save(layout.state)
                else:
                    layout.state.unlink(missing_ok=True)
                problem = Problem("experiment.runner.slurm", f"Slurm refuses the job: {error}")
                raise ConfigError(problem) from None
            except KeyboardInterrupt:
                say(f"stopping run {state.run_id}: Slurm was asked for its job already")
                self.stop(state)
                raise
            handle = {**state.runner.handle, "job": job}
            state = replace(state, runner=RunnerHandle(TYPE, handle))
            state.save(layout.state)
        print(f"submitted job {job} for {len(state.hosts)} node(s)", file=sys.stderr, flush=True)
        return state

    def _write(
        self, plan: LaunchPlan, texts: Texts, previous: RunState | None, directory: Path
    ) -> None:
        """The scripts, and what is beside them."""
        from flagscale.launcher.planning.script import render

        keep_plan(plan, texts.config, texts.overrides)
        named = bool(plan.runner.handle.get("named"))
        files.write(plan, directory, named=named)
        for host in plan.hosts:
            write_atomic(host.script, render(plan, host), mode=0o700, durable=False)
        if plan.job is not None:
            write_atomic(plan.job.file, plan.job.script, mode=0o700)
        for old in previous.hosts if previous is not None else ():
            old.set_output_aside()

    def await_hosts(self, state: RunState) -> RunState:
        """Wait until Slurm has given the job its nodes, and tell why it has not. Raises
        :class:`JobError` for a job that ends before."""
        directory = files.of_run(state.exp_dir, state.run_id)
        told = ""
        while files.started(directory) is None:
            now = watch.of_run(state.run_id).standing(state)
            if now.over:
                code = _STOPPED if now.cancelled else 1
                raise JobError(f"run {state.run_id} has not started: {now.end}", exit_code=code)
            text = now.waits or (now.trouble and f"{now.trouble}; the job may wait or run")
            if text and text != told and "(" in text:
                say(text)
                told = text
            time.sleep(_POLL_SECONDS)
        watch.of_run(state.run_id).forget()
        return self._named(state)

    # -- watch ----------------------------------------------------------------------------------

    def _named(self, state: RunState) -> RunState:
        """The state with the names of the nodes that the job has been given, if it has."""
        begun = files.started(files.of_run(state.exp_dir, state.run_id))
        if begun is None or len(begun.nodes) != len(state.hosts):
            return state
        pairs = zip(state.hosts, begun.nodes, strict=True)
        hosts = tuple(replace(host, name=name) for host, name in pairs)
        handle = {**state.runner.handle, "job": begun.job}
        named = replace(state, hosts=hosts, runner=RunnerHandle(TYPE, handle))
        if named != state:
            watch.keep(state, hosts, job=begun.job)
        return named

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        from flagscale.launcher.snapshot import EventReader, Seen, take

        state = self._named(state)
        standing = watch.of_run(state.run_id).standing(state)
        if standing.cancelled and state.stop_requested is None:
            state = replace(state, stop_requested=time.time())
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        alive, waits = "script" if standing.lives else "", standing.waits
        if alive and state.runner.handle.get("requeue") and self._over_somewhere(state):
            # Told as an end, it would be taken for the last one.
            waits = f"job {state.runner.handle.get('job', '')} is ending, and may be started again"
        look = Seen(alive=alive, trouble=standing.trouble, waits=waits)
        seen = dict.fromkeys(range(len(state.hosts)), look)
        taken = take(state, seen, self._reader, with_lines=with_lines)
        late = _RESTS if standing.suspended else _not_begun(state) if standing.lives else ""
        more = (standing.end, late)
        taken = replace(taken, warnings=(*filter(None, more), *taken.warnings))
        return _failed(state, taken, standing.lost) if standing.lost else taken

    def bring_output(self, state: RunState) -> None:
        self._named(state)

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        if any_host and self._over_somewhere(state):
            return True
        return watch.of_run(state.run_id).standing(state).over

    def _over_somewhere(self, state: RunState) -> bool:
        return any(host.exit() is not None for host in state.hosts)

    def rank_count(self, state: RunState) -> int:
        from flagscale.launcher.liveness.diagnosis import rank_logs

        ranks = ((host, rank) for host in state.hosts for rank in host.ranks)
        return sum(bool(rank_logs(host, rank, "stdout.log")) for host, rank in ranks)

    def wait(self, state: RunState) -> int:
        from flagscale.launcher.failures import first_failure, job_code

        while not (standing := watch.of_run(state.run_id).standing(state)).over:
            time.sleep(_POLL_SECONDS)
        state = self._named(state)
        exits = [host.exit() for host in state.hosts]
        code = job_code(state, exits, first_failure(state, {})) or 0
        if code or None not in exits:
            return code or bool(standing.lost)
        ended = files.ended(files.of_run(state.exp_dir, state.run_id))
        code = ended.code if ended is not None else 0
        return code or (_STOPPED if standing.cancelled else 1)

    # -- stop -----------------------------------------------------------------------------------

    def stop(self, state: RunState) -> Stopped:
        """End the job: one that waits is cancelled; one that runs saves and ends within
        ``stop_grace``, or is cancelled then. Raises :class:`UnreachableError` where Slurm does not
        answer: the job may live on."""
        from flagscale.launcher.stop_result import Stopped, record_stop

        state = self._named(state)
        watch.of_run(state.run_id).forget()
        standing = watch.of_run(state.run_id).standing(state)
        if standing.over:
            return Stopped()
        if standing.trouble:
            raise _unreachable(state, standing.trouble)
        stopping = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping)
        job = watch.job_of(state)
        began = time.monotonic()
        try:
            gently = self._tell(state, job, standing)
            if not gently:
                scheduler.cancel(job)
                self._until_over(state, _KILLING_SECONDS)
        except UnreachableError as error:
            raise _unreachable(state, error.message) from None
        if not watch.of_run(state.run_id).standing(state).over:
            raise RunStateError(
                f"run {state.run_id} of {state.name}: job {job} was cancelled, and Slurm still "
                "shows it as ending",
                hint=f"squeue -j {job} tells when it is gone",
            )
        if unrecorded is not None:
            unrecorded = record_stop(stopping)
        late = time.monotonic() - began >= state.stop_grace and not standing.waits
        return Stopped(self._swept(state, late=late), unrecorded=unrecorded)

    def _tell(self, state: RunState, job: str, standing: watch.Standing) -> bool:
        """Have a running job save and end; whether it did in time."""
        if standing.waits or standing.suspended:
            return False
        with suppress(OSError):
            (files.of_run(state.exp_dir, state.run_id) / "stop").touch(mode=0o600)
        scheduler.cancel(job, "USR1")
        return self._until_over(state, state.stop_grace + _ENDING_SECONDS)

    def _until_over(self, state: RunState, seconds: float) -> bool:
        """Wait for the job's end, for so long at most; whether it came."""
        asked = float("-inf")

        def over() -> bool:
            nonlocal asked
            if time.monotonic() - asked >= _ENDING_POLL_SECONDS:
                asked = time.monotonic()
                watch.of_run(state.run_id).forget()
            return watch.of_run(state.run_id).standing(state).over

        return processes.wait_until(over, seconds)

    def _swept(self, state: RunState, *, late: bool) -> dict[str, Swept]:
        """What was ended on each node; ``late``: what the agents had to end had no more time."""
        found = {}
        for host in state.hosts:
            with suppress(OSError):
                swept = tuple(host.exit_record().get("swept", ())) if late else ()
                found[host.name] = Swept(killed=swept)
        return found


def _failed(state: RunState, taken: Snapshot, lost: str) -> Snapshot:
    """A run that has lost nodes: the ranks of the others were told to end, as by a stop."""
    from flagscale.launcher.liveness.diagnosis import Failure
    from flagscale.launcher.snapshot import Phase

    reason = "was lost: Slurm took it for down and ended the job"
    first = next((host for host in state.hosts if host.name in expand_list(lost)), state.hosts[0])
    failure = taken.failure or Failure(first.name, None, None, reason, "", first.output)
    return replace(taken, phase=Phase.FAILED, failure=failure, exit_code=taken.exit_code or 1)


def _not_begun(state: RunState) -> str:
    """Which nodes have not begun while others wait for them, once that is more than a moment."""
    directory = files.of_run(state.exp_dir, state.run_id)
    silent = (h for h in state.hosts if not (h.run_dir / SCRIPT_FILE).exists())
    late = [host.name for host in silent if host.exit() is None]
    with suppress(OSError):
        late_by = time.time() - (directory / files.NODES).stat().st_mtime
        if 0 < len(late) < len(state.hosts) and late_by > _MOMENT_SECONDS:
            why = f"Slurm still prepares it, or it does not share {state.exp_dir} with the others"
            return f"{compress(late)} has not begun: {why}"
    return ""


def _refuse_beside(previous: RunState) -> None:
    """Raise :class:`RunStateError` where the run before lives, and :class:`UnreachableError` where
    nobody knows."""
    standing = watch.of_run(previous.run_id).standing(previous)
    if standing.trouble:
        raise _unreachable(previous, standing.trouble)
    if not standing.over:
        message, hint = alive_message(previous)
        raise RunStateError(message, hint=hint)


def _unreachable(state: RunState, trouble: str) -> UnreachableError:
    return UnreachableError(
        f"run {state.run_id} of {state.name} may live: {trouble}", hint="try again once it answers"
    )
