"""Parsing the argument sections of a YAML, once: nested sections in, :class:`TrainArguments` out.

Names of sections are dropped, so an argument may stand in any of them. What cannot be expressed on
a command line (a key that is no name, one argument in two sections with different values) is
reported here, as are unknown names, wrong types and aliases that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.arguments.compat.unsupported import why_unsupported, why_unused
from flagscale.config.arguments.spec.data_phases import DATA_PHASES, phase_words
from flagscale.config.arguments.spec.parser import fold_alias, unknown_message, unwrap_single
from flagscale.config.arguments.spec.paths import absolute_value
from flagscale.config.arguments.spec.registry import canonical_name, lookup
from flagscale.config.arguments.spec.system_arguments import COMM, MESHES, STAGE_RECOMPUTE
from flagscale.config.arguments.spec.train_arguments import GivenArgument, TrainArguments
from flagscale.config.arguments.spec.values import convert, format_value, to_word, why_unfit
from flagscale.errors import Problem

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass
class Reading:
    """Arguments of some sections, with the problems found while reading them."""

    arguments: TrainArguments = field(default_factory=TrainArguments)
    structure: list[Problem] = field(default_factory=list)
    """Problems that concern any training program: keys that are no names, arguments given twice,
    texts that no program can be started with."""
    errors: dict[str, str] = field(default_factory=dict)
    """Unknown names and unfit values by key, for this project's program alone."""
    contradictions: list[Problem] = field(default_factory=list)
    """Aliases of one argument with different values."""

    def problems(self, *, external: bool) -> list[Problem]:
        """Return all problems; an external program judges names and values itself."""
        if external:
            return list(self.structure)
        wrong = [Problem(key, message) for key, message in self.errors.items()]
        return [*self.structure, *wrong, *self.contradictions]


def read_arguments(
    sections: Mapping[Any, Any],
    prefix: str = "train.",
    *,
    external: bool = False,
    absolute_paths: bool = True,
    places: Mapping[str, str] | None = None,
) -> Reading:
    """Parse nested sections of arguments.

    Args:
        sections: plain data of the composed YAML.
        prefix: dotted key of ``sections``, with a dot at its end.
        external: the training program is not this project's; a tokenizer's name may not be a path.
        absolute_paths: make relative paths absolute.
        places: ``file:line`` by dotted key.
    """
    reading = Reading()
    repeated: list[Problem] = []
    unfit_texts: list[Problem] = []
    entries = []
    by_name: dict[str, GivenArgument] = {}
    by_argument: dict[str, GivenArgument] = {}
    for key, name, written in _leaves(sections, prefix, reading.structure):
        value = written
        if written is not None and absolute_paths:
            value = absolute_value(name, written, external=external)
        entry, error = _interpret(key, name, value, (places or {}).get(key))
        entries.append(entry)
        if value is None:
            continue
        if error:
            reading.errors[key] = error
        first = by_name.setdefault(name, entry)
        if first is not entry and _comparable(first) != _comparable(entry):
            values = f"{format_value(value)} here and {format_value(first.value)} as {first.key}"
            repeated.append(Problem(key, f"{name!r} is given twice: {values}; keep one"))
        if complaint := _unfit(value):
            unfit_texts.append(Problem(key, complaint))
        if entry.argument is None:
            continue
        earlier = by_argument.setdefault(entry.argument, entry)
        # One name in two sections is a repetition, which has its own message.
        if earlier.canonical != entry.canonical and earlier.name != name:
            message = f"contradicts {earlier.key}: both stand for {entry.argument}"
            reading.contradictions.append(Problem(key, message))
    reading.structure += [*repeated, *unfit_texts]
    reading.arguments = TrainArguments(tuple(entries))
    return reading


def _leaves(
    section: Mapping[Any, Any], prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, str, Any]]:
    """Yield dotted key, name in snake case and value of every leaf, maps that stand for words
    included; keys that cannot be names are added to ``problems``."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        words = _as_words(key, value)
        if isinstance(words, Mapping):
            yield from _leaves(words, f"{path}.", problems)
        elif not isinstance(key, str) or not _NAME.fullmatch(key):
            problems.append(Problem(path, f"{format_value(key)} cannot be the name of an argument"))
        else:
            yield path, key.replace("-", "_"), words


def _as_words(key: Any, value: Any) -> Any:
    """Return the words that a map or a list of maps stands for; any other value as it is. A map of
    backend options that holds more than plain values stays a section, so that the message names the
    key of that value."""
    if key in _LISTED and isinstance(value, (list, tuple)):
        return _LISTED[key](value)
    if key != COMM or not isinstance(value, Mapping):
        return value
    if any(isinstance(option, (Mapping, list, tuple)) for option in value.values()):
        return value
    return [
        f"{name}={to_word(option)}" for name, option in value.items() if option is not None
    ] or None


def _interpret(
    key: str, name: str, value: Any, place: str | None
) -> tuple[GivenArgument, str | None]:
    """Return what one key of the YAML gives, and what is wrong with its name or its value."""
    match = lookup(name)
    if match is None:
        accepted = value is None or why_unused(name) or (why_unsupported(name) and value is False)
        entry = GivenArgument(key, name, value, value, place=place, known=False)
        return entry, None if accepted else unknown_message(name)
    argument, alias = match
    if value is None:
        # A null of an alias with a meaning of its own takes nothing but this alias away.
        return GivenArgument(key, name, None, argument=canonical_name(name), place=place), None
    try:
        converted = unwrap_single(argument, value, convert(argument, value))
    except ValueError as error:
        return GivenArgument(key, name, value, value, place=place), str(error)
    canonical = fold_alias(alias, argument.name, converted)
    target, meaning = canonical if canonical is not None else (None, None)
    return GivenArgument(key, name, value, converted, target, meaning, place), None


def _comparable(entry: GivenArgument) -> Any:
    """Return a value as its argument takes it, for comparison: ``1`` and ``"1"`` are the same to
    most arguments, and True equals 1 in Python, which words tell apart."""
    value = entry.converted
    return value if isinstance(value, (list, tuple, Mapping)) else to_word(value)


def _unfit(value: Any) -> str | None:
    texts = value if isinstance(value, list) else [value]
    return next(filter(None, (why_unfit(text) for text in texts if isinstance(text, str))), None)


def row_words(rows: Sequence[Any]) -> list[Any]:
    """The words of a YAML's list of lists; what is no list stays, to be judged where it is read."""
    return [",".join(map(str, row)) if isinstance(row, (list, tuple)) else row for row in rows]


def mesh_words(meshes: Sequence[Any]) -> list[Any]:
    """The words of a YAML's list of maps; what is no map stays, to be judged where it is read."""
    return [_mesh_word(mesh) if isinstance(mesh, Mapping) else mesh for mesh in meshes]


def _mesh_word(mesh: Mapping[Any, Any]) -> str:
    parts = []
    for key, value in mesh.items():
        many = isinstance(value, (list, tuple))
        if value is not None:
            parts.append(f"{key}={'+'.join(map(str, value)) if many else value}")
    return ",".join(parts)


_LISTED: Mapping[str, Callable[[Sequence[Any]], list[Any]]] = {
    MESHES: mesh_words,
    DATA_PHASES: phase_words,
    **dict.fromkeys(STAGE_RECOMPUTE, row_words),
}
"""Arguments that a YAML may write as a list of maps or of lists."""
