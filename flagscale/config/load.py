"""From a configuration's files and overrides to a checked :class:`Experiment`.

Every problem is collected, so that one run of the launcher tells all that is wrong, each with its
place, its key, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flagscale.config import schema
from flagscale.config.actions import ACTIONS, Purpose
from flagscale.config.arguments import paths
from flagscale.config.arguments.flatten import collisions, leaves
from flagscale.config.arguments.maps import as_words
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.arguments.values import MAX_NAME, size, unfit
from flagscale.config.checks import check_arguments, check_places
from flagscale.config.compose import composed, config_file, hydra_alone
from flagscale.config.experiment_reader import (
    check_command,
    read_commands,
    read_environments,
    read_runner,
    read_task,
)
from flagscale.config.host_overrides import (
    read_specifics,
    specific_problems,
    with_absolute_paths,
    without_arguments,
)
from flagscale.config.interpolation import referred
from flagscale.config.overrides import SUBSECTIONS, TOP_LEVEL, sections_of
from flagscale.config.pretrained import filled
from flagscale.config.reader import Reader
from flagscale.config.resolve import resolve
from flagscale.config.sources import trace
from flagscale.config.tokenizers import too_few_tokens
from flagscale.config.yaml_file import short
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig

_QUICKSTART = "`make data` (tools/data/quickstart.py) makes the quickstart's data and tokenizer"
_BACKEND = (
    "`make backend` (tools/patch/unpatch.py --backend Megatron-LM) fetches and adapts the training "
    "backend"
)


class Loaded(NamedTuple):
    """What a command line asks for, checked."""

    options: schema.Options
    experiment: schema.Experiment


def load(
    directory: Path, name: str, overrides: Sequence[str], purpose: Purpose | None = None
) -> Loaded:
    """The options and the experiment of a configuration in a directory, each file read once.

    Without a ``purpose`` that of the configuration's action decides. Raises ConfigError with
    every problem.
    """
    sources = trace(config_file(directory, name), overrides)
    with hydra_alone():
        config, problems = composed(sources)
        del config["hydra"]
        reader = Reader(sources, problems, _referred(config))
        try:
            data = resolve(config, sources)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from error
    _check_top_level(reader, data)
    found = reader.fields(schema.Options, data, "", others=True)
    options = schema.Options(**found)
    if purpose is None:
        # What an unknown action would need is unknown; any other is better than a run's all.
        unknown = "action" not in found and data.get("action") is not None
        purpose = "find" if unknown else ACTIONS[options.action].purpose
    experiment = _read_experiment(reader, data)
    if purpose != "find":
        experiment, disagreeing = filled(experiment)
        reader.problems += disagreeing
        _check(reader, experiment, purpose)
    problems = reader.causes()
    if problems:
        raise ConfigError(problems, hint=_hint(problems))
    return Loaded(options, experiment)


def _referred(config: DictConfig) -> frozenset[str]:
    """The keys that interpolations refer to, and the sections that these are in."""
    from omegaconf import OmegaConf

    keys = (key.split(".") for key in referred(OmegaConf.to_container(config)))
    return frozenset(".".join(parts[:end]) for parts in keys for end in range(1, len(parts) + 1))


def _check(reader: Reader, experiment: schema.Experiment, purpose: Purpose | None) -> None:
    reader.problems += check_places(experiment)
    reader.problems += _train_problems(reader, experiment) or too_few_tokens(experiment)
    # Where files are not shared, the hosts are asked instead.
    if purpose != "launch" or experiment.runner.no_shared_fs:
        return
    missing = missing_paths(experiment)
    if missing and not (schema.BACKEND_SOURCE / "megatron" / "core").is_dir():
        message = f"there is no adapted Megatron-LM in {short(schema.BACKEND_SOURCE)}"
        missing.append(Problem("", message))
    reader.problems += missing


def _hint(problems: Sequence[Problem]) -> str | None:
    asked = {"data/quickstart/": _QUICKSTART, "no adapted Megatron-LM": _BACKEND}
    hints = [
        hint for text, hint in asked.items() if any(text in problem.message for problem in problems)
    ]
    return "\n  hint: ".join(hints) or None


def missing_paths(experiment: schema.Experiment) -> list[Problem]:
    """Data sets and tokenizers that an experiment names and that are not on this machine.

    A external program may give those arguments another meaning, so nothing is missing for it.
    """
    if experiment.task.external:
        return []
    places = experiment.sources
    return [
        Problem(key, message, places.get(key))
        for key, name, value in leaves(experiment.train.sections(), "train.")
        if unfit(str(value)) is None
        for message in paths.missing(name, value)
    ]


def _check_top_level(reader: Reader, data: Mapping[Any, Any]) -> None:
    known = [*TOP_LEVEL, *schema.documented(schema.Options)]
    for name in data:
        own = name in reader.referred
        if name not in known and name not in schema.SPECIFIC_SECTIONS and not own:
            reader.unknown(str(name), name, [*known, *schema.SPECIFIC_SECTIONS])


def _read_experiment(reader: Reader, data: Mapping[Any, Any]) -> schema.Experiment:
    """The experiment, unchecked between its values. Where its name or directory cannot be read,
    which is noted, others stand in, so that the rest can be checked."""
    given = reader.mapping(data, "experiment")
    prefix = "experiment."
    own = {key: value for key, value in given.items() if key not in (*SUBSECTIONS, "envs")}
    elsewhere = {
        key: f"{prefix}{section}.{key}"
        for section, kind in SUBSECTIONS.items()
        for key in schema.documented(kind)
    }
    found = reader.fields(
        schema.Experiment, own, prefix, beside=sections_of(""), elsewhere=elsewhere
    )
    if complaint := _unfit_name(found.get("name", "")):
        reader.problem("experiment.exp_name", complaint)
    task = read_task(reader, reader.mapping(given, "task", prefix))
    runner = read_runner(reader, reader.mapping(given, "runner", prefix))
    check_command(reader, task, runner)
    envs = read_environments(reader, reader.mapping(given, "envs", prefix))
    cmds = read_commands(reader, reader.mapping(given, "cmds", prefix))
    by_type, by_host = (
        read_specifics(reader, data, section, external=task.external)
        for section in schema.SPECIFIC_SECTIONS
    )
    if task.is_command:
        # Of the arguments of training it gets none, so that the YAML of one will do.
        train = schema.Train()
        by_type, by_host = without_arguments(by_type), without_arguments(by_host)
    else:
        train = _read_train(reader, reader.mapping(data, "train"), task.external)
    return schema.Experiment(
        name=found.get("name", ""),
        exp_dir=found.get("exp_dir", Path.cwd()),
        task=task,
        runner=runner,
        envs=envs,
        cmds=cmds,
        train=train,
        config_file=reader.sources.file,
        by_type=by_type,
        by_host=by_host,
        overrides=reader.sources.overrides,
        resolved=data,
        sources=reader.sources.places,
        idle=tuple(reader.idle),
    )


def _unfit_name(name: str) -> str | None:
    """Why a name cannot be shown in one line of a terminal, nor be a file's."""
    odd = next((character for character in name if not character.isprintable()), None)
    if odd is not None:
        return f"expected printable text, found the character {odd!a}"
    if size(name) > MAX_NAME:
        return f"is {size(name):,} bytes long; expected at most {MAX_NAME}"
    return None


