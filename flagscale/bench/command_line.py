"""What the command lines of all measuring commands have in common, ``--comm NAME=VALUE ...`` too:
options of communication backends, judged as a YAML's ``train.system.comm`` is."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

from flagscale.accelerators.registry import AUTO, names, unusable
from flagscale.comm import registry
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError, Problem

COMM = "--comm"
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are the project's errors, with the nearest flag named."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a whole command line.

        Raises:
            ConfigError: a flag is unknown, lacks its value or has a wrong one.
        """
        options, rest = self.parse_known_args(arguments)
        if rest:
            word = rest[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"unexpected argument {word}")
            flags = [flag for flag in self._option_string_actions if len(flag) > 2]
            near = difflib.get_close_matches(word, flags, n=1, cutoff=0.7)
            self.error(f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else ""))
        return options


def add_device(add: Callable[..., object]) -> None:
    """The flag of the device that ranks measure on."""
    kinds = ", ".join(names())
    add("--device", default=AUTO, type=_kind, metavar="KIND", help=f"{kinds} ({AUTO})")


def _kind(word: str) -> str:
    if complaint := unusable(word):
        raise argparse.ArgumentTypeError(complaint)
    return word


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'all_gather'?`` where one of ``known`` is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def filled(kind: type[T], options: argparse.Namespace, **more: Any) -> T:
    """A dataclass: its fields are what is parsed into options of the same names, and ``more``."""
    given = {**vars(options), **more}
    names = [field.name for field in fields(kind) if field.name in given]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names})


def at_least(flag: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ConfigError: ``value`` is less than ``least``.
    """
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value}; expected at least {least}")


def own_words(words: Sequence[str]) -> int:
    """How many words behind ``--comm`` are its values: those with a ``=``, one at least."""
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
    problems: list[Problem] = []
    of_each: dict[str, list[str]] = {name: [] for name in backends}
    for word in words:
        owners, own, complaint = _owners(tuple(of_each), word)
        if complaint:
            problems.append(Problem(f"{COMM} {word.partition('=')[0]}", complaint))
        for owner in owners:
            of_each[owner].append(own)
    found: dict[str, OptionValues] = {}
    for name, own_words in of_each.items():
        try:
            found[name] = registry.options_of(name, own_words)
        except ConfigError as error:
            problems += [replace(p, key=f"{COMM} {p.key}") for p in error.problems]
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
    options = {name: [option.name for option in registry.backend(name).options] for name in names}
    having = [name for name in names if key in options[name]]
    if having:
        return having, word, ""
    known = sorted({option for own in options.values() for option in own})
    return (), word, f"is no option of {' or '.join(names)}{did_you_mean(key, known)}"
