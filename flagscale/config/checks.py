"""Rules of a whole experiment, applied before anything starts, and the notes of a plan.

``config.load`` calls :func:`check_experiment`; the launcher's plan builder calls
:func:`check_world` and :func:`experiment_notes` once the number of ranks is known. Arguments are
checked by :mod:`flagscale.config.arguments.check`. An external training program has rules of its
own; of the rules here, only those that hold for any Megatron apply to it (ranks and batches divide
evenly).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from flagscale.config import schema
from flagscale.config.actions import Purpose
from flagscale.config.arguments.check import check_values, note_substitutions
from flagscale.config.arguments.compat.flagscale_runner import UNUSED_RUNNER_KEYS, is_gpt_program
from flagscale.config.arguments.compat.names import UNUSED_EXPERIMENT_KEYS, why_unused
from flagscale.config.arguments.compat.unused import note_unused, unused_note
from flagscale.config.arguments.layout import check_world_size, global_batch_size
from flagscale.config.arguments.rules.adapters import note_adapters
from flagscale.config.arguments.rules.data import check_data_sources, split_shares
from flagscale.config.arguments.rules.optimizer import (
    BOUNDED_VARIABLE,
    PLANNED_STEPS,
    drop_unused_schedule,
    exact_reductions,
    note_unreached_steps,
    rampup_of,
)
from flagscale.config.arguments.rules.parallel_layout import check_interleaving
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.paths import (
    BLENDS,
    DATA_PHASES,
    NOT_A_PATH,
    PRETRAINED_CHECKPOINT,
    WRITTEN_DIRECTORIES,
    misnamed_data_sets,
    missing_files,
    pseudo_file_system_of,
    storage_problem,
    why_too_long,
)
from flagscale.config.arguments.spec.registry import aliases
from flagscale.config.arguments.spec.train_arguments import GivenArgument, TrainArguments
from flagscale.config.arguments.spec.values import format_value, why_unfit
from flagscale.config.host_overrides import note_host_overrides
from flagscale.config.model_files import check_vocabulary_size, fill_from_pretrained
from flagscale.config.runners import CLOUD_RUNNERS
from flagscale.config.schema import Environments, Experiment, Slurm
from flagscale.config.tokenizer_checks import check_tokenizer_files
from flagscale.config.yaml_file import short_path
from flagscale.errors import Problem
from flagscale.object_storage import is_address


def check_experiment(
    experiment: Experiment, argument_problems: Sequence[Problem], purpose: Purpose | None
) -> tuple[Experiment, list[Problem]]:
    """Return the experiment, completed from its pretrained model, and its problems.

    Args:
        experiment: Experiment as read from the YAML.
        argument_problems: Problems of single arguments. If there are any, rules that relate
            arguments to each other are not checked.
        purpose: Purpose of the action. A launch requires the files that the experiment names,
            unless each host checks its own.
    """
    experiment, problems = fill_from_pretrained(experiment)
    problems += check_directories(experiment)
    args, shared_fs = experiment.train, not experiment.runner.no_shared_fs
    tokenizer_violations = (
        [] if experiment.task.external else check_tokenizer_files(args.values, shared_fs=shared_fs)
    )
    problems += (
        argument_problems
        or [*check_arguments(experiment), *(args.problem(*v) for v in tokenizer_violations)]
        or check_vocabulary_size(experiment)
    )
    if purpose == "plan" and shared_fs:
        problems += check_data_names(experiment)
    if purpose == "launch" and shared_fs:
        missing = check_files(experiment)
        if missing and not (schema.BACKEND_SOURCE / "megatron" / "core").is_dir():
            message = f"no adapted Megatron-LM in {short_path(schema.BACKEND_SOURCE)}"
            missing.append(Problem("", message))
        problems += missing
    return experiment, problems


def check_files(experiment: Experiment) -> list[Problem]:
    """Return the problems of datasets and tokenizers that do not exist on this machine.

    An external program may give those arguments another meaning, so they are not checked for it.
    """
    if experiment.task.external:
        return []
    return [
        Problem(argument.key, message, argument.location)
        for argument in experiment.train
        if why_unfit(str(argument.value)) is None
        for message in missing_files(argument.name, argument.value)
    ]


def check_data_names(experiment: Experiment) -> list[Problem]:
    """Return the problems of data sets that are missing on this machine, and whose files here show
    which name is meant. Other missing files may be on other machines.
    """
    if experiment.task.external:
        return []
    return [
        Problem(argument.key, message, argument.location)
        for argument in experiment.train
        if argument.name in (*BLENDS, DATA_PHASES) and why_unfit(str(argument.value)) is None
        for message in misnamed_data_sets(argument.name, argument.value)
    ]


def check_arguments(experiment: Experiment) -> list[Problem]:
    """Return the problems of arguments that do not depend on the number of ranks."""
    if experiment.task.external:
        return []
    args = experiment.train
    values = args.values
    if "save" not in args.named:  # `save: null` disables saving
        save = str(experiment.exp_dir / "checkpoints")
        values = MappingProxyType({**values, "save": save})
    violations = [
        *check_values(values),
        *_check_bounded_environment(experiment.envs, values),
        *_check_reach_of_checkpoints(experiment.runner, values),
    ]
    problems = [args.problem(name, message) for name, message in dict.fromkeys(violations)]
    source_violations = [
        *check_interleaving(args.values, args.given),
        *check_data_sources(args.values),
    ]
    problems += _check_switches(args)
    return problems + [args.problem(*violation) for violation in source_violations]


def _check_bounded_environment(
    envs: Environments, values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Check bounded all_reduces that an environment variable of the ranks requests."""
    layers = (envs.common, *envs.by_type.values(), *envs.by_host.values())
    if BOUNDED_VARIABLE in [pair for variables in layers for pair in variables.items()]:
        yield from exact_reductions(values, "FSCCL_TAIL=bounded of experiment.envs")


