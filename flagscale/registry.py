"""Registries of named implementations: built-in ones, and those of installed packages.

A package registers an implementation by an entry point, whose name is used in a YAML or a file::

    [project.entry-points."flagscale.runners"]
    mine = "my_package.runner:MyRunner"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Registry:
    """Implementations of one ``group`` of entry points, by name. They are imported on first use."""

    def __init__(self, group: str, noun: str, builtin: Mapping[str, str]) -> None:
        """``builtin`` maps the names of built-in implementations to ``module:attribute``; packages
        cannot override them. ``noun`` is the noun for an implementation in messages.
        """
        self._group = group
        self._noun = noun
        self.builtin = builtin

    def names(self) -> list[str]:
        """Return all names, built-in ones first."""
        return [*self.builtin, *self.installed_names()]

    def installed_names(self) -> list[str]:
        """Return the names from installed packages in alphabetical order."""
        return sorted(self._installed_entry_points().keys() - self.builtin.keys())

    def explain_missing(self, name: str) -> str:
        """Return an error message if the name is unknown, otherwise "".

        Installed packages are only searched for names that are not built in.
        """
        if name in self.builtin or name in self._installed_entry_points():
            return ""
        return f"no {self._noun} is called {name!r}; known: {', '.join(self.names())}"

    def load(self, name: str) -> Any:
        """Import and return the object with this name.

        Raises :class:`ConfigError` if the name is unknown or its object cannot be imported.
        """
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(import_module(module), attribute)
        if problem := self.explain_missing(name):
            raise ConfigError(problem)
        entry_point = self._installed_entry_points()[name]
        try:
            return entry_point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the {self._noun} {name!r} of {entry_point.value} cannot be loaded: {error}"
            ) from error

    def create(self, name: str, kind: type) -> Any:
        """Return the object with this name as an instance of ``kind``.

        The object is an instance already, or a class that is instantiated without arguments. The
        ``name`` of a package's instance is set to that of its entry point.

        Raises:
            ConfigError: the name is unknown, or the object fails to load or is no ``kind``. The
                message names the package, and its ``hint`` is the remedy.
        """
        if name in self.builtin:
            return self.load(name)()
        if problem := self.explain_missing(name):
            raise ConfigError(problem)
        entry_point = self._installed_entry_points()[name]
        package = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        try:
            loaded_object = entry_point.load()
            instance = loaded_object() if isinstance(loaded_object, type) else loaded_object
        except Exception as error:
            message = f"{package}: {type(error).__name__}: {error}"
            raise ConfigError(message, hint=f"repair or remove {package}") from error
        if not isinstance(instance, kind):
            message = f"{package}: {entry_point.value} is no {kind.__name__}"
            raise ConfigError(message, hint=f"repair or remove {package}")
        instance.name = name  # type: ignore[attr-defined]
        return instance

    def _installed_entry_points(self) -> dict[str, EntryPoint]:
        return {entry_point.name: entry_point for entry_point in _load_entry_points(self._group)}


@cache
def _load_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group.

    Searching every installed package takes ten milliseconds and more. So it is done once, and
    not at all if no package mentions the group, which a fifth of that time suffices to find out.
    """
    if not _may_have_group(group):
        return ()
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _may_have_group(group: str) -> bool:
    """Return True if any installed package may have entry points of ``group``."""
    encoded_group = group.encode()
    for directory in sys.path:
        # Only importlib.metadata can look into archives.
        if Path(directory).is_file() or any(
            encoded_group in text for text in _iter_entry_point_texts(Path(directory))
        ):
            return True
    return False


def _iter_entry_point_texts(directory: Path) -> Iterator[bytes]:
    """Yield the contents of ``entry_points.txt`` of the packages in a directory of ``sys.path``."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith((".dist-info", ".egg-info")):
            try:
                yield Path(entry.path, "entry_points.txt").read_bytes()
            except OSError:  # most packages have none
                continue
