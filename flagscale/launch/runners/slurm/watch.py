"""How the job of a run stands, from its files and, seldom, from Slurm.

The files that nodes share tell nearly everything. The controller serves thousands, so it is asked
when a look begins and then every half a minute: why a job waits, and whether one that says nothing
lives.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.errors import RunStateError, UnreachableError
from flagscale.launch.layout import Layout
from flagscale.launch.planning.model import RunnerHandle
from flagscale.launch.runners.slurm import files, scheduler
from flagscale.launch.runners.slurm.reasons import meaning
from flagscale.launch.runners.slurm.scheduler import Job
from flagscale.launch.state import HostState, RunState, load_state

ASK_SECONDS = 30.0
_UNTOLD_SECONDS = 2.0
# A job that says nothing and has just ended may be about to: files take a moment to be seen.
_SETTLE_SECONDS = 2.0

_ENDS = {
    "TIMEOUT": "came to its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted",
    "OUT_OF_MEMORY": "was killed for want of memory",
    "CANCELLED": "was cancelled",
    "BOOT_FAIL": "failed since a node did not boot",
    "DEADLINE": "missed its deadline",
}
_WHYS = {
    files.TIME: "came to its time limit; its ranks were told to save before",
    files.CANCELLED: "was ended by Slurm: cancelled, preempted, or at its time limit",
    "requeued": "was started by Slurm more often than slurm.requeue allows",
    "disk": "could not write to its directory",
    "port": "found no port that is free on its first node",
}


@dataclass(frozen=True)
class Standing:
    """How a job stands: it ``waits`` (why), ``lives``, or is over, with the ``end`` that is not the
    ranks' own. ``trouble``: why nobody knows. ``cancelled``: it was ended from outside."""

    lives: bool = False
    waits: str = ""
    trouble: str = ""
    end: str = ""
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return not (self.lives or self.waits or self.trouble)


class Watch:
    """Looks at the job of one run."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._answer: Job | UnreachableError | None = None
        self._begun: files.Started | None = None
        self._final: Standing | None = None

    def forget(self) -> None:
        """Ask again at the next look."""
        self._asked_at = float("-inf")

    def standing(self, state: RunState) -> Standing:
        """How the job stands now."""
        if self._final is None:
            found = self._look(state)
            if found.over:
                self._final = found
            return found
        return self._final

    def _look(self, state: RunState) -> Standing:
        directory, handle = files.of_run(state.exp_dir, state.run_id), state.runner.handle
        if (kept := handle.get("end")) is not None:
            return Standing(end=str(kept), cancelled=bool(handle.get("cancelled")))
        begun, ended = files.started(directory), files.ended(directory)
        if ended is not None and begun is not None and ended.start < begun.start:
            ended = None
        if ended is not None and (not handle.get("requeue") or ended.why in ("", files.STOP)):
            return _of(ended, state)
        if begun != self._begun:
            # What was answered before is of a start that is over.
            self._begun = begun
            self.forget()
        answer = self._ask(state)
        if isinstance(answer, UnreachableError):
            return Standing(trouble=answer.message)
        if not answer.over:
            waits = waiting(state, answer) if answer.waits else ""
            return Standing(lives=not waits, waits=waits)
        return _of(ended, state) if ended is not None else self._vanished(state, directory, answer)

    def _ask(self, state: RunState) -> Job | UnreachableError:
        now, last = time.monotonic(), self._answer
        # Slurm takes a moment to find out why a new job waits, and a job that has begun to say so.
        untold = isinstance(last, Job) and not (last.reason if last.waits else self._begun)
        if last is None or now - self._asked_at >= (_UNTOLD_SECONDS if untold else ASK_SECONDS):
            self._answer, self._asked_at = ask(state), now
        return self._answer or Job()

    def _vanished(self, state: RunState, directory: Path, answer: Job) -> Standing:
        """Of a job that is over and has not said how."""
        # One that was cancelled before it had nodes has no script that could say anything.
        silent = answer.state == "CANCELLED" and files.started(directory) is None
        if not silent and not self._settled(directory):
            self.forget()
            return Standing(lives=True)
        job, name = str(state.runner.handle.get("job", "")), str(state.runner.handle["name"])
        silence = ""
        if not answer.state and job:
            try:
                answer = scheduler.account(job, name)
            except UnreachableError as error:
                silence = error.message
        end = f"job {job or name} {_end_of(answer)}"
        cancelled = answer.state == "CANCELLED"
        if files.started(directory) is None and not cancelled:
            end += (
                f"; its batch script wrote nothing to {directory}, which nodes have to share with "
                "this machine"
            )
        if silence:
            # Not written down: it may be told better later.
            return Standing(end=f"{end}; {silence}")
        return _kept(state, end, cancelled=cancelled)

    def _settled(self, directory: Path) -> bool:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while files.ended(directory) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return files.ended(directory) is None


def ask(state: RunState) -> Job | UnreachableError:
    """What Slurm says of the job now."""
    handle = state.runner.handle
    name = str(handle["name"])
    try:
        # A launcher that was killed in between has not written down the id.
        job = str(handle.get("job") or scheduler.named(name))
        return scheduler.look(job, name) if job else Job()
    except UnreachableError as error:
        return error


def _end_of(answer: Job) -> str:
    """How a job ended by Slurm's account of it."""
    if not answer.state:
        return "is not known to Slurm any more and has left no word"
    by = f" {answer.reason}" if answer.reason.startswith("by ") else ""
    if answer.state in _ENDS:
        return _ENDS[answer.state] + by
    return f"ended as {answer.state}" + (f" ({answer.reason})" if answer.reason else "")


def _of(ended: files.Ended, state: RunState) -> Standing:
    job = state.runner.handle.get("job", "")
    what = _WHYS.get(ended.why, "")
    cancelled = ended.why in (files.TIME, files.CANCELLED)
    return _kept(state, f"job {job} {what}" if what else "", cancelled=cancelled)


def _kept(state: RunState, end: str, *, cancelled: bool) -> Standing:
    """How a job ended, which is written down, for Slurm forgets it within minutes."""
    files.forget_secrets(files.of_run(state.exp_dir, state.run_id))
    keep(state, end=end, cancelled=cancelled)
    return Standing(end=end, cancelled=cancelled)


def keep(state: RunState, hosts: tuple[HostState, ...] = (), **more: object) -> None:
    """Write down what is known of a job, and of its ``hosts``, unless another run has taken this
    one's place."""
    path = Layout(state.exp_dir).state
    # A disk that is full, or a state that is damaged: then it is told now, at least.
    with suppress(OSError, RunStateError):
        now = load_state(path)
        if now is not None and now.run_id == state.run_id:
            handle = {**now.runner.handle, **more}
            runner = RunnerHandle(now.runner.type, handle)
            replace(now, runner=runner, hosts=hosts or now.hosts).save(path)


def waiting(state: RunState, job: Job) -> str:
    """Why a job has not started, and when it may."""
    number = state.runner.handle.get("job", "")
    told = ": ".join(text for text in (job.reason, meaning(job.reason)) if text)
    why = f" ({told})" if told else ""
    return f"job {number} is pending{why}" + (f"; it may start at {job.start}" if job.start else "")
