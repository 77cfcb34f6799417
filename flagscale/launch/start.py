"""Waiting until a run that was just started has really started.

A program of ours reports ``joined`` from every rank. One that reports nothing counts as started
once all its rank processes exist and have lived for a few seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn

from flagscale.errors import JobError
from flagscale.launch import processes
from flagscale.launch.failures import first_failure, last_lines
from flagscale.launch.planning.folding import fold
from flagscale.launch.runners.base import Runner
from flagscale.launch.snapshot import EventReader
from flagscale.launch.state import RunState

FOREIGN_SECONDS = 3.0
# torchrun needs a moment to see that a rank failed, and to write its table.
_FAILURE_SECONDS = 5.0
_SCAN_SECONDS = 0.25


@dataclass
class _Foreign:
    """Watches the rank processes of a program that reports nothing."""

    state: RunState
    runner: Runner
    checked: float = 0.0
    since: float | None = None

    def started(self) -> bool:
        now = time.monotonic()
        if now - self.checked < _SCAN_SECONDS:
            return False
        self.checked = now
        if self.runner.rank_count(self.state) < self.state.world_size:
            self.since = None
        elif self.since is None:
            self.since = now
        return self.since is not None and now - self.since >= FOREIGN_SECONDS


def wait_until_started(state: RunState, runner: Runner, timeout: float) -> str:
    """Return what was seen once every rank has started.

    Raises :class:`JobError` with the first failure when the run ends or a rank fails before, and
    when ``timeout`` seconds pass; the run is ended then.
    """
    reader = EventReader(state.hosts)
    foreign = _Foreign(state, runner)
    began = time.monotonic()
    seen = ""

    def settled() -> bool:
        nonlocal seen
        events = reader.refresh()
        if runner.ended(state, any_host=True) or reader.ranks("failed"):
            return True
        if len(reader.ranks("joined")) >= state.world_size:
            seen = f"{state.world_size} rank(s) joined in {time.monotonic() - began:.1f} s"
        elif state.foreign and not events and foreign.started():
            seen = f"{state.world_size} rank process(es) are running"
        return bool(seen)

    finished_in_time = processes.wait_until(settled, timeout)
    if seen:
        return seen
    if not finished_in_time:
        raise _too_late(state, runner, reader, timeout)
    return _ended_early(state, runner, reader)


def _ended_early(state: RunState, runner: Runner, reader: EventReader) -> str:
    """The run ended, or a rank failed, before all had joined."""
    everywhere = processes.wait_until(lambda: runner.ended(state), _FAILURE_SECONDS)
    failure = first_failure(state, reader.refresh())
    if failure is None and everywhere:
        code = runner.wait(state)
        if code == 0:
            return "the job has ended already, with exit code 0"
        raise JobError(_describe_end(state, code), exit_code=1)
    if failure is None and reader.ranks("failed"):
        return "a rank reported a failure, but the job goes on"
    if failure is None:
        _half_ended(state, runner)
    raise JobError(f"run {state.run_id} failed: {failure.describe()}", exit_code=1)


def _half_ended(state: RunState, runner: Runner) -> NoReturn:
    """The script of some host ended and nobody said why: the others would wait for it."""
    snapshot = runner.query(state)
    gone = [row.host for row in snapshot.hosts if row.phase.ended]
    ended = next((host for host in state.hosts if host.name in gone), state.hosts[0])
    runner.stop(state)
    raise JobError(
        f"run {state.run_id}: the script ended on {fold(gone)} before every rank had joined. "
        f"The run was stopped\n{last_lines(ended.output)}\n  log: {ended.output}"
    )


def _describe_end(state: RunState, code: int) -> str:
    host = state.hosts[0]
    text = f"run {state.run_id} ended with exit code {code} before its ranks had started"
    return f"{text}\n{last_lines(host.output)}\n  log: {host.output}"


def _too_late(state: RunState, runner: Runner, reader: EventReader, timeout: float) -> JobError:
    missing = sorted(set(range(state.world_size)) - reader.ranks("joined"))
    runner.stop(state)
    shown = ", ".join(map(str, missing[:10])) + (" …" if missing[10:] else "")
    return JobError(
        f"run {state.run_id}: not every rank joined within {timeout:g} s; missing: {shown}. "
        f"The run was stopped\n  log: {state.hosts[0].output}",
        hint="raise experiment.runner.start_timeout if the start just takes longer",
    )
