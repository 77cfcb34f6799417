"""Rules of a whole experiment, applied before anything starts, and the notes of a plan.

Arguments are checked by :mod:`flagscale.config.arguments.check`. An external training program has
rules of its own; only those that hold for any Megatron (ranks and batches divide evenly) apply to
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flagscale.config import schema
from flagscale.config.actions import Purpose
from flagscale.config.arguments.check import check_values
from flagscale.config.arguments.compat.substitutions import note_substitutions
from flagscale.config.arguments.compat.unsupported import UNUSED_EXPERIMENT_KEYS, why_unused
from flagscale.config.arguments.compat.unused import note_unused, unused_note
from flagscale.config.arguments.layout import check_world_size, global_batch_size
from flagscale.config.arguments.rules.adapters import note_adapters
from flagscale.config.arguments.rules.data import check_data_sources, split_shares
from flagscale.config.arguments.rules.optimizer import BOUNDED_VARIABLE, exact_reductions
from flagscale.config.arguments.rules.parallel_layout import check_interleaving
from flagscale.config.arguments.rules.schedule import PLANNED_STEPS, note_unreached_steps, rampup_of
from flagscale.config.arguments.spec.paths import (
    NOT_A_PATH,
    WRITTEN_DIRECTORIES,
    missing_files,
    pseudo_file_system_of,
    why_too_long,
)
from flagscale.config.arguments.spec.registry import aliases
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.arguments.spec.values import why_unfit
from flagscale.config.host_overrides import note_host_overrides
from flagscale.config.model_files import check_vocabulary_size, fill_from_pretrained
from flagscale.config.schema import Experiment, Slurm
from flagscale.config.yaml_file import short_path
from flagscale.errors import Problem


def check_experiment(
    experiment: Experiment, wrong: Sequence[Problem], purpose: Purpose | None
) -> tuple[Experiment, list[Problem]]:
    """Return the experiment, completed from its pretrained model, and its problems.

    Args:
        experiment: as read.
        wrong: problems of single arguments; rules between arguments are checked without any.
        purpose: a launch needs the files that the experiment names, unless hosts check their own.
    """
    experiment, problems = fill_from_pretrained(experiment)
    problems += check_directories(experiment)
    problems += wrong or check_arguments(experiment) or check_vocabulary_size(experiment)
    if purpose == "launch" and not experiment.runner.no_shared_fs:
        missing = check_files(experiment)
        if missing and not (schema.BACKEND_SOURCE / "megatron" / "core").is_dir():
            message = f"there is no adapted Megatron-LM in {short_path(schema.BACKEND_SOURCE)}"
            missing.append(Problem("", message))
        problems += missing
    return experiment, problems


def check_files(experiment: schema.Experiment) -> list[Problem]:
    """Data sets and tokenizers that an experiment names and that are not on this machine.

    An external program may give those arguments another meaning, so nothing is missing for it.
    """
    if experiment.task.external:
        return []
    return [
        Problem(given.key, message, given.place)
        for given in experiment.train
        if why_unfit(str(given.value)) is None
        for message in missing_files(given.name, given.value)
    ]


def check_arguments(experiment: Experiment) -> list[Problem]:
    """Problems that do not depend on the number of ranks."""
    if experiment.task.external:
        return []
    args = experiment.train
    values = MappingProxyType({**args.values, **_default_save_directory(experiment)})
    broken = [*check_values(values), *_check_bounded_environment(experiment, values)]
    problems = [args.problem(name, message) for name, message in dict.fromkeys(broken)]
    by_source = [*check_interleaving(args.values, args.given), *check_data_sources(args.values)]
    return [
        *problems,
        *_check_spelling(args),
        *(args.problem(*violation) for violation in by_source),
    ]


def _default_save_directory(experiment: Experiment) -> dict[str, Any]:
    """Return the default ``save`` directory. ``save: null`` disables saving."""
    return (
        {}
        if "save" in experiment.train.named
        else {"save": str(experiment.exp_dir / "checkpoints")}
    )


def _check_bounded_environment(
    experiment: Experiment, values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Check bounded all_reduces that an environment variable of the ranks requests."""
    envs = experiment.envs
    every = (envs.common, *envs.by_type.values(), *envs.by_host.values())
    if BOUNDED_VARIABLE in [pair for variables in every for pair in variables.items()]:
        yield from exact_reductions(values, "FSCCL_TAIL=bounded of experiment.envs")


def check_directories(experiment: Experiment) -> list[Problem]:
    """Directories that are to be written and lie where the kernel shows itself as files."""
    written: list[tuple[str, Any]] = [
        ("experiment.exp_dir", experiment.exp_dir),
        ("experiment.runner.log_dir", experiment.runner.log_dir),
    ]
    problems = []
    for argument in experiment.train:
        key, name, value = argument.key, argument.name, argument.value
        if name in WRITTEN_DIRECTORIES and name != "load":
            written.append((key, value))
        if name in WRITTEN_DIRECTORIES and isinstance(value, str):
            complaint = None if name == "load" else why_too_long(value)
            if value in NOT_A_PATH and not experiment.task.external:
                complaint = f"expected a directory, found {value!r}; null leaves it out"
            if complaint:
                problems.append(Problem(key, complaint, experiment.sources.get(key)))
    return problems + [
        Problem(
            key,
            f"{path} lies in {kernels}, whose files are the kernel's and no disk's; choose another "
            "directory",
            experiment.sources.get(key),
        )
        for key, path in written
        if path is not None and (kernels := pseudo_file_system_of(str(path))) is not None
    ]


