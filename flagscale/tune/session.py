"""A search with its trials, from its records to its answer."""

from __future__ import annotations

from dataclasses import replace

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.tune.records import (
    CUT_SHORT,
    FAILED,
    RUNNING,
    Timing,
    Trial,
    TrialRecords,
    time_steps,
)
from flagscale.tune.search import Decision, Search
from flagscale.tune.space import Layout, SearchProblem, Space
from flagscale.tune.trial import WARMUP_STEPS, end_leftover, load_trial
from flagscale.tune.trial_processes import TrialProcesses


def run_search(
    experiment: Experiment, problem: SearchProblem, space: Space, records: TrialRecords
) -> tuple[Search, str]:
    """Run trials until the search ends. Return the search, and the reason of its end.

    An interruption ends the running trial, and is raised.
    """
    end_interrupted(experiment, records)
    if records.trials:
        log_line(f"{len(records.trials)} trials in {records.directory} count")
    tuner = experiment.tuner
    with TrialProcesses(tuner.control.interval) as processes:
        while True:
            search = Search(problem, space, tuner, records.trials)
            decision = search.decide(
                sum(trial.seconds for trial in records.trials),
                lambda layout: processes.find_reusable(layout.setting) is not None,
            )
            if decision.layout is None:
                return search, decision.reason
            # A repeat also measures the difference between processes.
            setting = decision.layout.setting
            run = None if decision.is_repeat else processes.find_reusable(setting)
            trial = _run(experiment, problem, records, search, decision, processes, run or 0)
            if trial.state == FAILED and trial.run:
                # A failure in processes that ran another layout does not prove anything.
                records.forget(trial)
                log_line(f"[{trial.number}] failed: {trial.failure}; again in new processes")
                trial = _run(experiment, problem, records, search, decision, processes)
            records.finish(trial)
            _print_end(trial, search)


def end_interrupted(experiment: Experiment, records: TrialRecords) -> None:
    """End the processes that a killed search has left, and forget the trial that they ran."""
    for trial in records.trials[-1:]:
        if end_leftover(experiment, trial):
            log_line(f"trial {trial.number} of an earlier search was alive, and was ended")
        if trial.state == RUNNING:
            records.forget(trial)


def _run(
    experiment: Experiment,
    problem: SearchProblem,
    records: TrialRecords,
    search: Search,
    decision: Decision,
    processes: TrialProcesses,
    run: int = 0,
) -> Trial:
    """Run a trial that has been decided; ``run`` as in :class:`.Trial`."""
    assert decision.layout is not None
    trial = records.start(decision.layout.setting, run)
    _print_start(trial, search, decision.layout, is_repeat=decision.is_repeat)
    try:
        return _measure(experiment, problem, trial, search, processes, is_repeat=decision.is_repeat)
    except BaseException:
        processes.close()
        records.forget(trial)
        raise


def _measure(
    experiment: Experiment,
    problem: SearchProblem,
    trial: Trial,
    search: Search,
    processes: TrialProcesses,
    *,
    is_repeat: bool,
) -> Trial:
    control = experiment.tuner.control
    is_first = not search.results
    try:
        run = load_trial(
            experiment,
            trial,
            problem.values["global_batch_size"],
            control.train_iters + WARMUP_STEPS,
            checking=is_first,
        )
    except ConfigError as error:
        return replace(trial, state=FAILED, failure=str(error).partition("\n")[0])
    return processes.run_trial(
        run,
        trial,
        seconds_limit=control.max_time_per_task * (2 if is_first else 1),
        # A repeat is whole, also if it is slower than the first trial of the same layout.
        is_hopeless=_never if is_repeat else search.is_hopeless,
    )


def _never(_timing: Timing) -> bool:
    return False


def _print_start(trial: Trial, search: Search, layout: Layout, *, is_repeat: bool) -> None:
    if is_repeat:
        log_line(f"[{trial.number}] {layout.key}: again, to measure the noise")
        return
    if search.fastest is None:
        log_line(f"[{trial.number}] {layout.key}: the fastest by calculation")
        return
    expectation = search.expect(layout)
    low, high = expectation.interval
    log_line(
        f"[{trial.number}] {layout.key}: expected {expectation.seconds:.3g} s/step "
        f"({low:.3g} to {high:.3g})"
    )


def _print_end(trial: Trial, search: Search) -> None:
    if trial.state == FAILED:
        log_line(f"[{trial.number}] failed: {trial.failure}")
        return
    timing = time_steps(trial.step_seconds)
    assert timing is not None
    low, high = timing.interval
    text = f"{timing.seconds:.4g} s/step ({low:.4g} to {high:.4g})"
    best = search.fastest
    if trial.state == CUT_SHORT:
        text += f", ended after {timing.steps} steps: slower than the best"
    elif best is None or timing.seconds < best.timing.seconds:
        text += ", the best so far"
    log_line(f"[{trial.number}] {text}")
