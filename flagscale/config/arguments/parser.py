"""The training program's command line: words to a namespace of typed values. No torch."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.aliases import Alias
from flagscale.config.arguments.expressions import looks_like_one
from flagscale.config.arguments.foreign import refusal, remark
from flagscale.config.arguments.registry import (
    arguments,
    closest,
    lookup,
    one_or_many,
)
from flagscale.config.arguments.spec import Argument
from flagscale.config.arguments.values import convert, expected, shown, written_out
from flagscale.errors import ConfigError, Problem


@dataclass(frozen=True)
class _Given:
    """A flag as it stands on the command line, with the words that follow it."""

    flag: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def parse_arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The arguments of ``argv`` (the process's own without it).

    Every argument of the registry is an attribute in snake case: its given value or its default.
    Aliases are canonical into the argument they stand for. ``many`` arguments are lists, or None.
    Of a flag given twice the last counts. ``--help`` prints all arguments and exits.

    Raises ConfigError with every problem: unknown flags, wrong types and values, two spellings of
    one argument that disagree.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(help_text())
        raise SystemExit(0)
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for given in _split(words, problems):
        try:
            evaluated = _evaluate(given)
        except ValueError as error:
            problems.append(Problem(given.flag, str(error)))
            continue
        if evaluated is None:
            continue
        target, value = evaluated
        if spelled.setdefault(target, given.flag) != given.flag and values[target] != value:
            problems.append(
                Problem(given.flag, f"contradicts {spelled[target]}: both stand for {target!r}")
            )
        values[target] = value
    if problems:
        raise ConfigError(problems)
    return Namespace(**{name: _copy(a.default) for name, a in arguments().items()} | values)


def _copy(default: Any) -> Any:
    """Lists of the registry must not be shared with a namespace that may change them."""
    return list(default) if isinstance(default, (list, tuple)) else default


def _split(words: Sequence[str], problems: list[Problem]) -> list[_Given]:
    """Groups words by flag; ``--flag=value`` is a flag with one word."""
    found: list[_Given] = []
    for text in words:
        if text.startswith("--") and len(text) > 2:
            flag, equals, value = text.partition("=")
            found.append(_Given(flag, (value,) if equals else ()))
        elif not found:
            problems.append(Problem(text, "expected a flag such as --num-layers first"))
        else:
            last = found[-1]
            found[-1] = _Given(last.flag, (*last.words, text))
    return found


def _evaluate(given: _Given) -> tuple[str, Any] | None:
    """Target and value of a flag, None when it has no effect; ValueError says what is wrong."""
    found = lookup(given.name)
    if found is None:
        raise ValueError(unknown(given.name))
    argument, alias = found
    return _folded(alias, argument.name, _value(argument, given.words))


def unknown(name: str) -> str:
    """The message about a name that is no argument."""
    reason = refusal(name) or remark(name)
    if reason:
        return f"cannot be given: {reason}"
    near = closest(name)
    return "unknown argument" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def _value(argument: Argument, words: tuple[str, ...]) -> Any:
    if argument.kind == "bool" and not words:
        return True
    if argument.many:
        return _single(argument, words[0] if len(words) == 1 else words, convert(argument, words))
    if len(words) != 1:
        found = " ".join(shown(w) for w in words) if words else "nothing"
        raise ValueError(f"expected {expected(argument)}, found {found}")
    return convert(argument, words[0])


def canonicalise(name: str, value: Any) -> tuple[str, Any] | None:
    """The argument and the value that a name with a YAML value stands for.

    None when it has no effect: it is noted elsewhere, or a switch of Megatron-LM's that is off.
    Raises ValueError for an unknown name or an unfit value.
    """
    found = lookup(name)
    if found is None:
        if remark(name) or (refusal(name) and value is False):
            return None
        raise ValueError(unknown(name))
    argument, alias = found
    return _folded(alias, argument.name, _single(argument, value, convert(argument, value)))


def _single(argument: Argument, given: Any, converted: Any) -> Any:
    """The converted value, but for one that was given as no list and means another thing then."""
    expressed = argument.kind == "int" and looks_like_one(str(given))
    expressed = expressed or len(written_out(argument, given)) > 1
    listed = expressed or isinstance(given, (list, tuple))
    return converted if listed or argument.name not in one_or_many() else converted[0]


def _folded(alias: Alias | None, name: str, value: Any) -> tuple[str, Any] | None:
    if alias is None:
        return name, value
    translated = alias.translate(value)
    return None if alias.rule == "none" or translated is None else (alias.target, translated)


def help_text() -> str:
    """All arguments with their documentation, for ``--help``."""
    lines = ["Arguments of the training program (--no-NAME switches a boolean off):", ""]
    for argument in sorted(arguments().values(), key=lambda a: a.name):
        default = "" if argument.default is None else f" Default: {argument.default}."
        text = f"{argument.doc} [{expected(argument)}.{default}]"
        lines.append(f"  {argument.flag}")
        lines += textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
