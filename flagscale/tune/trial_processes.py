"""Processes in which trials run, one after the other."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from flagscale.config.arguments.layout_choices import ARGUMENTS_OF_GROUPS
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, FlagscaleError, JobError
from flagscale.files import write_json
from flagscale.launcher import actions
from flagscale.launcher.runners.base import Runner, runner_for_experiment
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState
from flagscale.status import BETWEEN_TRIALS
from flagscale.tune.records import CUT_SHORT, FAILED, MEASURED, Timing, Trial, time_steps
from flagscale.tune.trial import ORDERS_DIRECTORY, WARMUP_STEPS, can_share_processes

_LEAST_STEPS = 3
"""Counted steps before a trial may be cut short."""
_MEMORY_WORDS = ("out of memory", "OutOfMemory", "lack of memory", "MemoryError", "oom-kill")


class TrialProcesses:
    """Processes that run trials. Those of one trial also run the next one if it has the same
    process groups: their start takes longer than the trial. Closing ends them.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._stack = ExitStack()
        self._live: _LiveRun | None = None

    def __enter__(self) -> TrialProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the last trial, if they are alive."""
        live, self._live = self._live, None
        stack, self._stack = self._stack, ExitStack()
        with stack:
            if live is not None:
                live.send(None)  # also for ranks that are about to wait
                if live.is_waiting:
                    live.await_end(_END_SECONDS)

    def find(self, setting: Mapping[str, Any]) -> int:
        """Return the number of the trial whose processes can run a layout; 0 without any."""
        live = self._live
        if live is None or not live.is_usable_for(setting):
            return 0
        return live.number

    def run(
        self,
        experiment: Experiment,
        trial: Trial,
        *,
        seconds_limit: float,
        is_hopeless: Callable[[Timing], bool] = lambda _timing: False,
    ) -> Trial:
        """Run a trial and return it with its result.

        Args:
            experiment: The experiment of the trial, see :func:`load_trial`.
            trial: Its record. If ``run`` is set, the processes of :meth:`find` run it.
            seconds_limit: Seconds from its start after which it is ended.
            is_hopeless: Called with the time of the steps so far; True ends the trial.
        """
        log = trial.log
        try:
            if trial.run and self._live is not None:
                self._live.start_next(experiment, trial)
            else:
                self.close()
                # Orders to an earlier run in this directory.
                shutil.rmtree(experiment.exp_dir / ORDERS_DIRECTORY, ignore_errors=True)
                launched = actions.launch_attached(experiment, note=lambda _text: None)
                runner, state = self._stack.enter_context(launched)
                self._live = _LiveRun(runner, state, experiment, trial)
            live = self._live
            log = str(live.state.hosts[0].output)
            result = live.observe(trial, seconds_limit, self._poll_seconds, is_hopeless)
        except JobError as error:
            result = _failed(trial, error.message, log)
        except FlagscaleError as error:
            result = _failed(trial, str(error), log)
        if result.state == FAILED or self._live is None or not self._live.can_go_on:
            self.close()
        return result


class _LiveRun:
    """Run of a trial, and of those that follow it in the same processes."""

    def __init__(
        self, runner: Runner, state: RunState, experiment: Experiment, trial: Trial
    ) -> None:
        self._runner, self.state, self.number = runner, state, trial.number
        self._directory = experiment.exp_dir / ORDERS_DIRECTORY
        self._setting = trial.setting
        self._trials, self._steps = 1, int(experiment.train["exit_interval"])
        self._start_time = time.monotonic()
        self._startup_seconds = 0.0
        self._accepts_trials = can_share_processes(experiment, trial.setting)
        self.is_waiting = self.can_go_on = False

    def is_usable_for(self, setting: Mapping[str, Any]) -> bool:
        """Return whether a layout has the same process groups and optimizer."""
        return all(setting[name] == self._setting[name] for name in ARGUMENTS_OF_GROUPS)

    def start_next(self, experiment: Experiment, trial: Trial) -> None:
        """Start a further trial."""
        self._trials += 1
        self._setting = trial.setting
        self.send(list_program_arguments(experiment))
        self.is_waiting = self.can_go_on = False

    def send(self, arguments: Sequence[str] | None) -> None:
        """Order a trial with these arguments, or the end of the run, if it waits for orders."""
        if not self._accepts_trials:
            return
        number = self._trials + (arguments is None)
        self._directory.mkdir(exist_ok=True, parents=True, mode=0o700)
        write_json(self._directory / f"{number}.json", {"arguments": arguments}, durable=False)

    def await_end(self, seconds: float) -> None:
        """Wait until the run has ended, for at most some seconds."""
        deadline = time.monotonic() + seconds
        while not self._runner.ended(self.state) and time.monotonic() < deadline:
            time.sleep(0.05)

    def observe(
        self,
        trial: Trial,
        seconds_limit: float,
        poll_seconds: float,
        is_hopeless: Callable[[Timing], bool],
    ) -> Trial:
        """Wait for the end of a trial, and return it with its result."""
        state_word, is_overdue = MEASURED, False
        start_time = time.monotonic()
        log = str(self.state.hosts[0].output)
        while True:
            snapshot = self._runner.query(self.state)
            if snapshot.phase.ended:
                snapshot = _settle(lambda: self._runner.query(self.state), snapshot)
                break
            steps = step_seconds(snapshot, self._trials)
            if steps and not self._startup_seconds:
                self._startup_seconds = time.monotonic() - self._start_time
            if self._is_between_trials(snapshot):
                # A snapshot reads the events before the activities.
                snapshot = self._runner.query(self.state)
                self.is_waiting, self.can_go_on = True, self._accepts_trials
                break
            timing = time_steps(steps)
            if timing is not None and timing.steps >= _LEAST_STEPS and is_hopeless(timing):
                state_word = CUT_SHORT
                self.can_go_on = self._accepts_trials and self._ends_soon(timing)
                break
            if time.monotonic() - start_time > seconds_limit:
                is_overdue = True
                break
            time.sleep(poll_seconds)
        steps = step_seconds(snapshot, self._trials)
        result = replace(trial, step_seconds=steps, memory_gib=snapshot.memory_gib, log=log)
        if snapshot.phase in (Phase.FAILED, Phase.LOST):
            reason = snapshot.phase.value
            if snapshot.failure is not None:
                reason = snapshot.failure.headline()
                return _failed(result, reason, log, detail=snapshot.failure.traceback)
            return _failed(result, reason, log)
        if time_steps(steps) is None:
            reason = f"it reported {len(steps) + WARMUP_STEPS} steps or fewer"
            if is_overdue:
                reason += f" in {seconds_limit:g} s (auto_tuner.control.max_time_per_task)"
            return _failed(result, reason, log)
        return replace(result, state=state_word)

    def _is_between_trials(self, snapshot: Snapshot) -> bool:
        """Return whether any rank of each host waits, which it does when all have finished."""
        rows = [row for row in snapshot.hosts if row.ranks]
        return bool(rows) and all(
            row.doing == BETWEEN_TRIALS and row.step == self._trials for row in rows
        )

    def _ends_soon(self, timing: Timing) -> bool:
        """Return whether the rest of a trial takes less time than a start of processes."""
        rest = self._steps - WARMUP_STEPS - timing.steps
        return rest * timing.seconds < self._startup_seconds


def list_program_arguments(experiment: Experiment) -> list[str]:
    """Return the arguments of an experiment's training program.

    Raises:
        ConfigError: They differ between hosts.
    """
    programs = {
        host.program[1:] for host in runner_for_experiment(experiment).plan(experiment).hosts
    }
    if len(programs) > 1:
        raise ConfigError("the hosts have different arguments")
    return list(next(iter(programs)))


_END_SECONDS = 20.0
"""Seconds in which the processes of a trial end when no other follows."""
_SETTLE_SECONDS = 5.0


def _settle(query: Callable[[], Snapshot], snapshot: Snapshot) -> Snapshot:
    """Return the snapshot of a failed run with its first failure, which may be reported late."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while snapshot.phase is Phase.FAILED and snapshot.failure is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
        snapshot = query()
    return snapshot


def _failed(trial: Trial, reason: str, log: str, detail: str = "") -> Trial:
    """Return a failed trial. Its steps do not count, so it is never compared as slow."""
    text = f"{reason}\n{detail}"
    return replace(
        trial,
        state=FAILED,
        step_seconds=(),
        failure=reason.partition("\n")[0],
        ran_out_of_memory=any(word in text for word in _MEMORY_WORDS),
        log=log,
    )


def step_seconds(snapshot: Snapshot, trial: int = 1) -> tuple[float, ...]:
    """Return the seconds of the counted steps of a run so far, of its n-th trial."""
    steps = []
    for events in snapshot.events.values():
        begun = itertools.accumulate(event.event == "ready" for event in events)
        steps += [
            (int(event.get("step")), float(seconds))
            for event, number in zip(events, begun, strict=True)
            if number == trial
            and event.event == "progress"
            and (seconds := event.get_number("step_seconds"))
        ]
    return tuple(seconds for _, seconds in sorted(steps)[WARMUP_STEPS:])
