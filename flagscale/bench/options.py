"""``--comm NAME=VALUE ...``: options of communication backends, judged as a YAML's
``train.system.comm`` is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flagscale.bench.command_line import did_you_mean
from flagscale.comm import registry
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError, Problem

FLAG = "--comm"


def add_flag(add: Any) -> None:
    """Give a parser the flag; ``add`` is its ``add_argument``."""
    add(
        FLAG,
        action=_Append,
        nargs="+",
        default=(),
        metavar="NAME=VALUE",
        help="options of the backend, as train.system.comm in a YAML (flagscale comm list)",
    )


class _Append(argparse.Action):
    """The flag may come often."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *values))


def own_words(words: Sequence[str]) -> int:
    """How many of the words behind the flag are its values: those with a ``=``, one at least."""
    count = 0
    while count < len(words) and "=" in words[count] and not words[count].startswith("-"):
        count += 1
    return count


def judge(backends: Sequence[str], words: Sequence[str]) -> dict[str, OptionValues]:
    """The options of each of ``backends``.

    Of several backends each gets the options it has; ``fsccl.debug=INFO`` is meant for one alone.

    Raises:
        ConfigError: with every word that is an option of none, or has an unfit value.
    """
    names = tuple(dict.fromkeys(backends))
    problems: list[Problem] = []
    of_each: dict[str, list[str]] = {name: [] for name in names}
    for word in words:
        owners, own, complaint = _owners(names, word)
        if complaint:
            problems.append(Problem(f"{FLAG} {word.partition('=')[0]}", complaint))
        for owner in owners:
            of_each[owner].append(own)
    found: dict[str, OptionValues] = {}
    for name, own_words in of_each.items():
        try:
            found[name] = registry.options_of(name, own_words)
        except ConfigError as error:
            problems += [replace(p, key=f"{FLAG} {p.key}") for p in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), hint="flagscale comm list")
    return found


def _owners(names: Sequence[str], word: str) -> tuple[Sequence[str], str, str]:
    """The backends a word is meant for, the word for them, and what is wrong with it."""
    key, equals, value = word.partition("=")
    owner, dot, option = key.rpartition(".")
    if dot:
        own = f"{option}{equals}{value}"
        return ((owner,), own, "") if owner in names else ((), own, f"{owner} is not measured")
    if len(names) == 1:
        return names, word, ""
    having = [name for name in names if key in _options(name)]
    if having:
        return having, word, ""
    known = sorted({option for name in names for option in _options(name)})
    return (), word, f"is no option of {' or '.join(names)}{did_you_mean(key, known)}"


def _options(name: str) -> tuple[str, ...]:
    return tuple(option.name for option in registry.backend(name).options)


def shown(values: Mapping[str, Any]) -> str:
    """Options as a header shows them: ``max_ctas=8, net_name=IB``."""
    return ", ".join(f"{name}={value}" for name, value in values.items())
