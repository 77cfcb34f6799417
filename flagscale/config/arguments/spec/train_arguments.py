"""Arguments of the training program as a configuration gives them: :class:`TrainArguments`.

:func:`read_arguments` parses the argument sections of a YAML once, when the configuration is
loaded; the result is passed on unchanged. Rules read the canonical values, messages quote the key
that gave a value, and :mod:`.command_line` repeats the spelling of the configuration.

Names of sections are dropped, so an argument may stand in any section. Of an argument given twice
with different values, the last one counts, as in FlagScale, whose launcher writes the sections one
after the other to a command line; the notes of a plan name both keys. Keys that are not valid
names, unknown names, wrong types and contradicting aliases are reported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from flagscale.config.arguments.compat.names import why_unsupported, why_unused
from flagscale.config.arguments.spec.argument import SettingContext
from flagscale.config.arguments.spec.paths import DATA_PHASES, absolute_value, phase_words
from flagscale.config.arguments.spec.registry import (
    arguments,
    canonical_name,
    fold_alias,
    lookup,
    registry,
    unknown_message,
    unwrap_single,
)
from flagscale.config.arguments.spec.system_arguments import COMM, MESHES, STAGE_RECOMPUTE
from flagscale.config.arguments.spec.values import convert, format_value, to_word, why_unfit
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
    """Value of the configuration, with absolute paths and with maps as words. None is an explicit
    null, which means "not given"."""
    converted: Any = None
    """``value`` converted to the type of the argument, such as 3e-4 for ``"3e-4"``; equal to
    ``value`` for unknown names."""
    argument: str | None = None
    """Canonical name; None for unknown names and for aliases without effect."""
    canonical: Any = None
    """Value of ``argument``: ``converted``, unless ``name`` is an alias with another meaning."""
    location: str | None = field(default=None, compare=False)
    """Location of the key as ``file:line``, or ``override``."""
    known: bool = True
    """False for a name that this project's training program does not have."""


class Overridden(NamedTuple):
    """An argument that does not count because of another one: the same name given later with
    another value, or the switch that turns it off."""

    unused: GivenArgument
    used: GivenArgument


@dataclass(frozen=True)
class TrainArguments:
    """Arguments of the training program for an experiment, or for one of its hosts."""

    entries: tuple[GivenArgument, ...] = ()
    """Arguments in the order of the configuration, including explicit nulls."""
    overridden: tuple[Overridden, ...] = field(default=(), compare=False)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Canonical value of every argument by name, including defaults."""
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
        """The names that the configuration uses, including those with an explicit null."""
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
        """Return the entry of an argument, by its canonical name or by its spelling."""
        return self._by_argument.get(name) or self.spelled.get(name)

    def key_of(self, name: str) -> str:
        """Return the dotted key that gives an argument; otherwise its key in its usual section."""
        entry = self.find(name)
        return entry.key if entry else f"train.{registry()[name].section}.{name}"

    def problem(self, name: str, message: str) -> Problem:
        """Return a problem with an argument, with the location of its key."""
        entry = self.find(name)
        if entry is None:
            return Problem(self.key_of(name), message)
        match = lookup(entry.name)
        alias = match[1] if match else None
        if entry.name != name and alias is not None and alias.rule != "same":
            meaning = f"`{name}: {format_value(self.given[name])}`"
            message += f" (`{entry.name}: {format_value(entry.value)}` is {meaning})"
        return Problem(entry.key, message, entry.location)

    def with_added(self, entries: Iterable[GivenArgument]) -> TrainArguments:
        """Return these arguments followed by others."""
        return replace(self, entries=(*self.entries, *entries))

    def without(self, *names: str) -> TrainArguments:
        """Return these arguments without those of the given canonical names."""
        remaining = (entry for entry in self.entries if entry.argument not in names)
        return replace(self, entries=tuple(remaining))

    def overlaid(self, layer: TrainArguments) -> TrainArguments:
        """Return these arguments, overridden by those of one device type or host.

        An argument of ``layer`` replaces the argument with the same meaning, in any section and
        spelling. An explicit null removes an argument.
        """
        entries = list(self.entries)
        for new in layer.entries:
            replaced = [i for i, old in enumerate(entries) if old.name == new.name]
            if new.argument is not None:
                replaced += [i for i, old in enumerate(entries) if old.argument == new.argument]
            first = min(replaced, default=None)
            remaining = [old for i, old in enumerate(entries) if i not in replaced]
            # The command line keeps the order of the configuration.
            index = len(remaining) if first is None else first
            entries = [*remaining[:index], new, *remaining[index:]]
        return replace(self, entries=tuple(entries))


_OVERRIDE = "override"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass
class ParsedArguments:
    """Arguments of YAML sections, and the problems found when they were parsed."""

    arguments: TrainArguments = field(default_factory=TrainArguments)
    structure: list[Problem] = field(default_factory=list)
    """Problems for any training program: keys that are not names, arguments given twice, and texts
    that cannot be passed to a program."""
    errors: dict[str, str] = field(default_factory=dict)
    """Unknown names and invalid values by key, for this project's program only."""
    contradictions: list[Problem] = field(default_factory=list)
    """Aliases of one argument with different values."""

    def problems(self, *, external: bool) -> list[Problem]:
        """Return all problems; an external program checks names and values itself."""
        if external:
            return list(self.structure)
        invalid = [Problem(key, message) for key, message in self.errors.items()]
        return [*self.structure, *invalid, *self.contradictions]


