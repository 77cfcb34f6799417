"""Command line of the training program: formatting by the launcher, parsing by the ranks. No torch.

The format is Megatron-LM's: ``_`` becomes ``-``, names of sections are dropped, a list is
``--key v1 v2``, ``true`` is ``--key``, and null means "not given". ``false`` is omitted, or
``--no-key`` if the default is true. Names are spelled as in the YAML, so that the same
configuration works with a Megatron-LM checkout, whose parser may lack the names of this project.
"""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.compat.names import why_unused
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import (
    arguments,
    fold_alias,
    lookup,
    unknown_message,
    unwrap_single,
)
from flagscale.config.arguments.spec.train_arguments import (
    GivenArgument,
    TrainArguments,
    read_arguments,
)
from flagscale.config.arguments.spec.values import (
    convert,
    describe_expected,
    format_value,
    is_negative_number,
    to_word,
)
from flagscale.errors import ConfigError, Problem

_NO_OFF_SWITCH = frozenset({"exit_signal_handler", "use_mcore_models", "manual_gc"})
"""Arguments that are true by default here, but false in Megatron-LM, whose parser has no ``--no-…``
for them."""


def command_line(args: TrainArguments, *, external: bool = False) -> list[str]:
    """Return the command line of the training program, in the order of the configuration.

    Args:
        args: the arguments of the configuration.
        external: the training program is not this project's; its own parser checks the arguments.

    Raises:
        ConfigError: with every value that a command line cannot express.
    """
    problems = []
    argv: list[str] = []
    written = set()
    for argument in args:
        if argument.name in written:
            continue  # repeated in another section, with the same value
        written.add(argument.name)
        try:
            argv += _words_of_argument(argument, external)
        except ValueError as error:
            problems.append(Problem(argument.key, str(error), argument.location))
    if problems:
        raise ConfigError(problems)
    return argv


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command line of plain values by name."""
    return command_line(read_arguments(values, absolute_paths=False).arguments)


def _words_of_argument(argument: GivenArgument, external: bool) -> list[str]:
    name, value = argument.name, argument.value
    if not external and not argument.known and why_unused(name):
        return []  # the program would reject it; the launcher reports that it has no effect
    flag = "--" + name.replace("_", "-")
    # Parsers of other programs may not accept a word after a switch. `converted` is a bool also if
    # the configuration has the text "true"; other values are written as they are spelled there.
    if isinstance(argument.converted, bool):
        return [flag] if argument.converted else _switched_off(name, external)
    if isinstance(value, (list, tuple)):
        return [flag, *_words_of_list(value)]
    text = to_word(value)
    # A word that starts with a dash would be parsed as the next flag.
    dashed = text.startswith("-") and not is_negative_number(text)
    return [f"{flag}={text}"] if dashed else [flag, text]


def _switched_off(name: str, external: bool) -> list[str]:
    """Return the words for a boolean that is false.

    ================================  ============================  ================================
    Argument                          This project's program        External program
    ================================  ============================  ================================
    default false                     none                          none
    default true                      ``--no-name``                 ``--no-name``, or none if it is
                                                                    in :data:`_NO_OFF_SWITCH`
    default null                      ``--no-name``                 none
    alias with the opposite meaning   the flag of its target,       none
                                      unless that is on by default
    not a boolean, or unknown         none                          none
    ================================  ============================  ================================
    """
    match = lookup(name)
    if match is None or match[0].kind != "bool":
        return []
    argument, alias = match
    if alias is not None and alias.rule == "opposite":
        # Switching the alias off switches its target on, which is the default of other parsers.
        is_on = external or arguments()[alias.target].default is True
        return [] if is_on else ["--" + alias.target.replace("_", "-")]
    default = argument.default
    has_switch = default is True and name not in _NO_OFF_SWITCH
    needed = has_switch if external else default is not False
    return ["--no-" + name.replace("_", "-")] if needed else []


def _words_of_list(values: Sequence[Any]) -> list[str]:
    words = []
    for item in values:
        if item is None or isinstance(item, (Mapping, list, tuple)):
            raise ValueError(f"expected a list of scalars, found the item {format_value(item)}")
        text = to_word(item)
        if text.startswith("-") and not is_negative_number(text):
            raise ValueError(
                f"items of a list must not start with a dash, found {format_value(item)}"
            )
        words.append(text)
    return words


@dataclass(frozen=True)
class _FlagWords:
    """A flag of a command line and the words that follow it."""

    flag: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def parse_arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Parse a command line.

    Every argument of the registry is an attribute of the result, in snake case, with the given
    value or the default. Aliases set the argument that they stand for. Arguments that take several
    values (:attr:`.Argument.many`) are lists or None. If a flag is given twice, the last value
    counts. ``--help`` prints all arguments and exits.

    Args:
        argv: words of the command line; None: those of this process.

    Raises:
        ConfigError: with every problem: unknown flags, invalid values, and contradicting spellings
            of one argument.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(help_text())
        raise SystemExit(0)
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    flag_by_argument: dict[str, str] = {}
    for flag in _split_flags(words, problems):
        try:
            evaluated = _evaluate_flag(flag)
        except ValueError as error:
            problems.append(Problem(flag.flag, str(error)))
            continue
        if evaluated is None:
            continue
        target, value = evaluated
        first_flag = flag_by_argument.setdefault(target, flag.flag)
        if first_flag != flag.flag and values[target] != value:
            problems.append(Problem(flag.flag, f"contradicts {first_flag}: both set {target!r}"))
        values[target] = value
    if problems:
        raise ConfigError(problems)
    return Namespace(**{name: _copy_default(a.default) for name, a in arguments().items()} | values)


def _copy_default(default: Any) -> Any:
    """Copy a default that is a list, because a namespace may modify it."""
    return list(default) if isinstance(default, (list, tuple)) else default


def _split_flags(words: Sequence[str], problems: list[Problem]) -> list[_FlagWords]:
    """Group words by flag; ``--flag=value`` is a flag with one word."""
    flags: list[_FlagWords] = []
    for text in words:
        if text.startswith("--") and len(text) > 2:
            flag, equals, value = text.partition("=")
            flags.append(_FlagWords(flag, (value,) if equals else ()))
        elif not flags:
            problems.append(Problem(text, "expected a flag such as --num-layers before values"))
        else:
            last = flags[-1]
            flags[-1] = _FlagWords(last.flag, (*last.words, text))
    return flags


def _evaluate_flag(flag: _FlagWords) -> tuple[str, Any] | None:
    """Return argument and value of a flag; None if it has no effect.

    Raises:
        ValueError: the flag is unknown or its value is invalid.
    """
    match = lookup(flag.name)
    if match is None:
        raise ValueError(unknown_message(flag.name))
    argument, alias = match
    return fold_alias(alias, argument.name, _flag_value(argument, flag.words))


def _flag_value(argument: Argument, words: tuple[str, ...]) -> Any:
    if argument.kind == "bool" and not words:
        return True
    if argument.many:
        given = words[0] if len(words) == 1 else words
        return unwrap_single(argument, given, convert(argument, words))
    if len(words) != 1:
        actual = " ".join(format_value(w) for w in words) if words else "nothing"
        raise ValueError(f"expected {describe_expected(argument)}, found {actual}")
    return convert(argument, words[0])


def help_text() -> str:
    """Return the text of ``--help``: all arguments with their documentation."""
    lines = ["Arguments of the training program (--no-NAME switches a boolean off):", ""]
    for argument in sorted(arguments().values(), key=lambda a: a.name):
        default = "" if argument.default is None else f" Default: {argument.default}."
        text = f"{argument.doc} [{describe_expected(argument)}.{default}]"
        lines.append(f"  {argument.flag}")
        lines += textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
