"""How the job of a run stands, from its files and, seldom, from Slurm.

The files that nodes share tell nearly everything. The controller serves thousands, so it is asked
when a look begins and then every half a minute: why a job waits, and whether one that says nothing
lives.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from flagscale.errors import RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.hosts.names import compress
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runners.slurm import files, scheduler
from flagscale.launcher.runners.slurm.reasons import meaning
from flagscale.launcher.runners.slurm.scheduler import Job
from flagscale.launcher.state import HostState, RunState, load_state

ASK_SECONDS = 30.0
_FIRST_SECONDS = 1.0
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
_STOPS = frozenset({"TIMEOUT", "PREEMPTED", "CANCELLED", "DEADLINE"})
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
    ranks' own. ``trouble``: why nobody knows. ``cancelled``: it was ended from outside, ``lost``:
    for want of these nodes. ``suspended``: Slurm lets it rest."""

    lives: bool = False
    waits: str = ""
    trouble: str = ""
    end: str = ""
    cancelled: bool = False
    lost: str = ""
    suspended: bool = False

    @property
    def over(self) -> bool:
        return not (self.lives or self.waits or self.trouble)


@lru_cache(maxsize=512)
def of_run(run_id: str) -> Watch:
    """The watch of a run, one in a process: whoever looks anew does not ask anew."""
    return Watch()


class Watch:
    """Looks at the job of one run."""

    def __init__(self) -> None:
        self.forget()
        self._changed_at = self._asked_at
        self._answer: Job | UnreachableError | None = None
        self._files: tuple[files.Started | None, files.Ended | None] = (None, None)
        self._final: Standing | None = None

    def forget(self) -> None:
        """Ask again at the next look."""
        self._asked_at, self._pause = float("-inf"), _FIRST_SECONDS / 2

    def standing(self, state: RunState) -> Standing:
        """How the job stands now."""
        found = self._final or _written_down(state) or self._look(state)
        self._final = found if found.over else None
        return found

    def _look(self, state: RunState) -> Standing:
        directory, handle = files.of_run(state.exp_dir, state.run_id), state.runner.handle
        begun, ended = files.started(directory), files.ended(directory)
        if ended is not None and begun is not None and ended.start < begun.start:
            ended = None
        final = ended is not None and (not handle.get("requeue") or ended.why in ("", files.STOP))
        if (begun, ended) != self._files:
            # What was answered before is of a start that is over, or of none.
            self._files, self._changed_at = (begun, ended), time.monotonic()
            self.forget()
        told = ended is not None and ended.why != files.CANCELLED
        answer = Job() if final and told else self._ask(state)
        if final and (isinstance(answer, UnreachableError) or not answer.over):
            # It has ended: Slurm says why once it is done with it.
            if isinstance(answer, Job) and time.monotonic() - self._changed_at < ASK_SECONDS:
                return Standing(lives=True)
            return Standing(end=_told(state, _WHYS[files.CANCELLED]), cancelled=True)
        if isinstance(answer, UnreachableError):
            return Standing(trouble=answer.message)
        if not answer.over:
            waits = waiting(state, answer) if answer.waits else ""
            resting = answer.state == "SUSPENDED"
            return Standing(lives=not waits, waits=waits, suspended=resting)
        if ended is not None and told:
            end = _told(state, _WHYS[ended.why]) if ended.why in _WHYS else ""
            return _kept(state, Standing(end=end, cancelled=ended.why == files.TIME))
        return self._explained(state, directory, answer)

    def _ask(self, state: RunState) -> Job | UnreachableError:
        now, last, (begun, ended) = time.monotonic(), self._answer, self._files
        if last is None or now - self._asked_at >= self._pause:
            last = self._answer = ask(state)
            # Slurm takes a moment to find out why a new job waits, and a job that has begun or
            # ended to say so: asked less and less, for that may take long.
            untold = isinstance(last, Job) and (
                not last.reason if last.waits else begun is None or ended is not None
            )
            self._pause = min(self._pause * 2, ASK_SECONDS) if untold else ASK_SECONDS
            self._asked_at = now
        return last

    def _explained(self, state: RunState, directory: Path, answer: Job) -> Standing:
        """Of a job that is over and has not said how, or that was told to end by Slurm."""
        # One that was cancelled before it had nodes has no script that could say anything.
        begun, ended = self._files
        settling = ended is None and (answer.state != "CANCELLED" or begun is not None)
        if settling and processes.wait_until(lambda: bool(files.ended(directory)), _SETTLE_SECONDS):
            self.forget()
            return Standing(lives=True)
        job, name = str(state.runner.handle.get("job", "")), str(state.runner.handle["name"])
        silence = ""
        if answer.state in ("", "CANCELLED") and job:
            try:
                found = scheduler.account(job, name)
                answer = found if found.state and found.over else answer
            except UnreachableError as error:
                silence = "" if answer.state else error.message
        lost = _lost(state) if answer.state == "NODE_FAIL" else ""
        vague = ended is not None and answer.state not in _ENDS
        cancelled = vague or answer.state in _STOPS
        end = _told(state, _WHYS[files.CANCELLED] if vague else _end_of(answer))
        end += f": {lost}" if lost else ""
        if begun is None and not cancelled:
            end += f"; its batch script wrote nothing to {directory}"
            end += ", which nodes have to share with this machine"
        if silence:
            # Not written down: it may be told better later.
            return Standing(end=f"{end}; {silence}", cancelled=cancelled)
        return _kept(state, Standing(end=end, cancelled=cancelled, lost=lost))


def job_of(state: RunState) -> str:
    """The id of the job. A launcher that was killed early has not written it down."""
    handle = state.runner.handle
    return str(handle.get("job") or scheduler.named(str(handle["name"])))


def ask(state: RunState) -> Job | UnreachableError:
    """What Slurm says of the job now."""
    try:
        job = job_of(state)
        return scheduler.look(job, str(state.runner.handle["name"])) if job else Job()
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


def _lost(state: RunState) -> str:
    """The nodes that a job has lost: those that Slurm takes for down, else those that have not said
    how they ended."""
    names = [host.name for host in state.hosts]
    with suppress(UnreachableError):
        if down := scheduler.down(names):
            return compress(down)
    return compress(host.name for host in state.hosts if host.exit() is None) or names[0]


def _written_down(state: RunState) -> Standing | None:
    """How a job ended that was looked at before."""
    known = {n: v for n, v in state.runner.handle.items() if n in ("end", "cancelled", "lost")}
    return Standing(**known) if "end" in known else None


def _told(state: RunState, what: str) -> str:
    return f"job {state.runner.handle.get('job') or state.runner.handle['name']} {what}"


def _kept(state: RunState, found: Standing) -> Standing:
    """How a job ended, which is written down, for Slurm forgets it within minutes."""
    files.forget_secrets(files.of_run(state.exp_dir, state.run_id))
    keep(state, end=found.end, cancelled=found.cancelled, lost=found.lost)
    return found


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