def read_arguments(
    sections: Mapping[Any, Any],
    prefix: str = "train.",
    *,
    external: bool = False,
    absolute_paths: bool = True,
    locations: Mapping[str, str] | None = None,
    ranks: int | None = None,
) -> ParsedArguments:
    """Parse nested sections of arguments.

    Args:
        sections: plain data of the composed YAML.
        prefix: dotted key of ``sections``, with a dot at its end.
        external: the training program is not this project's; the name of a tokenizer need not be a
            path.
        absolute_paths: make relative paths absolute.
        locations: ``file:line`` by dotted key.
        ranks: number of ranks, if the configuration states it; messages use it.
    """
    parsed = ParsedArguments()
    invalid_texts: list[Problem] = []
    entries = []
    by_name: dict[str, list[GivenArgument]] = {}
    leaves = list(_leaves(sections, prefix, parsed.structure))
    context = SettingContext({name: value for _, name, value in leaves}, ranks)
    for key, name, written in leaves:
        value = written
        if written is not None and absolute_paths:
            value = absolute_value(name, written, external=external)
        entry, error = _interpret(key, name, value, (locations or {}).get(key), context)
        entries.append(entry)
        if value is None:
            continue
        if error:
            parsed.errors[key] = error
        by_name.setdefault(name, []).append(entry)
        if problem := _text_problem(value):
            invalid_texts.append(Problem(key, problem))
    repetitions = list(_repetitions(by_name.values()))
    contradictory = filter(_turns_off, repetitions)
    parsed.structure += [*map(repetition_problem, contradictory), *invalid_texts]
    overridden = (*repetitions, *([] if external else _switched_off(by_name)))
    unused = [pair.unused for pair in overridden]
    used = tuple(entry for entry in entries if entry not in unused)
    parsed.contradictions += _contradictions(used)
    parsed.arguments = TrainArguments(used, overridden)
    return parsed


def _contradictions(entries: Iterable[GivenArgument]) -> Iterator[Problem]:
    """Yield a problem for each value of an argument that another name has set to another value."""
    by_argument: dict[str, GivenArgument] = {}
    for entry in entries:
        if entry.value is None or entry.argument is None:
            continue
        earlier = by_argument.setdefault(entry.argument, entry)
        # One name in two sections is a repetition, which has its own message.
        if earlier.canonical != entry.canonical and earlier.name != entry.name:
            message = f"contradicts {earlier.key}: both set {entry.argument}"
            yield Problem(entry.key, message)


def _switched_off(by_name: Mapping[str, Sequence[GivenArgument]]) -> Iterator[Overridden]:
    """Yield ``num_query_groups`` if Megatron-LM's switch for it is false, as Megatron-LM ignores it
    then. An override counts in any case."""
    switch = by_name.get("group_query_attention", ())
    groups = by_name.get("num_query_groups", ())
    if switch and groups and switch[-1].converted is False and groups[-1].location != _OVERRIDE:
        yield Overridden(groups[-1], switch[-1])


def _repetitions(groups: Iterable[Sequence[GivenArgument]]) -> Iterator[Overridden]:
    """Yield each value that does not count, because the same name is given again. Overrides count
    before keys of files.
    """
    for entries in groups:
        *earlier, used = sorted(entries, key=lambda entry: entry.location == _OVERRIDE)
        for entry in earlier:
            if _comparable(entry) != _comparable(used):
                yield Overridden(entry, used)


