"""Shared parts of the command lines of all benchmarks, including ``--comm NAME=VALUE ...``:
options of communication backends, validated as a YAML's ``train.system.comm`` is.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

from flagscale.accelerators.registry import AUTO, explain_unusable_kind, list_device_kinds
from flagscale.comm import registry
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError, Problem

COMM = "--comm"
T = TypeVar("T")


class BenchParser(argparse.ArgumentParser):
    """Argument parser that raises the project's errors, with the nearest flag."""

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
        options, remaining = self.parse_known_args(arguments)
        if remaining:
            word = remaining[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"unexpected argument {word}")
            flags = [flag for flag in self._option_string_actions if len(flag) > 2]
            matches = difflib.get_close_matches(word, flags, n=1, cutoff=0.7)
            self.error(
                f"unknown flag {word}" + (f"; did you mean {matches[0]}?" if matches else "")
            )
        return options


def add_device_flag(add: Callable[..., object]) -> None:
    """Add the flag for the ranks' device."""
    kinds = ", ".join(list_device_kinds())
    add(
        "--device",
        default=AUTO,
        type=_device_kind,
        metavar="KIND",
        help=f"device of the ranks: {kinds} ({AUTO})",
    )


def _device_kind(word: str) -> str:
    if reason := explain_unusable_kind(word):
        raise argparse.ArgumentTypeError(reason)
    return word


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'all_gather'?`` if one of ``known`` is similar, else an empty
    text.
    """
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def from_options(kind: type[T], options: argparse.Namespace, **more: Any) -> T:
    """Construct a dataclass from parsed options of the same names, and ``more``."""
    values = {**vars(options), **more}
    names = [field.name for field in fields(kind) if field.name in values]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


def require_at_least(flag: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ConfigError: ``value`` is less than ``least``.
    """
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value}; expected at least {least}")


def count_comm_values(words: Sequence[str]) -> int:
    """Return how many words after ``--comm`` are its values: those that contain ``=``."""
    count = 0
    while count < len(words) and "=" in words[count] and not words[count].startswith("-"):
        count += 1
    return count


def parse_backend_options(backends: Sequence[str], words: Sequence[str]) -> dict[str, OptionValues]:
    """Return the options of each backend.

    With several backends each receives the options it has. ``fsccl.debug=INFO`` is for one
    alone.

    Raises:
        ConfigError: with every word that is no option, or has an invalid value.
    """
    problems: list[Problem] = []
    words_by_backend: dict[str, list[str]] = {name: [] for name in backends}
    for word in words:
        owners, option_word, complaint = _find_owners(tuple(words_by_backend), word)
        if complaint:
            problems.append(Problem(f"{COMM} {word.partition('=')[0]}", complaint))
        for owner in owners:
            words_by_backend[owner].append(option_word)
    options: dict[str, OptionValues] = {}
    for name, count_comm_values in words_by_backend.items():
        try:
            options[name] = registry.parse_backend_options(name, count_comm_values)
        except ConfigError as error:
            problems += [replace(p, key=f"{COMM} {p.key}") for p in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), hint="flagscale comm list")
    return options


def _find_owners(names: Sequence[str], word: str) -> tuple[Sequence[str], str, str]:
    """Return the backends that a word is for, the word without their name, and the error."""
    key, equals, value = word.partition("=")
    owner, dot, option = key.rpartition(".")
    if dot:
        option_word = f"{option}{equals}{value}"
        return (
            ((owner,), option_word, "")
            if owner in names
            else ((), option_word, f"{owner} is not measured")
        )
    if len(names) == 1:
        return names, word, ""
    options = {
        name: [option.name for option in registry.get_backend(name).options] for name in names
    }
    owners = [name for name in names if key in options[name]]
    if owners:
        return owners, word, ""
    option_names = sorted({option for option_word in options.values() for option in option_word})
    return (), word, f"is no option of {' or '.join(names)}{suggest_name(key, option_names)}"
