"""Parsed arguments for tests, from plain values as a YAML has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.spec.command_line import command_line
from flagscale.config.arguments.spec.reading import read_arguments
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.errors import ConfigError


def train_arguments(
    *, places: Mapping[str, str] | None = None, **sections: Mapping[str, Any]
) -> TrainArguments:
    """Return the arguments of the sections ``system``, ``model`` and ``data``."""
    return read_arguments(sections, absolute_paths=False, places=places).arguments


def arguments_of(values: Mapping[str, Any], prefix: str = "node_specific.n.") -> TrainArguments:
    """Return the arguments of one host or device type, in sections or not."""
    return read_arguments(values, prefix, absolute_paths=False).arguments


def as_written(args: TrainArguments) -> dict[str, Any]:
    """Return the values by the names of the YAML, explicit nulls included."""
    return {entry.name: entry.value for entry in args.entries}


def canonical(name: str, value: Any) -> tuple[str, Any] | None:
    """Return the argument and the value that a name with a value stands for, None if it has no
    effect. Raises ValueError for an unknown name or an unfit value."""
    reading = read_arguments({name: value}, absolute_paths=False)
    if reading.errors:
        raise ValueError(*reading.errors.values())
    (entry,) = reading.arguments.entries
    return None if entry.argument is None else (entry.argument, entry.canonical)


def flatten(sections: Mapping[Any, Any], *, external: bool = False, prefix: str = "") -> list[str]:
    """Return the command line of nested sections, or raise ConfigError as loading would."""
    reading = read_arguments(sections, prefix, absolute_paths=False)
    if reading.structure:
        raise ConfigError(reading.structure)
    return command_line(reading.arguments, external=external)
