"""Parser of the training program's command line: words to a namespace of typed values. No torch."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.compat.aliases import Alias
from flagscale.config.arguments.compat.unsupported import why_unsupported, why_unused
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import arguments, closest_names, lookup, one_or_many
from flagscale.config.arguments.spec.values import (
    convert,
    describe_expected,
    expand_number_text,
    format_value,
    is_list_expression,
)
from flagscale.errors import ConfigError, Problem


@dataclass(frozen=True)
class _GivenFlag:
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
    for flag in _split_flags(words, problems):
        try:
            evaluated = _evaluate_flag(flag)
        except ValueError as error:
            problems.append(Problem(flag.flag, str(error)))
            continue
        if evaluated is None:
            continue
        target, value = evaluated
        if spelled.setdefault(target, flag.flag) != flag.flag and values[target] != value:
            problems.append(
                Problem(flag.flag, f"contradicts {spelled[target]}: both stand for {target!r}")
            )
        values[target] = value
    if problems:
        raise ConfigError(problems)
    return Namespace(**{name: _copy_default(a.default) for name, a in arguments().items()} | values)


def _copy_default(default: Any) -> Any:
    """Lists of the registry must not be shared with a namespace that may change them."""
    return list(default) if isinstance(default, (list, tuple)) else default


def _split_flags(words: Sequence[str], problems: list[Problem]) -> list[_GivenFlag]:
    """Groups words by flag; ``--flag=value`` is a flag with one word."""
    flags: list[_GivenFlag] = []
    for text in words:
        if text.startswith("--") and len(text) > 2:
            flag, equals, value = text.partition("=")
            flags.append(_GivenFlag(flag, (value,) if equals else ()))
        elif not flags:
            problems.append(Problem(text, "expected a flag such as --num-layers first"))
        else:
            last = flags[-1]
            flags[-1] = _GivenFlag(last.flag, (*last.words, text))
    return flags


def _evaluate_flag(flag: _GivenFlag) -> tuple[str, Any] | None:
    """Target and value of a flag, None when it has no effect; ValueError says what is wrong."""
    found = lookup(flag.name)
    if found is None:
        raise ValueError(unknown_message(flag.name))
    argument, alias = found
    return fold_alias(alias, argument.name, _flag_value(argument, flag.words))


def unknown_message(name: str) -> str:
    """The message about a name that is no argument."""
    reason = why_unsupported(name) or why_unused(name)
    if reason:
        return f"cannot be given: {reason}"
    near = closest_names(name)
    return "unknown argument" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def _flag_value(argument: Argument, words: tuple[str, ...]) -> Any:
    if argument.kind == "bool" and not words:
        return True
    if argument.many:
        return unwrap_single(
            argument, words[0] if len(words) == 1 else words, convert(argument, words)
        )
    if len(words) != 1:
        actual = " ".join(format_value(w) for w in words) if words else "nothing"
        raise ValueError(f"expected {describe_expected(argument)}, found {actual}")
    return convert(argument, words[0])


def unwrap_single(argument: Argument, given: Any, converted: Any) -> Any:
    """The converted value, but for one that was given as no list and means another thing then."""
    expressed = argument.kind == "int" and is_list_expression(str(given))
    expressed = expressed or len(expand_number_text(argument, given)) > 1
    listed = expressed or isinstance(given, (list, tuple))
    return converted if listed or argument.name not in one_or_many() else converted[0]


def fold_alias(alias: Alias | None, name: str, value: Any) -> tuple[str, Any] | None:
    if alias is None:
        return name, value
    translated = alias.translate(value)
    return None if alias.rule == "none" or translated is None else (alias.target, translated)


def help_text() -> str:
    """All arguments with their documentation, for ``--help``."""
    lines = ["Arguments of the training program (--no-NAME switches a boolean off):", ""]
    for argument in sorted(arguments().values(), key=lambda a: a.name):
        default = "" if argument.default is None else f" Default: {argument.default}."
        text = f"{argument.doc} [{describe_expected(argument)}.{default}]"
        lines.append(f"  {argument.flag}")
        lines += textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
