"""``flagscale rerun``: start a run again with its recorded configuration.

The configuration is the one that the run was started with, not the present YAML. It starts in a
new directory, because a run in the old one would continue from the checkpoints there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flagscale.config.actions import Purpose
from flagscale.config.load import load
from flagscale.config.overrides import assigned_keys
from flagscale.config.schema import OWN_PROGRAM, PROJECT, Experiment, Options
from flagscale.config.secrets import HIDDEN, redact_overrides
from flagscale.config.sweeps import EXP_DIR
from flagscale.errors import ConfigError, Problem, RunStateError
from flagscale.files import read_json
from flagscale.launcher import actions, preview, runs
from flagscale.launcher.code_version import describe_code_changes, read_code_versions
from flagscale.launcher.launch_record import LaunchRecord, Rerun, read_launch_record
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import RunState
from flagscale.launcher.sweep_runs import find_best, find_sweep
from flagscale.object_storage import is_address

_ENTRYPOINT = "experiment.task.entrypoint"
_SUFFIX = re.compile(r"_rerun_\d+$")
_DIRECTORY_ARGUMENTS = ("save", "load", "tensorboard_dir", "wandb_save_dir", "profile_dir")
"""Arguments that name directories of a run, to which it writes or from which it continues."""


@dataclass(frozen=True)
class _RecordedConfig:
    """Recorded configuration of a run. ``hidden_keys`` are the dotted keys of its secrets, which
    were not recorded.
    """

    state: RunState
    file: Path
    record: LaunchRecord | None
    hidden_keys: Sequence[str] = ()
    sections: Sequence[str] = ()
    """Top-level keys that are sections."""
    has_entrypoint: bool = False
    """True if ``experiment.task.entrypoint`` is set, for a task that is no command."""


def find_run_to_repeat(text: str, *, best: bool) -> RunState:
    """Return the run that a text names; with ``best`` the best run of the sweep that it names.

    Raises:
        ConfigError: the text names a sweep and ``best`` is not set, or the other way round; or no
            run of the sweep is the best.
        RunStateError: there is no such run.
    """
    sweep = find_sweep(text)
    if sweep is None:
        if best:
            raise ConfigError(f"--best: {text} is not the directory of a sweep")
        return runs.require_run(text)
    if not best:
        raise ConfigError(
            f"{text} is a sweep of {len(sweep.runs)} runs",
            hint=f"--best takes its best run; or name one, such as {sweep.runs[0].exp_dir}",
        )
    sweep.query()
    best_run = find_best(sweep.runs)
    if best_run is None or best_run.run.state is None:
        raise ConfigError(f"{text}: no completed run of the sweep has a loss, so none is the best")
    print(best_run.describe(), flush=True)
    return best_run.run.state


def rerun(state: RunState, overrides: Sequence[str], *, only_plan: bool = False) -> int:
    """Start a run again and return the exit code; with ``only_plan`` print the plan instead.

    Raises:
        ConfigError: the configuration was not recorded, has secrets that are not known here, or is
            not right any more.
    """
    recorded = _read_recorded(state)
    given_keys = assigned_keys(overrides)
    for section in recorded.sections:
        if section in given_keys:
            raise ConfigError(
                f"{section}={given_keys[section]}: the recorded configuration is composed, so "
                "another file of a config group cannot be chosen",
                hint=f"override keys, such as {section}.KEY=VALUE; or start the YAML: flagscale "
                "run YAML",
            )
    secret_overrides = list(_secret_overrides(recorded, given_keys))
    added_overrides = [] if EXP_DIR in given_keys else [f"{EXP_DIR}={_new_directory(state)}"]
    present_directory = Path.cwd()
    if recorded.record is not None and Path(recorded.record.directory).is_dir():
        # Relative paths refer to it.
        os.chdir(recorded.record.directory)
    program_overrides = _program_overrides(recorded, given_keys)
    all_overrides = [*secret_overrides, *program_overrides, *added_overrides, *overrides]
    purpose: Purpose = "plan" if only_plan else "launch"
    experiment = load(recorded.file.parent, recorded.file.name, all_overrides, purpose).experiment
    config_file = recorded.file
    if recorded.record is not None:
        config_file = Path(recorded.record.config_file)
    experiment = replace(
        experiment, config_file=config_file, overrides=(*added_overrides, *overrides)
    )
    _refuse_directories_of(state, experiment, {key.rpartition(".")[2] for key in given_keys})
    repeated = _repeated_run(recorded, experiment)
    lines = list(_describe(recorded, experiment, repeated, overrides, secret_overrides))
    if Path.cwd() != present_directory:
        lines.insert(1, f"  in:        {Path.cwd()}, to which relative paths refer")
    print("\n".join(lines), flush=True)
    if only_plan:
        options = Options(action="dryrun")
        return preview.print_dry_run(experiment, options, launch_record=repeated.record)
    return actions.run_experiment(experiment, Options(action="run"), rerun=repeated)


def _repeated_run(recorded: _RecordedConfig, experiment: Experiment) -> Rerun:
    """Return the run that is repeated: with its record, if this process runs its copy of the code
    (:func:`.code_snapshot.continue_in_snapshot`).
    """
    record, state = recorded.record, recorded.state
    if not experiment.runner.snapshot or record is None or not _is_snapshot(record):
        return Rerun(state.run_id)
    file = Layout(state.exp_dir).run_files(state.run_id).changes
    changes = file.read_text(encoding="utf-8") if file.is_file() else ""
    return Rerun(state.run_id, record, changes)


def _is_snapshot(record: LaunchRecord) -> bool:
    """Return True if this process runs the copy of this project that a run has recorded."""
    return record.snapshot is not None and Path(record.snapshot.project) == PROJECT


def _program_overrides(recorded: _RecordedConfig, given_keys: Mapping[str, str]) -> Iterator[str]:
    """Yield the override that names the program in the copies of the code: the recorded path is
    that of the code itself.
    """
    record = recorded.record
    if record is None or record.snapshot is None or not _is_snapshot(record):
        return
    if not recorded.has_entrypoint or _ENTRYPOINT in given_keys:
        return
    program, snapshot = OWN_PROGRAM, record.snapshot
    if snapshot.program:
        program = Path(snapshot.copy, Path(snapshot.program).relative_to(snapshot.origin))
    yield f"{_ENTRYPOINT}={program}"


def _read_recorded(state: RunState) -> _RecordedConfig:
    """Return the recorded configuration of a run.

    Raises:
        ConfigError: it was not recorded, or is gone.
    """
    layout = Layout(state.exp_dir)
    file = layout.run_files(state.run_id).composed
    if not file.is_file():
        if (read_json(layout.plan) or {}).get("run_id") == state.run_id and layout.config.is_file():
            message = "was started by a version that did not record what a rerun needs"
        else:
            message = f"has no recorded configuration: {file} does not exist"
        raise ConfigError(
            f"run {state.run_id} {message}", hint="start it from its YAML: flagscale run YAML"
        )
    config = _read_yaml(file)
    return _RecordedConfig(
        state,
        file,
        read_launch_record(layout, state.run_id),
        hidden_keys=list(_hidden_keys(config)),
        sections=[key for key, value in config.items() if isinstance(value, dict)],
        has_entrypoint=_has_entrypoint(config),
    )


def _has_entrypoint(config: Mapping[Any, Any]) -> bool:
    experiment = config.get("experiment")
    task = experiment.get("task") if isinstance(experiment, dict) else None
    return (
        isinstance(task, dict)
        and task.get("type") != "command"
        and task.get("entrypoint") is not None
    )


def _read_yaml(file: Path) -> dict[Any, Any]:
    import yaml

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunStateError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunStateError(f"{file} is damaged")
    return config


def _hidden_keys(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _hidden_keys(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        if any(True for item in value for _ in _hidden_keys(item, key)):
            yield key
    elif isinstance(value, str) and HIDDEN in value:
        yield key


def _secret_overrides(recorded: _RecordedConfig, given_keys: Mapping[str, str]) -> Iterator[str]:
    """Yield overrides with the secrets of ``experiment.envs`` as this environment has them.

    Raises:
        ConfigError: with every secret that is neither in the environment nor overridden.
    """
    problems = []
    for key in recorded.hidden_keys:
        name = key.rpartition(".")[2]
        if key in given_keys:
            continue
        if key.startswith("experiment.envs.") and name in os.environ:
            yield f"{key}=${{oc.env:{name}}}"  # never read as Hydra's syntax, or shown
            continue
        where = f"set {name} in the environment, or " if "experiment.envs." in key else ""
        message = f"is a secret, which was not recorded: {where}give {key}=VALUE"
        problems.append(Problem(key, message))
    if problems:
        raise ConfigError(problems)


def _new_directory(state: RunState) -> Path:
    """Return the directory for a rerun: that of the run with ``_rerun_1``, or the next number."""
    base = _SUFFIX.sub("", state.exp_dir.name)
    number = 1
    while (directory := state.exp_dir.with_name(f"{base}_rerun_{number}")).exists():
        number += 1
    return directory


def _refuse_directories_of(
    state: RunState, experiment: Experiment, overridden_names: Container[str]
) -> None:
    """Refuse a rerun in its own directory that uses directories of the run that it repeats.

    ``overridden_names`` are the last parts of the keys that the rerun overrides.
    """
    if experiment.exp_dir == state.exp_dir:
        return
    problems = []
    save = experiment.train.given.get("save")
    # A run loads from the address to which it saves, so the new run would continue the other one.
    if isinstance(save, str) and is_address(save) and "save" not in overridden_names:
        message = f"{save} has the checkpoints of the run that is started again"
        problems.append(experiment.train.problem("save", message))
    for name in _DIRECTORY_ARGUMENTS:
        value = experiment.train.given.get(name)
        if isinstance(value, str) and is_address(value):
            continue
        if isinstance(value, str) and Path(value).absolute().is_relative_to(state.exp_dir):
            message = f"{value} is in the directory of the run that is started again"
            problems.append(experiment.train.problem(name, message))
    if problems:
        hint = f"override it, or continue the run there with {EXP_DIR}={state.exp_dir}"
        raise ConfigError(problems, hint=hint)


def _describe(
    recorded: _RecordedConfig,
    experiment: Experiment,
    repeated: Rerun,
    overrides: Sequence[str],
    secret_overrides: Sequence[str],
) -> Iterator[str]:
    """Yield lines about what is started, and about what differs from the recorded start."""
    state, record = recorded.state, recorded.record
    yield f"rerun of {state.run_id} of {state.name}, with its recorded configuration"
    if overrides:
        yield f"  overrides: {' '.join(redact_overrides(overrides))}"
    if Layout(experiment.exp_dir).state.exists():
        yield f"  directory: {experiment.exp_dir}, where it continues the earlier run"
    else:
        yield f"  directory: {experiment.exp_dir} (new: nothing is continued)"
    names = [override.partition("=")[0].rpartition(".")[2] for override in secret_overrides]
    if names:
        yield f"  secrets:   {', '.join(names)} from the environment; they were not recorded"
    if record is None:
        return
    if record.directory != os.getcwd():  # noqa: PTH109 - the text is compared
        yield f"  note: its working directory, {record.directory}, does not exist any more"
    from flagscale import __version__

    if record.version != __version__:
        yield f"  differs: flagscale was {record.version}, and is {__version__}"
    if repeated.record is not None:
        yield f"  code:      the copy of then, {PROJECT}"
        return
    if record.snapshot is not None:
        yield "  note: its copy of the code is not used"
    for sentence in describe_code_changes(
        record.code, read_code_versions(experiment.task, experiment.exp_dir)
    ):
        yield f"  differs: {sentence}"
