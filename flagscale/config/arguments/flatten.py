"""From the sections of a train YAML to the training program's command line.

Megatron-LM's convention: ``_`` becomes ``-``, names of sections are dropped, a list is
``--key v1 v2``, ``true`` is ``--key``, ``false`` is nothing, or ``--no-key`` where the program's
default is true, and null is "not given". What cannot be expressed (a map inside a list, one key in
two sections with unlike values) is refused instead of being passed on as something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flagscale.config.arguments.foreign import remark
from flagscale.config.arguments.registry import arguments, lookup
from flagscale.config.arguments.values import convert, is_negative_number, shown, word
from flagscale.errors import ConfigError, Problem

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")

_NO_OFF_SWITCH = frozenset({"exit_signal_handler", "use_mcore_models", "manual_gc"})
"""True by default here, but false in Megatron-LM, whose parser has no ``--no-…`` for them."""


def leaves(
    sections: Mapping[Any, Any], prefix: str = "", *, nulls: bool = False
) -> Iterator[tuple[str, str, Any]]:
    """Each leaf of nested sections as dotted path, name in snake case and value; without ``nulls``
    these are left out. Raises ConfigError for a key that is no text."""
    for key, value in sections.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.", nulls=nulls)
        elif not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ConfigError(Problem(path, f"{shown(key)} cannot be the name of an argument"))
        elif value is not None or nulls:
            yield path, key.replace("-", "_"), value


def collisions(sections: Mapping[Any, Any], prefix: str = "") -> list[Problem]:
    """Keys that stand in two sections, whose names are dropped, with unlike values, so that one
    would win unseen."""
    seen: dict[str, tuple[str, Any]] = {}
    problems = []
    for path, name, value in leaves(sections, prefix):
        other, earlier = seen.setdefault(name, (path, value))
        if other != path and _meaning(name, earlier) != _meaning(name, value):
            found = f"{shown(value)} here and {shown(earlier)} as {other}"
            problems.append(Problem(path, f"{name!r} is given twice: {found}; keep one"))
    return problems


def _meaning(name: str, value: Any) -> Any:
    """A value as its argument takes it: ``1`` and ``"1"`` are the same to most."""
    found = lookup(name)
    with suppress(ValueError):  # told elsewhere, unless the program is the user's own
        value = value if found is None else convert(found[0], value)
    # True equals 1, which words tell apart.
    return value if isinstance(value, (list, tuple, Mapping)) else word(value)


def flatten(sections: Mapping[str, Any], *, external: bool = False, prefix: str = "") -> list[str]:
    """The command line of nested sections, in their order.

    ``external`` is for a training program that is not this project's: its own parser judges the
    arguments. ``prefix`` is put in front of keys in messages. Raises ConfigError with every
    problem.
    """
    problems = collisions(sections, prefix)
    argv: list[str] = []
    for name, (path, value) in _once(sections, prefix).items():
        try:
            argv += _argv(name, value, external)
        except ValueError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise ConfigError(problems)
    return argv


def _once(sections: Mapping[str, Any], prefix: str) -> dict[str, tuple[str, Any]]:
    """Each leaf by its name, where it is given first."""
    found: dict[str, tuple[str, Any]] = {}
    for path, name, value in leaves(sections, prefix):
        found.setdefault(name, (path, value))
    return found


def _argv(name: str, value: Any, external: bool) -> list[str]:
    if not external and lookup(name) is None and remark(name):
        return []  # the program would refuse it; the launcher says that it has no effect
    flag = "--" + name.replace("_", "-")
    value = _switch(name, value)
    if isinstance(value, bool):
        return [flag] if value else _switched_off(name, external)
    if isinstance(value, (list, tuple)):
        return [flag, *_items(value)]
    text = word(value)
    # A word that starts with a dash would be taken for the next flag.
    dashed = text.startswith("-") and not is_negative_number(text)
    return [f"{flag}={text}"] if dashed else [flag, text]


def _switch(name: str, value: Any) -> Any:
    """A value; of a switch, true or false however the YAML writes it: a program's own parser may
    take no word after a switch."""
    found = lookup(name)
    if found is None or found[0].kind != "bool" or found[0].many:
        return value
    try:
        return convert(found[0], value)
    except ValueError:
        return value  # a program of the user's own may give the name another meaning


def _switched_off(name: str, external: bool) -> list[str]:
    found = lookup(name)
    if found is None or found[0].kind != "bool":
        return []
    argument, alias = found
    if alias is not None and alias.rule == "opposite":
        # What it is the opposite of is asked for; with another's parser that is the default.
        is_on = external or arguments()[alias.target].default is True
        return [] if is_on else ["--" + alias.target.replace("_", "-")]
    default = argument.default
    has_switch = default is True and name not in _NO_OFF_SWITCH
    needed = has_switch if external else default is not False
    return ["--no-" + name.replace("_", "-")] if needed else []


def _items(values: Sequence[Any]) -> list[str]:
    found = []
    for item in values:
        if item is None or isinstance(item, (Mapping, list, tuple)):
            raise ValueError(f"expected a list of plain values, found {shown(item)} in it")
        text = word(item)
        if text.startswith("-") and not is_negative_number(text):
            raise ValueError(f"an item of a list cannot start with a dash, found {shown(item)}")
        found.append(text)
    return found
