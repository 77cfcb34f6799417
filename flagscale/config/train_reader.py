"""Reading the arguments of the training program: ``train``, and the overrides per host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config import per_host_allowlist, schema
from flagscale.config.arguments.spec.registry import lookup, unknown_message
from flagscale.config.arguments.spec.train_arguments import (
    GivenArgument,
    TrainArguments,
    read_arguments,
    repetition_problem,
)
from flagscale.config.host_overrides import is_external_argument
from flagscale.config.reader import SectionReader
from flagscale.config.secrets import is_secret
from flagscale.errors import Problem

_LAUNCHER_KEYS = ("build_dir", "python", "conda", "cmds")


@dataclass
class TrainSections:
    """Arguments of all hosts, overrides per device type and host, and the problems of single
    arguments.
    """

    train: TrainArguments = field(default_factory=TrainArguments)
    by_type: dict[str, schema.HostOverride] = field(default_factory=dict)
    by_host: dict[str, schema.HostOverride] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_train_sections(
    reader: SectionReader, data: Mapping[Any, Any], task: schema.Task, ranks: int | None = None
) -> TrainSections:
    """Read ``train``, ``device_type_specific`` and ``node_specific``.

    Arguments are skipped for a command, so that the YAML of a training run can be used for it.
    ``ranks`` is the number of ranks, if the YAML states it.
    """
    sections = TrainSections()
    if not task.is_command:
        train = reader.read_section(data, "train")
        for name in train:
            is_anchor = reader.holds_anchor(f"train.{name}", name, schema.SECTIONS)
            if name not in schema.SECTIONS and not is_anchor:
                reader.add_unknown_key(f"train.{name}", name, schema.SECTIONS, train[name])
        reading = read_arguments(
            {name: reader.read_section(train, name, "train.") for name in schema.SECTIONS},
            external=task.external,
            locations=reader.sources.locations,
            ranks=ranks,
        )
        sections.train = reading.arguments
        sections.problems += reading.problems(external=task.external)
    by_type, by_host = (
        _read_overrides(reader, data, section, task, sections.problems)
        for section in schema.SPECIFIC_SECTIONS
    )
    sections.by_type, sections.by_host = by_type, by_host
    return sections


def _read_overrides(
    reader: SectionReader,
    data: Mapping[Any, Any],
    section: str,
    task: schema.Task,
    problems: list[Problem],
) -> dict[str, schema.HostOverride]:
    """Read ``device_type_specific`` or ``node_specific``, by type or host."""
    parts = reader.read_section(data, section)
    overrides = {}
    for name in parts:
        prefix = f"{section}.{name}."
        part = reader.read_section(parts, name, f"{section}.")
        settings = reader.read_fields(schema.HostOverride, part, prefix, ignore_unknown=True)
        cmds = reader.read_section(part, "cmds", prefix)
        settings |= reader.read_fields(schema.Commands, cmds, f"{prefix}cmds.")
        if not task.is_command:
            # Arguments may be in sections or directly in this part.
            arguments = {key: value for key, value in part.items() if key not in _LAUNCHER_KEYS}
            reading = read_arguments(
                arguments, prefix, external=task.external, locations=reader.sources.locations
            )
            settings["arguments"] = reading.arguments
            problems += reading.structure
            pairs = reading.arguments.overridden
            problems += [repetition_problem(p) for p in pairs if p.unused.name == p.used.name]
            problems += check_host_arguments(
                reading.arguments, reading.errors, external=task.external
            )
        overrides[str(name)] = schema.HostOverride(**settings)
    return overrides


def check_host_arguments(
    arguments: TrainArguments, errors: Mapping[str, str], *, external: bool
) -> Iterator[Problem]:
    """Yield the problems of arguments that one host or device type overrides.

    ``errors`` are unknown names and unfit values by key.
    """
    for argument in arguments.entries:
        if reason := _explain_refusal(argument, errors.get(argument.key), external):
            yield Problem(argument.key, reason, argument.location)


def _explain_refusal(
    given_argument: GivenArgument, error: str | None, external: bool
) -> str | None:
    if is_secret(given_argument.name, given_argument.value):
        return "looks like a secret, which a script and the process list would show"
    if external and is_external_argument(given_argument.name):
        return None
    match = lookup(given_argument.name)
    if match is None:
        return unknown_message(given_argument.name, given_argument.value)
    argument, alias = match
    target = argument.name if alias is None else alias.target
    if target not in per_host_allowlist.ARGUMENTS:
        consequence = per_host_allowlist.CONSEQUENCES.get(
            target, "ranks may hang or train different weights"
        )
        section = f"`train.{argument.section}`"
        return f"has to be the same on every host of a job, else {consequence}: set it in {section}"
    return None if external else error