def _turns_off(pair: Overridden) -> bool:
    """Return whether a switch that is on is turned off later. FlagScale's command line cannot do
    this, because it has no words for switches that are off.
    """
    used = pair.used
    return used.converted is False and used.location != _OVERRIDE


def repetition_problem(pair: Overridden) -> Problem:
    """Return the problem of a name that may not be given twice."""
    unused, used = pair
    values = f"{format_value(used.value)} here and {format_value(unused.value)} as {unused.key}"
    return Problem(used.key, f"{used.name!r} is given twice: {values}; leave one out")


def _leaves(
    section: Mapping[Any, Any], prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, str, Any]]:
    """Yield dotted key, name in snake case and value of every leaf. Keys that are not valid names
    are added to ``problems``."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        words = _as_words(key, value)
        if isinstance(words, Mapping):
            yield from _leaves(words, f"{path}.", problems)
        elif not isinstance(key, str) or not _NAME.fullmatch(key):
            problems.append(Problem(path, f"{format_value(key)} is not a valid argument name"))
        else:
            yield path, key.replace("-", "_"), words


def _as_words(key: Any, value: Any) -> Any:
    """Convert the map or the list of maps of an argument to command-line words.

    Other values are returned unchanged. A map of backend options with nested values stays a
    section, so that the message names the key of the nested value.
    """
    if key in _WORD_CONVERTERS and isinstance(value, (list, tuple)):
        return _WORD_CONVERTERS[key](value)
    if key != COMM or not isinstance(value, Mapping):
        return value
    if any(isinstance(option, (Mapping, list, tuple)) for option in value.values()):
        return value
    return [
        f"{name}={to_word(option)}" for name, option in value.items() if option is not None
    ] or None


def _interpret(
    key: str, name: str, value: Any, location: str | None, context: SettingContext
) -> tuple[GivenArgument, str | None]:
    """Return the entry of one key of the YAML, and the problem of its name or value, if any."""
    match = lookup(name)
    if match is None:
        accepted = value is None or why_unused(name) or (why_unsupported(name) and value is False)
        entry = GivenArgument(key, name, value, value, location=location, known=False)
        return entry, None if accepted else unknown_message(
            name, value, context._replace(is_override=location == _OVERRIDE)
        )
    argument, alias = match
    if value is None:
        # A null of an alias that means another value removes only this alias.
        return GivenArgument(
            key, name, None, argument=canonical_name(name), location=location
        ), None
    try:
        converted = unwrap_single(argument, value, convert(argument, value))
    except ValueError as error:
        return GivenArgument(key, name, value, value, location=location), str(error)
    canonical = fold_alias(alias, argument.name, converted)
    target, meaning = canonical if canonical is not None else (None, None)
    return GivenArgument(key, name, value, converted, target, meaning, location), None


def _comparable(entry: GivenArgument) -> Any:
    """Return a value in comparable form: ``1`` and ``"1"`` are equal for most arguments, but True
    and 1, which are equal in Python, are not."""
    value = entry.converted
    return value if isinstance(value, (list, tuple, Mapping)) else to_word(value)


def _text_problem(value: Any) -> str | None:
    texts = value if isinstance(value, list) else [value]
    return next(filter(None, (why_unfit(text) for text in texts if isinstance(text, str))), None)


def row_words(rows: Sequence[Any]) -> list[Any]:
    """Convert a list of lists to words; other items are unchanged, and checked later."""
    return [",".join(map(str, row)) if isinstance(row, (list, tuple)) else row for row in rows]


def mesh_words(meshes: Sequence[Any]) -> list[Any]:
    """Convert a list of maps to words; other items are unchanged, and checked later."""
    return [_mesh_word(mesh) if isinstance(mesh, Mapping) else mesh for mesh in meshes]


def _mesh_word(mesh: Mapping[Any, Any]) -> str:
    parts = []
    for key, value in mesh.items():
        many = isinstance(value, (list, tuple))
        if value is not None:
            parts.append(f"{key}={'+'.join(map(str, value)) if many else value}")
    return ",".join(parts)


_WORD_CONVERTERS: Mapping[str, Callable[[Sequence[Any]], list[Any]]] = {
    MESHES: mesh_words,
    DATA_PHASES: phase_words,
    **dict.fromkeys(STAGE_RECOMPUTE, row_words),
}
"""Arguments that a YAML may write as a list of maps or of lists."""