def check_world(experiment: Experiment, world_size: int) -> list[Problem]:
    """Problems of ``world_size`` ranks, as planned, with the layout and the batch sizes."""
    if experiment.task.is_command:
        return []
    args = experiment.train
    broken = check_world_size(args.values, world_size)
    return [args.problem(name, message) for name, message in broken]


def experiment_notes(experiment: Experiment, world_size: int) -> list[str]:
    """Return the notes about an experiment."""
    notes: list[str] = []
    if experiment.task.is_command:
        notes += _note_unused_by_command(experiment)
    elif experiment.task.external:
        notes.append(
            f"{experiment.task.entrypoint.name} is not this project's training program: its own "
            "parser judges the arguments"
        )
    notes += [f"{key} has no effect: {_why_unused_key(key)}" for key in experiment.idle]
    notes += note_host_overrides(experiment)
    if experiment.runner.type != "slurm" and experiment.runner.slurm != Slurm():
        notes.append("experiment.runner.slurm has no effect without type: slurm")
    if not experiment.runner.enable_monitoring:
        notes.append(
            "experiment.runner.enable_monitoring: false has no effect: a run's own agents watch it"
        )
    args = experiment.train
    if not experiment.task.external:
        notes += _note_replaced_and_unused(args)
        notes += _note_filled_arguments(experiment, args)
        notes += _note_null_load(experiment)
        notes += _note_unreached_steps(args, world_size)
    samples = args["train_samples"]
    batch = global_batch_size(args.values, world_size) if samples else 0
    if samples and batch:
        steps, remainder = divmod(samples, batch)
        text = f"{steps} steps: train_samples {samples} / global_batch_size {batch}"
        if grows := rampup_of(args.values):
            steps, remainder = grows.steps(0, samples), 0
            text = f"{steps} steps: train_samples {samples}, the batch grows from {grows.start} to "
            text += f"{grows.final} over {grows.samples}"
        over = f" is not whole: the last {remainder} samples are not used"
        notes.append(text + (over if remainder else ""))
    shares = split_shares(args["split"] or "")
    evaluates = args["eval_iters"] and args["data_path"] and not args["valid_data_path"]
    if shares is not None and evaluates and not shares[1]:
        notes.append(f"no evaluation: split {args['split']} leaves nothing to validate on")
    return notes


def _why_unused_key(key: str) -> str:
    """Why a key of ``experiment`` that is none of the launcher's has no effect."""
    unreferenced = f"no key takes its value from it by ${{{key}}}"
    return UNUSED_EXPERIMENT_KEYS.get(key.removeprefix("experiment."), unreferenced)


def _note_unused_by_command(experiment: Experiment) -> Iterator[str]:
    """Note settings of training in the YAML of a command."""
    config = experiment.resolved
    task = config.get("experiment", {}).get("task", {})
    keys = ["train"] if any((config.get("train") or {}).values()) else []
    keys += ["experiment.task.entrypoint"] if task.get("entrypoint") else []
    if keys:
        have = "has" if len(keys) == 1 else "have"
        yield f"{' and '.join(keys)} {have} no effect: experiment.task.type is command"


def _note_filled_arguments(experiment: Experiment, args: TrainArguments) -> Iterator[str]:
    """The arguments that the model to start from gives."""
    if experiment.filled:
        names = ", ".join(sorted(experiment.filled))
        yield f"{names}: as {args['pretrained_checkpoint']}/config.json says"


def _note_null_load(experiment: Experiment) -> Iterator[str]:
    """Note an explicit ``load: null``, which FlagScale treats as a missing key."""
    for argument in experiment.train.entries:
        if argument.name == "load" and argument.value is None:
            yield (
                f"{argument.key}: null: every start is one from step 0, whatever was saved; "
                "without the key it goes on from the experiment's newest checkpoint"
            )


def _note_unreached_steps(args: TrainArguments, world_size: int) -> Iterator[str]:
    """Note arguments that plan for a step after the end of training."""
    values = args.values
    if any(values[name] for name in PLANNED_STEPS):
        batch = global_batch_size(values, world_size)
        for name, reason in note_unreached_steps(values, batch):
            yield unused_note([args.key_of(name).rpartition(".")[2]], reason)


def _note_replaced_and_unused(args: TrainArguments) -> Iterator[str]:
    """Arguments for which another value is taken, and those that have no effect."""
    values = args.values
    for name, message in note_substitutions(values):
        yield f"{args.key_of(name)}: {message}"
    yield from note_adapters(values)
    for names, reason in note_unused(values, args.given):
        yield unused_note([args.key_of(name).rpartition(".")[2] for name in names], reason)
    for name, alias in aliases().items():
        value = _spelled_value(args, name)
        if alias.rule == "none" and alias.idle is not None and value is alias.idle:
            yield unused_note([name], alias.doc)
    for argument in args:
        why = None if argument.known or argument.value is False else why_unused(argument.name)
        if why:
            yield unused_note([argument.name], why)


def _check_spelling(args: TrainArguments) -> Iterator[Problem]:
    """Megatron-LM's switches that say nothing by themselves must agree with what they stand by."""
    grouped, groups = _spelled_value(args, "group_query_attention"), args["num_query_groups"]
    if grouped is True and groups is None:
        yield args.problem("group_query_attention", "needs num_query_groups")
    elif grouped is False and groups is not None:
        message = f"false contradicts num_query_groups {groups}; remove one"
        yield args.problem("group_query_attention", message)
    learned = args["position_embedding_type"] == "learned_absolute"
    if _spelled_value(args, "no_position_embedding") is True and learned:
        message = "say which instead: `position_embedding_type: rope` or `none`"
        yield args.problem("no_position_embedding", message)


def _spelled_value(args: TrainArguments, name: str) -> Any:
    spelled = args.spelled.get(name)
    return None if spelled is None else spelled.value
