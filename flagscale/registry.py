"""Things that are found by a name: this project's own, and those that installed packages bring.

A package brings one by an entry point, whose name is what a YAML or a file then says::

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
    """Names of one ``group`` of entry points. What is named is imported when it is asked for."""

    def __init__(self, group: str, what: str, own: Mapping[str, str]) -> None:
        """``own``: this project's, as ``module:attribute``; no other takes the place of these.
        ``what`` is what messages call one."""
        self._group = group
        self._what = what
        self.own = own

    def names(self) -> list[str]:
        """Every name there is, this project's own first."""
        return [*self.own, *self.others()]

    def others(self) -> list[str]:
        """The names that installed packages bring, in the order of the alphabet."""
        return sorted(self._others().keys() - self.own.keys())

    def missing(self, name: str) -> str:
        """That nothing has this name, in words; empty where something has it. Only for a name that
        is not this project's own are installed packages looked through."""
        if name in self.own or name in self._others():
            return ""
        return f"no {self._what} is called {name!r}; known: {', '.join(self.names())}"

    def load(self, name: str) -> Any:
        """What has this name. Raises :class:`ConfigError` where nothing has it, or where what has
        it cannot be imported."""
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return getattr(import_module(module), attribute)
        if complaint := self.missing(name):
            raise ConfigError(complaint)
        found = self._others()[name]
        try:
            return found.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the {self._what} {name!r} of {found.value} cannot be loaded: {error}"
            ) from error

    def made(self, name: str, kind: type) -> Any:
        """What has this name as an instance of ``kind``: an object, or a class of it that takes no
        arguments. One of a package is called as its entry point is, whatever it calls itself.

        Raises:
            ConfigError: nothing has this name, or what has it is no ``kind`` or fails; the message
                names the package, and its ``hint`` what to do about it.
        """
        if name in self.own:
            return self.load(name)()
        if complaint := self.missing(name):
            raise ConfigError(complaint)
        found = self._others()[name]
        package = found.dist.name if found.dist is not None else found.value
        try:
            loaded = found.load()
            made = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:
            text = f"{package}: {type(error).__name__}: {error}"
            raise ConfigError(text, hint=f"repair or remove {package}") from error
        if not isinstance(made, kind):
            text = f"{package}: {found.value} is no {kind.__name__}"
            raise ConfigError(text, hint=f"repair or remove {package}")
        made.name = name  # type: ignore[attr-defined]
        return made

    def _others(self) -> dict[str, EntryPoint]:
        return {found.name: found for found in _installed(self._group)}


@cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    """To look through every installed package takes ten milliseconds and more, so it is done once,
    and not where no package has a word of the group, which a fifth of that time tells."""
    if not _mentioned(group):
        return ()
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _mentioned(group: str) -> bool:
    """Whether any installed package may have entry points of ``group``."""
    word = group.encode()
    for place in sys.path:
        # An archive is for importlib.metadata to look into.
        if Path(place).is_file() or any(word in text for text in _entry_points(Path(place))):
            return True
    return False


def _entry_points(place: Path) -> Iterator[bytes]:
    """What the packages in a directory of ``sys.path`` bring, as their files say it."""
    try:
        found = list(os.scandir(place))
    except OSError:
        return
    for entry in found:
        if entry.name.endswith((".dist-info", ".egg-info")):
            try:
                yield Path(entry.path, "entry_points.txt").read_bytes()
            except OSError:  # most have none
                continue
