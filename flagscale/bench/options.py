"""Shared parts of the command lines of all benchmarks.

Includes ``--comm NAME=VALUE ...``: options of communication backends, which are validated in the
same way as ``train.system.comm`` of a YAML.
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


def from_options(kind: type[T], options: argparse.Namespace, **overrides: Any) -> T:
    """Construct a dataclass from parsed options of the same names, and from ``overrides``."""
    values = {**vars(options), **overrides}
    names = [field.name for field in fields(kind) if field.name in values]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


def require_at_least(flag: str, value: int | None, minimum: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ConfigError: ``value`` is less than ``minimum``.
    """
    if value is not None and value < minimum:
        raise ConfigError(f"{flag} {value}; expected at least {minimum}")


def count_comm_values(words: Sequence[str]) -> int:
    """Return the number of words after ``--comm`` that are its values: those with ``=``."""
    count = 0
    while count < len(words) and "=" in words[count] and not words[count].startswith("-"):
        count += 1
    return count


def parse_backend_options(backends: Sequence[str], words: Sequence[str]) -> dict[str, OptionValues]:
    """Return the options of each backend from ``NAME=VALUE`` words.

    With several backends, each receives the options that it supports. ``fsccl.debug=INFO`` is for
    one backend alone.

    Raises:
        ConfigError: with every word that is no option, or has an invalid value.
    """
    problems: list[Problem] = []
    words_by_backend: dict[str, list[str]] = {name: [] for name in backends}
    for word in words:
        backend_names, option_word, problem = _match_backends(tuple(words_by_backend), word)
        if problem:
            problems.append(Problem(f"{COMM} {word.partition('=')[0]}", problem))
        for backend_name in backend_names:
            words_by_backend[backend_name].append(option_word)
    options: dict[str, OptionValues] = {}
    for name, backend_words in words_by_backend.items():
        try:
            options[name] = registry.parse_backend_options(name, backend_words)
        except ConfigError as error:
            problems += [replace(p, key=f"{COMM} {p.key}") for p in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), hint="flagscale comm list")
    return options


def _match_backends(backends: Sequence[str], word: str) -> tuple[Sequence[str], str, str]:
    """Return the backends that a word is for, the word without a backend's name, and an error
    message; the message is empty if there is such a backend.
    """
    key, equals, value = word.partition("=")
    owner, dot, option = key.rpartition(".")
    if dot:
        option_word = f"{option}{equals}{value}"
        return (
            ((owner,), option_word, "")
            if owner in backends
            else ((), option_word, f"{owner} is not measured")
        )
    if len(backends) == 1:
        return backends, word, ""
    options = {
        name: [option.name for option in registry.get_backend(name).options] for name in backends
    }
    owners = [name for name in backends if key in options[name]]
    if owners:
        return owners, word, ""
    option_names = sorted({option for option_word in options.values() for option in option_word})
    return (), word, f"is no option of {' or '.join(backends)}{suggest_name(key, option_names)}"
