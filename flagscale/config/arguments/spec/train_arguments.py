"""The training program's arguments of one experiment or host, parsed: :class:`TrainArguments`.

Made once, when a configuration is loaded (:mod:`.reading`), and passed on unchanged. Rules read the
canonical values, messages quote the key that gave one, and the command line repeats the spelling
of the configuration (:mod:`.command_line`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from flagscale.config.arguments.spec.registry import arguments, lookup, registry
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import Problem


@cache
def _defaults() -> dict[str, Any]:
    return {name: argument.default for name, argument in arguments().items()}


@dataclass(frozen=True)
class GivenArgument:
    """One argument as a configuration gives it."""

    key: str
    """Dotted key, such as ``train.model.optimizer.lr``."""
    name: str
    """Spelling of the configuration, in snake case; may be an alias."""
    value: Any
    """Value of the configuration, with paths absolute and maps as words. None is an explicit null,
    which means "not given"."""
    converted: Any = None
    """``value`` in the type of the argument that is spelled so, such as 3e-4 for ``"3e-4"``; equal
    to ``value`` for names that are no argument."""
    argument: str | None = None
    """Canonical name; None for names that this project's program does not have (``known`` is
    False) and for those that it accepts without effect."""
    canonical: Any = None
    """Value of ``argument``: ``converted``, unless the spelling is an alias that means another
    value."""
    place: str | None = field(default=None, compare=False)
    """``file:line`` of the key, or ``override``."""
    known: bool = True
    """False for a name that this project's program does not have."""


@dataclass(frozen=True)
class TrainArguments:
    """All arguments of the training program for one experiment, or for one host of it."""

    entries: tuple[GivenArgument, ...] = ()
    """Everything that the configuration gives, explicit nulls included, in its order."""

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Canonical value of every argument by name, defaults filled in."""
        return MappingProxyType({**_defaults(), **self.given})

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """Canonical values of the arguments that are given, by name."""
        return MappingProxyType(
            {entry.argument: entry.canonical for entry in self if entry.argument}
        )

    @cached_property
    def spelled(self) -> Mapping[str, GivenArgument]:
        """The given arguments by the names that the configuration uses."""
        return MappingProxyType({entry.name: entry for entry in self})

    @cached_property
    def named(self) -> frozenset[str]:
        """The names that the configuration uses, those with an explicit null included."""
        return frozenset(entry.name for entry in self.entries)

    @cached_property
    def _by_argument(self) -> Mapping[str, GivenArgument]:
        return {entry.argument: entry for entry in self if entry.argument}

    def __iter__(self) -> Iterator[GivenArgument]:
        """Iterate over the arguments that are given, without explicit nulls."""
        return (entry for entry in self.entries if entry.value is not None)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def find(self, name: str) -> GivenArgument | None:
        """Return what gives an argument, by its canonical name or by its spelling."""
        return self._by_argument.get(name) or self.spelled.get(name)

    def key_of(self, name: str) -> str:
        """Return the dotted key of an argument: the one that gives it, else its usual place."""
        entry = self.find(name)
        return entry.key if entry else f"train.{registry()[name].section}.{name}"

    def problem(self, name: str, message: str) -> Problem:
        """Return a problem with an argument, at the place that gives it."""
        entry = self.find(name)
        if entry is None:
            return Problem(self.key_of(name), message)
        match = lookup(entry.name)
        alias = match[1] if match else None
        if entry.name != name and alias is not None and alias.rule != "same":
            meaning = f"`{name}: {format_value(self.given[name])}`"
            message += f" (`{entry.name}: {format_value(entry.value)}` is {meaning})"
        return Problem(entry.key, message, entry.place)

    def with_added(self, entries: Iterable[GivenArgument]) -> TrainArguments:
        """Return these arguments followed by others."""
        return TrainArguments((*self.entries, *entries))

    def without(self, *names: str) -> TrainArguments:
        """Return these arguments without those of the given canonical names."""
        remaining = (entry for entry in self.entries if entry.argument not in names)
        return TrainArguments(tuple(remaining))

    def overlaid(self, layer: TrainArguments) -> TrainArguments:
        """Return these arguments with those of one device type or host on top.

        An argument of ``layer`` replaces the one with the same meaning, whatever section either
        stands in and however it is spelled. An explicit null takes an argument away.
        """
        entries = list(self.entries)
        for new in layer.entries:
            same = [i for i, old in enumerate(entries) if old.name == new.name]
            if new.argument is not None:
                same += [i for i, old in enumerate(entries) if old.argument == new.argument]
            first = min(same, default=None)
            remaining = [old for i, old in enumerate(entries) if i not in same]
            # The command line keeps the order of the configuration.
            at = len(remaining) if first is None else first
            entries = [*remaining[:at], new, *remaining[at:]]
        return TrainArguments(tuple(entries))
