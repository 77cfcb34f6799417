"""From a composed configuration to a checked :class:`Experiment`.

Every problem is collected, so that one run of the launcher tells all that is wrong, each with its
place, its key, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flagscale.config import schema
from flagscale.config.arguments import paths
from flagscale.config.arguments.backend_options import as_words
from flagscale.config.arguments.flatten import collisions, leaves
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.checks import check_arguments, check_places
from flagscale.config.experiment_reader import (
    read_commands,
    read_environments,
    read_runner,
    read_task,
)
from flagscale.config.interpolation import interpolation_hint
from flagscale.config.overrides import SUBSECTIONS, TOP_LEVEL, sections_of
from flagscale.config.reader import Reader
from flagscale.config.sources import trace
from flagscale.config.specifics import read_specifics, specific_problems, with_absolute_paths
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig

Purpose = Literal["launch", "plan", "find"]
"""What an experiment is loaded for: to start it (everything must be right), to plan it (data and
tokenizer may be elsewhere), or to find a run of it (only ``experiment`` must be right)."""

_PURPOSES: dict[str, Purpose] = {
    "dryrun": "plan",
    "check": "plan",
    "query": "find",
    "logs": "find",
    "stop": "find",
}


def load_experiment(
    config: DictConfig,
    *,
    config_file: Path,
    overrides: Sequence[str],
    purpose: Purpose | None = None,
) -> schema.Experiment:
    """The experiment that a composed configuration describes, checked.

    ``config_file`` and ``overrides`` are what it was composed of; messages name their places.
    Without a ``purpose`` the configuration's ``action`` decides. Raises ConfigError with every
    problem.
    """
    reader = Reader(trace(config_file, overrides))
    data = _resolve(config, reader)
    _check_top_level(reader, data)
    options = _read_options(reader, data)
    if purpose is None:
        purpose = _PURPOSES.get(options.action, "launch")
    experiment = _read_experiment(reader, data, config_file, overrides)
    if experiment is not None and purpose != "find":
        reader.problems += check_places(experiment)
        reader.problems += _train_problems(reader, experiment)
        # Where files are not shared, the hosts are asked instead.
        if purpose == "launch" and not experiment.runner.no_shared_fs:
            reader.problems += missing_paths(experiment)
    if reader.problems or experiment is None:
        raise ConfigError(reader.problems, hint=_hint(reader.problems))
    return experiment


def _hint(problems: Sequence[Problem]) -> str | None:
    if any("data/quickstart/" in problem.message for problem in problems):
        return "`python tools/data/quickstart.py` makes the quickstart's data and tokenizer"
    return None


def load_options(
    config: DictConfig, *, config_file: Path, overrides: Sequence[str]
) -> schema.Options:
    """The launcher's own options: action, follow, rank, lines, json. Raises ConfigError."""
    reader = Reader(trace(config_file, overrides))
    options = _read_options(reader, _resolve(config, reader))
    if reader.problems:
        raise ConfigError(reader.problems)
    return options


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
        for message in paths.missing(name, value)
    ]


def _resolve(config: DictConfig, reader: Reader) -> dict[Any, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        message = (error.msg or str(error)).splitlines()[0]
        if "Missing mandatory value" in message:
            message = "is required: replace ??? by a value"
        message += interpolation_hint(message, key)
        raise ConfigError(Problem(key, message, reader.sources.place(key))) from error
    return data if isinstance(data, dict) else {}


def _check_top_level(reader: Reader, data: Mapping[Any, Any]) -> None:
    known = [*TOP_LEVEL, *schema.documented(schema.Options)]
    for name in data:
        if name not in known and name not in schema.SPECIFIC_SECTIONS:
            reader.unknown(str(name), name, [*known, *schema.SPECIFIC_SECTIONS])


def _read_options(reader: Reader, data: Mapping[Any, Any]) -> schema.Options:
    return schema.Options(**reader.fields(schema.Options, data, "", others=True))


def _read_experiment(
    reader: Reader, data: Mapping[Any, Any], config_file: Path, overrides: Sequence[str]
) -> schema.Experiment | None:
    """The experiment, unchecked between its values; None when parts of it cannot be read."""
    given = reader.mapping(data, "experiment")
    prefix = "experiment."
    own = {key: value for key, value in given.items() if key not in (*SUBSECTIONS, "envs")}
    found = reader.fields(schema.Experiment, own, prefix, beside=sections_of(""))
    task = read_task(reader, reader.mapping(given, "task", prefix))
    runner = read_runner(reader, reader.mapping(given, "runner", prefix))
    envs = read_environments(reader, reader.mapping(given, "envs", prefix))
    cmds = read_commands(reader, reader.mapping(given, "cmds", prefix))
    train = _read_train(reader, reader.mapping(data, "train"), task.external)
    by_type, by_host = (
        read_specifics(reader, data, section, external=task.external)
        for section in schema.SPECIFIC_SECTIONS
    )
    if not {"name", "exp_dir"} <= found.keys():
        return None
    return schema.Experiment(
        **found,
        task=task,
        runner=runner,
        envs=envs,
        cmds=cmds,
        train=train,
        config_file=config_file.absolute(),
        by_type=by_type,
        by_host=by_host,
        overrides=tuple(overrides),
        resolved=data,
        sources=reader.sources.places,
    )


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
        problems = collisions(sections, "train.")
        if not experiment.task.external:
            problems += _argument_problems(sections)
        problems += specific_problems(experiment)
    except ConfigError as error:
        problems = list(error.problems)
    problems = [replace(p, where=reader.sources.place(p.key)) for p in problems]
    return problems or check_arguments(experiment)


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
