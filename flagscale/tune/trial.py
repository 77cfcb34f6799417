"""One trial: a short run of the experiment with another layout, through its own runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config.actions import ACTIONS
from flagscale.config.arguments.layout_choices import hashable
from flagscale.config.arguments.spec.values import to_word
from flagscale.config.load import load
from flagscale.config.overrides import option_override, parse_override
from flagscale.config.schema import Experiment
from flagscale.launcher import runs
from flagscale.launcher.layout import TUNER_DIRECTORY
from flagscale.launcher.run_commands import stop_run
from flagscale.status import TRIALS_VARIABLE
from flagscale.tune.records import Trial

WARMUP_STEPS = 2
"""First steps of a trial that are not counted: they allocate memory and compile."""
REQUESTS_DIRECTORY = "requests"
"""Directory of requests for further trials, in the directory of a run."""
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
    return to_word(value)


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
    requests = directory / REQUESTS_DIRECTORY
    overrides = [
        *setting_overrides(experiment, trial.setting),
        *(
            f"{experiment.train.key_of(name)}={_word(value)}"
            for name, value in arguments.items()
            if name in given or value is not None or name in ("save", "tensorboard_dir")
        ),
        option_override("experiment.exp_dir", str(directory)),
        *(
            [f"++{option_override(f'experiment.envs.{TRIALS_VARIABLE}', str(requests))}"]
            if can_share_processes(experiment, trial.setting)
            else ()
        ),
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


def can_share_processes(experiment: Experiment, setting: Mapping[str, Any]) -> bool:
    """Return whether the processes that run a layout may run others afterwards: their hosts can
    read requests, and nothing outlives a model in them.
    """
    values = {**experiment.train.values, **setting}
    return experiment.tuner.control.share_processes and not (
        experiment.runner.no_shared_fs
        or values["tp_comm_overlap"]
        or values["optimizer_cpu_offload"]
        or values["cpu_offloading_num_layers"]
        or values["fine_grained_activation_offloading"]
        or values["cuda_graph_impl"] not in (None, "none")
        or values["dpo"]
    )