def _check_reach_of_checkpoints(
    runner: schema.Runner, values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Check that a host which takes the place of another one finds the checkpoints of the run."""
    save = values.get("save")
    if runner.on_bad_host == "stop" or not runner.no_shared_fs or not save or is_address(save):
        return
    yield (
        "save",
        f"with `on_bad_host: {runner.on_bad_host}` and `no_shared_fs: true`, another host could "
        "not read checkpoints on this host's disk: save to object storage (`s3://…`), or set "
        "`save: null` and `non_persistent_save_interval`",
    )


def check_directories(experiment: Experiment) -> list[Problem]:
    """Return the problems of output directories whose names are invalid or that are in a pseudo
    file system such as ``/proc``.
    """
    output_paths: list[tuple[str, Any]] = [
        ("experiment.exp_dir", experiment.exp_dir),
        ("experiment.runner.log_dir", experiment.runner.log_dir),
    ]
    problems = []
    for argument in experiment.train:
        key, name, value = argument.key, argument.name, argument.value
        if name in WRITTEN_DIRECTORIES and name != "load":
            output_paths.append((key, value))
        if name in (*WRITTEN_DIRECTORIES, PRETRAINED_CHECKPOINT) and isinstance(value, str):
            reason = None if name == "load" else why_too_long(value)
            if not experiment.task.external:
                reason = storage_problem(name, value) or reason
            if value in NOT_A_PATH and not experiment.task.external:
                reason = f"expected a directory, found {value!r}; to disable it, use null"
            if reason:
                problems.append(Problem(key, reason, experiment.sources.get(key)))
    return problems + [
        Problem(
            key,
            f"{path} is in {pseudo_file_system}, a pseudo file system of the kernel that stores no "
            "files; choose another directory",
            experiment.sources.get(key),
        )
        for key, path in output_paths
        if path is not None and (pseudo_file_system := pseudo_file_system_of(str(path))) is not None
    ]


def check_world(experiment: Experiment, world_size: int) -> list[Problem]:
    """Return the problems of the parallel layout and the batch sizes with this many ranks."""
    if experiment.task.is_command:
        return []
    args = experiment.train
    values = args.values if experiment.task.external else drop_unused_schedule(args.values)
    violations = check_world_size(values, world_size)
    return [args.problem(name, message) for name, message in violations]


def experiment_notes(experiment: Experiment, world_size: int) -> list[str]:
    """Return the notes of a plan: settings that have no effect, and values that are replaced."""
    task, runner, args = experiment.task, experiment.runner, experiment.train
    notes: list[str] = []
    if task.is_command:
        notes += _note_unused_by_command(experiment)
        notes += _note_shell_syntax(task.command)
    elif task.external:
        notes.append(
            f"{task.entrypoint.name} is not this project's training program: its own parser checks "
            "the arguments"
        )
        notes += _note_unaligned_vocabulary(args.values)
    elif is_gpt_program(text := _entrypoint_text(experiment)):
        notes.append(f"experiment.task.entrypoint: {text} stands for this project's own program")
    notes += [
        f"{key} has no effect: {_why_unused_key(key)}" for key in experiment.unreferenced_keys
    ]
    notes += note_host_overrides(experiment.by_type, experiment.by_host, task.entrypoint)
    if runner.type != "slurm" and runner.slurm != Slurm():
        notes.append("experiment.runner.slurm has no effect without type: slurm")
    if runner.health != "off" and runner.type not in (None, *_RUNNERS_WITH_HEALTH):
        effect = "has no effect"
        if runner.on_bad_host != "stop":
            effect = "checks hosts after a failure, and not before the run,"
        notes.append(
            f"experiment.runner.health: {runner.health} {effect} with type: {runner.type}, "
            "whose hosts are not known before the job starts; `flagscale health --hosts` checks "
            "hosts that SSH reaches"
        )
    if not runner.enable_monitoring:
        notes.append(
            "experiment.runner.enable_monitoring: false has no effect: a run's own agents watch it"
        )
    if not task.external:
        notes += _note_arguments(args, world_size)
        if experiment.filled_arguments:
            names = ", ".join(sorted(experiment.filled_arguments))
            notes.append(f"{names}: taken from {args['pretrained_checkpoint']}/config.json")
    notes += _note_overridden(args)
    notes += _note_steps(args.values, world_size)
    split_fractions = split_shares(args["split"] or "")
    evaluates = args["eval_iters"] and args["data_path"] and not args["valid_data_path"]
    if split_fractions is not None and evaluates and not split_fractions[1]:
        notes.append(f"no evaluation: split {args['split']} reserves no data for validation")
    return notes


def _note_unaligned_vocabulary(values: Values) -> Iterator[str]:
    """Yield a note if the output layer of another training program gets slow matrix products.

    cuBLAS has no fast kernels for 16-bit matrices whose rows do not begin at multiples of 16 bytes.
    This project's own program splits these products (train/layers/unaligned_gemm.py).
    """
    size = values["vocab_size"]
    if not size or not (values["bf16"] or values["fp16"]):
        return
    multiple = values["make_vocab_size_divisible_by"]
    rows = -(-size // (multiple * values["tensor_model_parallel_size"])) * multiple
    if rows % 8:
        yield (
            f"the output layer has {rows:,} rows per rank, which is not a multiple of 8: on a GPU "
            "its matrix products take several times as long; make_vocab_size_divisible_by: 128 "
            "pads the vocabulary"
        )


def _why_unused_key(key: str) -> str:
    """Return why a key of ``experiment`` that the launcher does not have has no effect."""
    unreferenced = f"no key refers to it as ${{{key}}}"
    section, _, name = key.rpartition(".")
    keys = UNUSED_RUNNER_KEYS if section == "experiment.runner" else UNUSED_EXPERIMENT_KEYS
    return keys.get(name, unreferenced)


def _entrypoint_text(experiment: Experiment) -> str:
    """Return the entrypoint as the configuration gives it; empty for the default."""
    task = experiment.resolved.get("experiment", {}).get("task") or {}
    return str(task.get("entrypoint") or "")


_RUNNERS_WITH_HEALTH = ("local", "ssh", *CLOUD_RUNNERS)
"""Runners that check the hardware of their hosts before a run."""
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "ssh"})
"""Programs whose arguments may be shell syntax."""
_OPERATOR = re.compile(r"&&|\|\|?|;|&|\d?(>>?|<)(&\d)?|&>|\S*[^\\];")
_VARIABLE = re.compile(r"\$(\{?[A-Za-z_]\w*|\()")


def _note_shell_syntax(command: Sequence[str]) -> Iterator[str]:
    """Yield a note about words that only a shell would interpret."""
    if _SHELLS.intersection(PurePath(word).name for word in command):
        return
    words = [word for word in command if _OPERATOR.fullmatch(word) or _VARIABLE.search(word)]
    if words:
        shown = ", ".join(f"`{word}`" for word in dict.fromkeys(words[:3]))
        yield (
            f"experiment.task.command: {shown}: passed as typed, because no shell runs the "
            f"command; for a shell write [bash, -c, {shlex.quote(' '.join(command))}]"
        )


def _note_unused_by_command(experiment: Experiment) -> Iterator[str]:
    """Yield a note about settings of training in the YAML of a command."""
    config = experiment.resolved
    task = config.get("experiment", {}).get("task", {})
    keys = ["train"] if any((config.get("train") or {}).values()) else []
    keys += ["experiment.task.entrypoint"] if task.get("entrypoint") else []
    if keys:
        verb = "has" if len(keys) == 1 else "have"
        yield f"{' and '.join(keys)} {verb} no effect: experiment.task.type is command"


def _note_steps(values: Values, world_size: int) -> Iterator[str]:
    """Yield a note with the number of steps if training is limited by samples."""
    train_samples = values["train_samples"]
    batch_size = global_batch_size(values, world_size) if train_samples else 0
    if not train_samples or not batch_size or values["skip_train"]:
        return
    if rampup := rampup_of(values):
        steps, unused_samples = rampup.steps(0, train_samples), 0
        yield (
            f"{steps} steps: train_samples {train_samples}, the batch size grows from "
            f"{rampup.start} to {rampup.final} over {rampup.samples} samples"
        )
        return
    steps, unused_samples = divmod(train_samples, batch_size)
    unused = f" is not an integer: the last {unused_samples} samples are not used"
    yield (
        f"{steps} steps: train_samples {train_samples} / global_batch_size {batch_size}"
        f"{unused if unused_samples else ''}"
    )


def _note_arguments(args: TrainArguments, world_size: int) -> Iterator[str]:
    """Yield notes on arguments whose value is replaced, and on those that have no effect."""
    values, spelled = args.values, args.spelled
    for name, message in note_substitutions(values):
        yield f"{args.key_of(name)}: {message}"
    yield from note_adapters(values)
    unused = list(note_unused(values, args.given))
    if any(values[name] for name in PLANNED_STEPS) and not values["skip_train"]:
        batch_size = global_batch_size(values, world_size)
        unused += [([name], why) for name, why in note_unreached_steps(values, batch_size)]
    for names, reason in unused:
        yield unused_note([args.key_of(name).rpartition(".")[2] for name in names], reason)
    for name, alias in aliases().items():
        has_no_effect = name in spelled and spelled[name].value is alias.noted_value
        if alias.rule == "none" and alias.noted_value is not None and has_no_effect:
            yield unused_note([name], alias.doc)
    for argument in args:
        why = None if argument.known or argument.value is False else why_unused(argument.name)
        if why:
            yield unused_note([argument.name], why)
    for argument in args.entries:
        # FlagScale treats an explicit null like a missing key.
        if argument.name == "load" and argument.value is None:
            yield (
                f"{argument.key}: null: every start begins at step 0 and ignores saved "
                "checkpoints; without this key it resumes from the latest checkpoint of the "
                "experiment"
            )


def _note_overridden(args: TrainArguments) -> Iterator[str]:
    """Yield a note on each argument that does not count because of another one."""
    for unused, used in args.overridden:
        if unused.name != used.name:
            reason = f"{_with_location(used)} is {format_value(used.value)}"
            yield f"{_with_location(unused)} has no effect: {reason}"
            continue
        yield (
            f"{_with_location(used)}: {format_value(used.value)} is used, not "
            f"{format_value(unused.value)} of {_with_location(unused)}: the last one counts"
        )


def _with_location(argument: GivenArgument) -> str:
    return f"{argument.key} ({argument.location})" if argument.location else argument.key


def _check_switches(args: TrainArguments) -> Iterator[Problem]:
    """Yield the problems of Megatron-LM's switches that contradict the arguments they belong to."""
    values_by_name = {name: argument.value for name, argument in args.spelled.items()}
    uses_query_groups = values_by_name.get("group_query_attention")
    if uses_query_groups is True and args["num_query_groups"] is None:
        yield args.problem("group_query_attention", "needs num_query_groups")
    has_learned_positions = args["position_embedding_type"] == "learned_absolute"
    if values_by_name.get("no_position_embedding") is True and has_learned_positions:
        message = "does not select a position embedding: set `position_embedding_type: rope` or "
        yield args.problem("no_position_embedding", f"{message}`none`")
