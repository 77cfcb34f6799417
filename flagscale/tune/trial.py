"""One trial: a short run of the experiment with another layout, through its own runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.actions import ACTIONS
from flagscale.config.arguments.layout_choices import hashable
from flagscale.config.load import load
from flagscale.config.overrides import option_override, parse_override
from flagscale.config.schema import Experiment
from flagscale.errors import FlagscaleError, JobError
from flagscale.launcher import actions, runs
from flagscale.launcher.layout import TUNER_DIRECTORY
from flagscale.launcher.run_commands import stop_run
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.tune.records import CUT_SHORT, FAILED, MEASURED, Timing, Trial, time_steps

WARMUP_STEPS = 2
"""First steps of a trial that are not counted: they allocate memory and compile."""
_LEAST_STEPS = 3
"""Counted steps before a trial may be cut short."""
_MEMORY_WORDS = ("out of memory", "OutOfMemory", "lack of memory", "MemoryError", "oom-kill")
QUIET_ARGUMENTS: Mapping[str, Any] = {
    "log_interval": 1,
    "eval_iters": 0,
    **dict.fromkeys(("eval_prompts", "eval_tasks", "best_metric", "early_stopping_patience")),
    **dict.fromkeys(("save", "load", "save_interval", "export_huggingface", "export_peft")),
    **dict.fromkeys(("non_persistent_save_interval", "non_persistent_ckpt_type")),
    **dict.fromkeys(("replication", "replication_jump")),
    **dict.fromkeys(("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project")),
    **dict.fromkeys(("swanlab_project", "metrics_sinks")),
    **dict.fromkeys(("save_best", "profile", "record_memory_history"), False),
}
"""Arguments with which a run does nothing but train."""


def setting_overrides(experiment: Experiment, setting: Mapping[str, Any]) -> list[str]:
    """Return the overrides that give an experiment a layout: only values that its YAML does not
    have.
    """
    train = experiment.train
    return [
        f"{train.key_of(name)}={_word(value)}"
        for name, value in setting.items()
        if hashable(train[name]) != value
    ]


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_with(experiment: Experiment, overrides: Sequence[str], purpose: Any) -> Experiment:
    """Load the YAML of an experiment again with further overrides.

    Raises:
        ConfigError: It is wrong with them.
    """
    file = experiment.config_file
    own = [text for text in experiment.overrides if not _is_action(text)]
    return load(file.parent, file.name, [*own, *overrides], purpose).experiment


def _is_action(text: str) -> bool:
    override = parse_override(text)
    return override is not None and override.key in ("action", *ACTIONS["auto_tune"].options)


def load_trial(
    experiment: Experiment, trial: Trial, batch: int, steps: int, *, checking: bool
) -> Experiment:
    """Load the experiment of a trial: the layout, a directory of its own, and only some steps."""
    arguments = {**QUIET_ARGUMENTS, "global_batch_size": batch, "exit_interval": steps}
    given = experiment.train.given
    directory = trial_directory(experiment, trial)
    overrides = [
        *setting_overrides(experiment, trial.setting),
        *(
            f"{experiment.train.key_of(name)}={_word(value)}"
            for name, value in arguments.items()
            if name in given or value is not None or name in ("save", "tensorboard_dir")
        ),
        option_override("experiment.exp_dir", str(directory)),
        "experiment.runner.max_restarts=0",
        *(["~experiment.runner.notify"] if experiment.runner.notify is not None else ()),
        *([] if checking else ["experiment.runner.preflight=false"]),
    ]
    return load_with(experiment, overrides, "launch")


def trial_directory(experiment: Experiment, trial: Trial) -> Path:
    return experiment.exp_dir / TUNER_DIRECTORY / trial.directory


def end_leftover(experiment: Experiment, trial: Trial) -> bool:
    """End the run of a trial whose search was killed; return whether it was alive.

    Raises:
        FlagscaleError: It may be alive on hosts that do not answer.
    """
    state = runs.find_in_directory(trial_directory(experiment, trial))
    return state is not None and stop_run(state) is None


def run_trial(
    experiment: Experiment,
    trial: Trial,
    *,
    seconds_limit: float,
    poll_seconds: float,
    is_hopeless: Callable[[Timing], bool] = lambda _timing: False,
) -> Trial:
    """Run a trial and return it with its result.

    Args:
        experiment: The experiment of the trial, see :func:`load_trial`.
        trial: Its record.
        seconds_limit: Seconds from its start after which it is ended.
        poll_seconds: Seconds between two looks at it.
        is_hopeless: Called with the time of the steps so far; True ends the trial.
    """
    snapshot: Snapshot | None = None
    state_word, is_overdue, log = MEASURED, False, ""
    start_time = time.monotonic()
    try:
        with actions.launch_attached(experiment, note=lambda _text: None) as (runner, state):
            log = str(state.hosts[0].output)
            while True:
                snapshot = runner.query(state)
                if snapshot.phase.ended:
                    snapshot = _settle(lambda: runner.query(state), snapshot)
                    break
                timing = time_steps(step_seconds(snapshot))
                if timing is not None and timing.steps >= _LEAST_STEPS and is_hopeless(timing):
                    state_word = CUT_SHORT
                    break
                if time.monotonic() - start_time > seconds_limit:
                    is_overdue = True
                    break
                time.sleep(poll_seconds)
    except JobError as error:
        return _failed(trial, error.message, log)
    except FlagscaleError as error:
        return _failed(trial, str(error), log)
    steps = step_seconds(snapshot)
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


def step_seconds(snapshot: Snapshot) -> tuple[float, ...]:
    """Return the seconds of the counted steps of a run so far."""
    events = [
        (int(event.get("step")), float(seconds))
        for rank_events in snapshot.events.values()
        for event in rank_events
        if event.event == "progress" and (seconds := event.get_number("step_seconds"))
    ]
    return tuple(seconds for _, seconds in sorted(events)[WARMUP_STEPS:])