def _read_train(reader: Reader, data: Mapping[Any, Any], external: bool) -> schema.Train:
    for name in data:
        if name not in schema.SECTIONS:
            reader.unknown(f"train.{name}", name, schema.SECTIONS)
    sections = {name: as_words(reader.mapping(data, name, "train.")) for name in schema.SECTIONS}
    return schema.Train(**{k: with_absolute_paths(v, external) for k, v in sections.items()})


def _train_problems(reader: Reader, experiment: schema.Experiment) -> list[Problem]:
    """Problems of the arguments one by one and, when there are none, between them."""
    sections = experiment.train.sections()
    try:
        problems = [*collisions(sections, "train."), *_unfit_texts(sections)]
        if not experiment.task.external:
            problems += _argument_problems(sections)
        problems += specific_problems(experiment)
    except ConfigError as error:
        problems = list(error.problems)
    problems = [replace(p, where=reader.sources.place(p.key)) for p in problems]
    return problems or check_arguments(experiment)


def _unfit_texts(sections: Mapping[str, Any]) -> Iterator[Problem]:
    for key, _, value in leaves(sections, "train."):
        texts = value if isinstance(value, list) else [value]
        complaint = next(
            filter(None, (unfit(text) for text in texts if isinstance(text, str))), None
        )
        if complaint:
            yield Problem(key, complaint)


def _argument_problems(sections: Mapping[str, Any]) -> list[Problem]:
    """Unknown names, unfit values and spellings of one argument that contradict each other."""
    problems: list[Problem] = []
    seen: dict[str, tuple[str, Any]] = {}
    for key, name, value in leaves(sections, "train."):
        try:
            canonical = canonicalise(name, value)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
            continue
        if canonical is None:
            continue
        target, meaning = canonical
        other, earlier = seen.setdefault(target, (key, meaning))
        # One name in two sections is a collision, which has its own message.
        if earlier != meaning and other.rpartition(".")[2] != key.rpartition(".")[2]:
            problems.append(Problem(key, f"contradicts {other}: both stand for {target}"))
    return problems
