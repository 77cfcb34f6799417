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
from flagscale.errors import ConfigError, FlagscaleError
from flagscale.files import write_json
from flagscale.launcher import actions
from flagscale.launcher.runners.base import Runner, runner_for_experiment
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState
from flagscale.status import BETWEEN_TRIALS
from flagscale.tune.records import CUT_SHORT, FAILED, MEASURED, Timing, Trial, time_steps
from flagscale.tune.trial import REQUESTS_DIRECTORY, WARMUP_STEPS, can_share_processes

_MIN_STEPS_BEFORE_CUT = 3
"""Steps after the warm-up before a trial may be cut short."""
_END_SECONDS = 20.0
"""Seconds in which waiting processes end when no trial follows. Then they are killed."""
_FAILURE_REPORT_SECONDS = 5.0
"""Seconds in which the hosts of a failed run agree on its first failure."""
_MEMORY_WORDS = ("out of memory", "OutOfMemory", "lack of memory", "MemoryError", "oom-kill")
"""Words of failures whose reason is a lack of memory of a device or a host."""


class TrialProcesses:
    """The processes of the last trial. They also run the next one if it has the same process
    groups and optimizer, because their start takes longer than a trial. Closing ends them.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._stack = ExitStack()
        self._live: _LiveProcesses | None = None

    def __enter__(self) -> TrialProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the last trial, if they are alive."""
        live, self._live = self._live, None
        stack, self._stack = self._stack, ExitStack()
        with stack:  # its end kills the processes that are alive then
            if live is not None:
                # Ranks that are about to wait read the request as well.
                live.request_end()
                if live.is_waiting:
                    live.await_end(_END_SECONDS)

    def find_reusable(self, setting: Mapping[str, Any]) -> int | None:
        """Return the number of the trial that started the live processes, if they can run a
        layout; None if new processes are needed.
        """
        live = self._live
        return live.first_number if live is not None and live.can_run(setting) else None

    def run_trial(
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
            trial: Its record. ``run`` is the result of :meth:`find_reusable`, whose processes run
                it then, or 0 for new processes.
            seconds_limit: Seconds from its start after which it is ended.
            is_hopeless: Called with the time of the steps so far; True ends the trial.
        """
        log = trial.log
        try:
            if trial.run:
                live = self._live
                assert live is not None and live.first_number == trial.run
                live.start_next(experiment, trial)
            else:
                live = self._start(experiment, trial)
            log = live.log
            result = live.observe(trial, seconds_limit, self._poll_seconds, is_hopeless)
        except FlagscaleError as error:
            result = _failed(trial, error.message, log)
        if result.state == FAILED or self._live is None or not self._live.can_run_next:
            self.close()
        return result

    def _start(self, experiment: Experiment, trial: Trial) -> _LiveProcesses:
        """Start new processes for a trial, after the end of those of the last one."""
        self.close()
        # Requests to an earlier run in this directory must not reach the new ranks.
        shutil.rmtree(experiment.exp_dir / REQUESTS_DIRECTORY, ignore_errors=True)
        launched = actions.launch_attached(experiment, note=lambda _text: None)
        runner, state = self._stack.enter_context(launched)
        self._live = _LiveProcesses(runner, state, experiment, trial)
        return self._live


class _LiveProcesses:
    """Processes of one launch, which run its trial and those that follow in them.

    Attributes:
        first_number: Number of the trial that started them. It names their directory, so it stays
            when other trials follow.
        is_waiting: True if the ranks have finished the current trial and wait for a request.
        can_run_next: True if a further trial can be requested: the ranks wait, or will soon.
        log: Output of the first host.
    """

    def __init__(
        self, runner: Runner, state: RunState, experiment: Experiment, trial: Trial
    ) -> None:
        self._runner, self._state = runner, state
        self.first_number, self.log = trial.number, str(state.hosts[0].output)
        self._requests = experiment.exp_dir / REQUESTS_DIRECTORY
        self._accepts_requests = can_share_processes(experiment, trial.setting)
        self._launch_time = time.monotonic()
        self._startup_seconds: float | None = None
        """Seconds from the launch to the first step after the warm-up."""
        self._ordinal = 0
        """Number of the current trial among those of these processes, from 1."""
        self._begin(experiment, trial)

    def _begin(self, experiment: Experiment, trial: Trial) -> None:
        self._ordinal += 1
        self._setting = trial.setting
        self._total_steps = int(experiment.train["exit_interval"])
        self.is_waiting = self.can_run_next = False

    def can_run(self, setting: Mapping[str, Any]) -> bool:
        """Return whether a layout has the same process groups and optimizer."""
        return all(setting[name] == self._setting[name] for name in ARGUMENTS_OF_GROUPS)

    def start_next(self, experiment: Experiment, trial: Trial) -> None:
        """Start a further trial.

        Raises:
            ConfigError: Its arguments differ between hosts. The ranks still wait.
        """
        self._write_request(list_program_arguments(experiment))
        self._begin(experiment, trial)

    def request_end(self) -> None:
        """Let the ranks end after the current trial."""
        self._write_request(None)

    def _write_request(self, arguments: Sequence[str] | None) -> None:
        """Write the request that follows the current trial, if the ranks read requests. Ranks of
        layouts whose models cannot be freed read none, and end after their trial.
        """
        if self._accepts_requests:
            self._requests.mkdir(exist_ok=True, parents=True, mode=0o700)
            path = self._requests / f"{self._ordinal + 1}.json"
            write_json(path, {"arguments": arguments}, durable=False)

    def await_end(self, seconds: float) -> None:
        """Wait until the processes have ended, for at most some seconds."""
        deadline = time.monotonic() + seconds
        while not self._runner.ended(self._state) and time.monotonic() < deadline:
            time.sleep(0.05)

    def observe(
        self,
        trial: Trial,
        seconds_limit: float,
        poll_seconds: float,
        is_hopeless: Callable[[Timing], bool],
    ) -> Trial:
        """Wait for the end of the current trial, and return it with its result."""
        outcome, is_overdue = MEASURED, False
        start_time = time.monotonic()
        while True:
            snapshot = self._query()
            if snapshot.phase.ended:
                snapshot = self._await_failure_report(snapshot)
                break
            if self._is_between_trials(snapshot):
                # A snapshot reads the steps before the activities, so it may lack the last ones.
                snapshot = self._query()
                self.is_waiting, self.can_run_next = True, self._accepts_requests
                break
            timing = time_steps(self._list_step_seconds(snapshot))
            if timing is not None and timing.steps >= _MIN_STEPS_BEFORE_CUT and is_hopeless(timing):
                outcome = CUT_SHORT
                self.can_run_next = self._accepts_requests and self._ends_soon(timing)
                break
            if time.monotonic() - start_time > seconds_limit:
                is_overdue = True
                break
            time.sleep(poll_seconds)
        return self._make_result(
            trial, snapshot, outcome, seconds_limit=seconds_limit if is_overdue else None
        )

    def _query(self) -> Snapshot:
        snapshot = self._runner.query(self._state)
        if self._startup_seconds is None and self._list_step_seconds(snapshot):
            self._startup_seconds = time.monotonic() - self._launch_time
        return snapshot

    def _list_step_seconds(self, snapshot: Snapshot) -> tuple[float, ...]:
        return list_step_seconds(snapshot, self._ordinal)

    def _await_failure_report(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot of a failed run with its first failure, on which its hosts may agree
        after its end.
        """
        deadline = time.monotonic() + _FAILURE_REPORT_SECONDS
        while snapshot.phase is Phase.FAILED and snapshot.failure is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
            snapshot = self._query()
        return snapshot

    def _is_between_trials(self, snapshot: Snapshot) -> bool:
        """Return whether all ranks have finished the current trial.

        A rank waits as soon as all have freed their memory, so one waiting rank per host suffices.
        The step of a waiting rank is the number of trials that it has finished.
        """
        rows = [row for row in snapshot.hosts if row.ranks]
        return bool(rows) and all(
            row.doing == BETWEEN_TRIALS and row.step == self._ordinal for row in rows
        )

    def _ends_soon(self, timing: Timing) -> bool:
        """Return whether the rest of a trial takes less time than a start of processes."""
        remaining_steps = self._total_steps - WARMUP_STEPS - timing.steps
        startup_seconds = self._startup_seconds
        return startup_seconds is not None and remaining_steps * timing.seconds < startup_seconds

    def _make_result(
        self, trial: Trial, snapshot: Snapshot, outcome: str, *, seconds_limit: float | None
    ) -> Trial:
        """Return a trial with its result.

        Enough steps are a measurement, no matter why there are no more: the trial may be over its
        limit, or a user may have stopped its run. ``seconds_limit`` is None for a trial in time.
        """
        steps = self._list_step_seconds(snapshot)
        result = replace(
            trial, step_seconds=steps, memory_gib=snapshot.memory_gib, log=self.log, state=outcome
        )
        if snapshot.phase in (Phase.FAILED, Phase.LOST):
            failure = snapshot.failure
            if failure is None:
                return _failed(result, snapshot.phase.value, self.log)
            return _failed(result, failure.headline(), self.log, detail=failure.traceback)
        if time_steps(steps) is None:
            reason = f"it reported {len(steps) + WARMUP_STEPS} steps or fewer"
            if seconds_limit is not None:
                reason += f" in {seconds_limit:g} s (auto_tuner.control.max_time_per_task)"
            return _failed(result, reason, self.log)
        return result


def list_program_arguments(experiment: Experiment) -> list[str]:
    """Return the arguments of an experiment's training program.

    Raises:
        ConfigError: They differ between hosts.
    """
    plan = runner_for_experiment(experiment).plan(experiment)
    arguments_of_hosts = {host.program[1:] for host in plan.hosts}
    if len(arguments_of_hosts) > 1:
        raise ConfigError("the hosts have different arguments")
    return list(next(iter(arguments_of_hosts)))


def _failed(trial: Trial, reason: str, log: str, detail: str = "") -> Trial:
    """Return a trial as failed, without its steps: a failed layout is not a slow one."""
    text = f"{reason}\n{detail}"
    return replace(
        trial,
        state=FAILED,
        step_seconds=(),
        failure=reason.partition("\n")[0],
        ran_out_of_memory=any(word in text for word in _MEMORY_WORDS),
        log=log,
    )


def list_step_seconds(snapshot: Snapshot, ordinal: int) -> tuple[float, ...]:
    """Return the seconds of the steps after the warm-up that a trial has reported so far.

    Args:
        snapshot: Snapshot of the processes.
        ordinal: Number of the trial among those of these processes, from 1.
    """
    steps = []
    for events in snapshot.events.values():
        # A rank reports "ready" once per trial, before its first step.
        ordinals = itertools.accumulate(event.event == "ready" for event in events)
        steps += [
            (int(event.get("step")), float(seconds))
            for event, event_ordinal in zip(events, ordinals, strict=True)
            if event_ordinal == ordinal
            and event.event == "progress"
            and (seconds := event.get_number("step_seconds"))
        ]
    # One rank reports all steps, so the first ones are the warm-up.
    return tuple(seconds for _, seconds in sorted(steps)[WARMUP_STEPS:])
