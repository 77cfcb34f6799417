"""Reading ``device_type_specific`` and ``node_specific``: what is different on some hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flagscale.config import per_host_allowlist, schema
from flagscale.config.arguments import paths
from flagscale.config.arguments.flatten import collisions, leaves
from flagscale.config.arguments.foreign import refusal, remark
from flagscale.config.arguments.maps import as_words
from flagscale.config.arguments.parser import canonicalise, unknown
from flagscale.config.arguments.registry import lookup
from flagscale.config.reader import Reader
from flagscale.config.secrets import is_secret
from flagscale.errors import Problem

_OWN = ("build_dir", "python", "conda", "cmds")


def with_absolute_paths(section: Mapping[Any, Any], external: bool) -> dict[Any, Any]:
    """A section of arguments in which the paths no longer depend on the working directory."""
    made: dict[Any, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            made[key] = with_absolute_paths(value, external)
        elif value is None:
            made[key] = None
        else:
            name = str(key).replace("-", "_")
            made[key] = paths.absolute_value(name, value, external=external)
    return made


def read_specifics(
    reader: Reader, data: Mapping[Any, Any], section: str, *, external: bool
) -> dict[str, schema.Specific]:
    """``device_type_specific`` or ``node_specific``, by type or host."""
    parts = reader.mapping(data, section)
    return {
        str(name): _read(
            reader, reader.mapping(parts, name, f"{section}."), f"{section}.{name}.", external
        )
        for name in parts
    }


def _read(reader: Reader, data: Mapping[Any, Any], prefix: str, external: bool) -> schema.Specific:
    found = reader.fields(schema.Specific, data, prefix, others=True)
    cmds = reader.mapping(data, "cmds", prefix)
    commands = reader.fields(schema.Commands, cmds, f"{prefix}cmds.")
    arguments: dict[Any, Any] = {key: value for key, value in data.items() if key not in _OWN}
    # In sections or not, as a user likes.
    within = {k: as_words(v) for k, v in arguments.items() if _is_section(k, v)}
    arguments = as_words({**arguments, **within})
    return schema.Specific(**found, **commands, arguments=with_absolute_paths(arguments, external))


def without_arguments(parts: Mapping[str, schema.Specific]) -> dict[str, schema.Specific]:
    """What is specific to each type or host, but for arguments of training."""
    return {name: replace(specific, arguments={}) for name, specific in parts.items()}


def _is_section(name: Any, value: Any) -> bool:
    return name in schema.SECTIONS and isinstance(value, Mapping)


def specifics(experiment: schema.Experiment) -> Iterator[tuple[str, schema.Specific]]:
    """Every part that is specific to something, with its dotted key."""
    for section, parts in zip(
        schema.SPECIFIC_SECTIONS, (experiment.by_type, experiment.by_host), strict=True
    ):
        for name, specific in parts.items():
            yield f"{section}.{name}", specific


def specific_problems(experiment: schema.Experiment) -> list[Problem]:
    """What is wrong with the arguments of such parts, one by one. Raises ConfigError for a key
    that can be no argument."""
    problems: list[Problem] = []
    for key, specific in specifics(experiment):
        problems += collisions(specific.arguments, f"{key}.")
        for path, name, value in leaves(specific.arguments, f"{key}.", nulls=True):
            complaint = _complaint(name, value, experiment.task.external)
            if complaint:
                problems.append(Problem(path, complaint))
    return [replace(p, where=experiment.sources.get(p.key)) for p in problems]


def specific_notes(experiment: schema.Experiment) -> Iterator[str]:
    """A note of arguments that differ by host and that only another's program knows."""
    found = [
        path
        for key, specific in specifics(experiment)
        for path, name, _ in leaves(specific.arguments, f"{key}.", nulls=True)
        if _is_anothers(name)
    ]
    if found:
        yield (
            f"{', '.join(found)}: whether its ranks may differ in them is for "
            f"{experiment.task.entrypoint.name} to say"
        )


def _complaint(name: str, value: Any, external: bool) -> str | None:
    if is_secret(name, value):
        return "looks like a secret, which a script and the process list would show"
    if external and _is_anothers(name):
        return None
    found = lookup(name)
    if found is None:
        return unknown(name)
    argument, alias = found
    target = argument.name if alias is None else alias.target
    if target not in per_host_allowlist.ARGUMENTS:
        why = per_host_allowlist.INSTEAD.get(target, "ranks may hang or train unlike weights")
        section = f"`train.{argument.section}`"
        return f"has to be the same on every host of a job, else {why}: give it in {section}"
    try:
        if value is not None and not external:
            canonicalise(name, value)
    except ValueError as error:
        return str(error)
    return None


def _is_anothers(name: str) -> bool:
    """Whether a name is neither an argument here nor one of Megatron-LM's that cannot be given."""
    return lookup(name) is None and refusal(name) is None and remark(name) is None
