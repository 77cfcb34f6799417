"""Loading a configuration: composes YAML files and overrides into a checked
:class:`~flagscale.config.schema.Experiment`.

All problems are collected, so that one start of the launcher reports everything that is wrong: each
with its file and line, its key, the value found and the value expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flagscale.config import schema
from flagscale.config.actions import ACTIONS, Purpose
from flagscale.config.command_hints import make_command, unpatch_command
from flagscale.config.compose import compose_valid_overrides, config_file, exclusive_hydra
from flagscale.config.composed import fix_interpolations
from flagscale.config.experiment_reader import read_experiment
from flagscale.config.interpolation import referenced_keys, resolve_interpolations
from flagscale.config.overrides import TOP_LEVEL
from flagscale.config.reader import SectionReader
from flagscale.config.runners import UNSTATED_HOSTS
from flagscale.config.sources import trace_sources
from flagscale.errors import ConfigError, Problem


class LoadedConfig(NamedTuple):
    """Options and experiment of a command line, checked."""

    options: schema.Options
    experiment: schema.Experiment


def load(
    directory: Path, name: str, overrides: Sequence[str], purpose: Purpose | None = None
) -> LoadedConfig:
    """Load the configuration of this name in a directory, reading each file once.

    Args:
        directory: Directory of the YAML.
        name: Name of the YAML, without the suffix.
        overrides: Hydra overrides, as typed.
        purpose: Purpose of loading, which decides what is checked; by default that of the
            configuration's action.

    Raises:
        ConfigError: with every problem.
    """
    from omegaconf import OmegaConf

    sources = trace_sources(config_file(directory, name), overrides)
    with exclusive_hydra():
        config, problems = compose_valid_overrides(sources)
        del config["hydra"]
        unresolved = OmegaConf.to_container(config)
        assert isinstance(unresolved, dict)
        # The launcher's sections are read without the arguments of the training program.
        reader = SectionReader(
            sources.without(schema.ARGUMENT_SECTIONS), problems, _referenced_sections(unresolved)
        )
        # First, because an interpolation cannot find what is in a misspelled section.
        _check_top_level(reader, unresolved)
        try:
            data = resolve_interpolations(config, sources)
        except ConfigError as error:
            raise ConfigError([*reader.problems, *error.problems]) from error
        composed = fix_interpolations(config, data)
    launcher_data = {
        key: value for key, value in data.items() if key not in schema.ARGUMENT_SECTIONS
    }
    fields = reader.read_fields(schema.Options, launcher_data, "", ignore_unknown=True)
    options = schema.Options(**fields)
    if purpose is None:
        # The requirements of an unknown action are unknown; "find" has the fewest.
        is_unknown = "action" not in fields and launcher_data.get("action") is not None
        purpose = "find" if is_unknown else ACTIONS[options.action].purpose
    experiment = replace(
        read_experiment(reader, launcher_data),
        overrides=sources.overrides,
        resolved=data,
        composed=composed,
        sources=sources.locations,
    )
    if purpose != "find":
        train_reader = replace(reader, sources=sources)
        experiment = _read_arguments(train_reader, data, experiment, purpose)
    problems = reader.root_problems()
    if problems:
        raise ConfigError(problems, hint=_hint(problems))
    return LoadedConfig(options, experiment)


def _referenced_sections(config: Any) -> frozenset[str]:
    """Return the keys that interpolations refer to, and the sections that contain them."""
    keys = (key.split(".") for key in referenced_keys(config))
    return frozenset(".".join(parts[:end]) for parts in keys for end in range(1, len(parts) + 1))


def _read_arguments(
    reader: SectionReader,
    data: Mapping[Any, Any],
    experiment: schema.Experiment,
    purpose: Purpose | None,
) -> schema.Experiment:
    """Return the experiment with its arguments, checked.

    Problems are added to those of ``reader``.
    """
    # Commands on existing runs need neither arguments nor rules nor model families.
    from flagscale.config.checks import check_experiment
    from flagscale.config.train_reader import read_train_sections

    ranks = _stated_ranks(experiment.runner)
    sections = read_train_sections(reader, data, experiment.task, ranks)
    experiment = replace(
        experiment,
        train=sections.train,
        by_type=sections.by_type,
        by_host=sections.by_host,
    )
    argument_problems = [
        replace(p, where=reader.sources.location(p.key)) for p in sections.problems
    ]
    experiment, problems = check_experiment(experiment, argument_problems, purpose)
    reader.problems += problems
    return experiment


def _stated_ranks(runner: schema.Runner) -> int | None:
    """Return the number of ranks if the YAML alone states it, without hostfile or scheduler."""
    per_host = runner.nproc_per_node
    hosts_are_unknown = runner.names_hosts or runner.type in UNSTATED_HOSTS
    if hosts_are_unknown or not isinstance(per_host, int):
        return None
    return (runner.nnodes or 1) * per_host


def _hint(problems: Sequence[Problem]) -> str | None:
    remedies = {
        "data/quickstart/": f"`{make_command('data')}` (tools/data/quickstart.py) makes the "
        "quickstart's data and tokenizer",
        "no adapted Megatron-LM": f"`{make_command('backend')}` ({unpatch_command()}) fetches and "
        "adapts the training backend",
    }
    hints = [
        hint
        for text, hint in remedies.items()
        if any(text in problem.message for problem in problems)
    ]
    return "\n  hint: ".join(hints) or None


def _check_top_level(reader: SectionReader, data: Mapping[Any, Any]) -> None:
    names = [*TOP_LEVEL, *schema.documented_fields(schema.Options)]
    for name in data:
        if name in schema.ARGUMENT_SECTIONS:
            continue
        is_referenced = name in reader.referenced or reader.holds_anchor(str(name), name, names)
        if name not in names and name not in schema.SPECIFIC_SECTIONS and not is_referenced:
            reader.add_unknown_key(str(name), name, [*names, *schema.SPECIFIC_SECTIONS], data[name])
