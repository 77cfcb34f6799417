"""Parsed arguments for tests, from plain values as a YAML has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.spec.command_line import command_line
from flagscale.config.arguments.spec.train_arguments import TrainArguments, read_arguments
from flagscale.errors import ConfigError


def train_arguments(
    *, locations: Mapping[str, str] | None = None, **sections: Mapping[str, Any]
) -> TrainArguments:
    """Return the arguments of the sections ``system``, ``model`` and ``data``."""
    return read_arguments(sections, absolute_paths=False, locations=locations).arguments


def arguments_of(values: Mapping[str, Any], prefix: str = "node_specific.n.") -> TrainArguments:
    """Return the arguments of one host or device type, in sections or not."""
    return read_arguments(values, prefix, absolute_paths=False).arguments


def values_by_yaml_name(args: TrainArguments) -> dict[str, Any]:
    """Return the values by the names of the YAML, explicit nulls included."""
    return {entry.name: entry.value for entry in args.entries}


def resolve_argument(name: str, value: Any) -> tuple[str, Any] | None:
    """Return the argument and the canonical value that a name and a value of the YAML stand for;
    None if they have no effect.

    Raises:
        ValueError: the name is unknown, or the value is invalid.
    """
    result = read_arguments({name: value}, absolute_paths=False)
    if result.errors:
        raise ValueError(*result.errors.values())
    (entry,) = result.arguments.entries
    return None if entry.argument is None else (entry.argument, entry.canonical)


def flatten(sections: Mapping[Any, Any], *, external: bool = False, prefix: str = "") -> list[str]:
    """Return the command line of nested sections, or raise ConfigError as loading would."""
    result = read_arguments(sections, prefix, absolute_paths=False)
    if result.structure:
        raise ConfigError(result.structure)
    return command_line(result.arguments, external=external)
