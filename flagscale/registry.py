"""Things that are found by a name: this project's own, and those that installed packages bring.

A package brings one by an entry point, whose name is what a YAML or a file then says::

    [project.entry-points."flagscale.runners"]
    mine = "my_package.runner:MyRunner"
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
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
        return [*self.own, *sorted(self._others().keys() - self.own.keys())]

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

    def _others(self) -> dict[str, EntryPoint]:
        return {found.name: found for found in _installed(self._group)}


@cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    """To look through every installed package takes tens of milliseconds, so it is done once, and
    not before something is asked for that is not this project's own."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))
