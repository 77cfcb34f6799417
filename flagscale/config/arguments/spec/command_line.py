"""Writing parsed arguments as the command line of the training program.

Megatron-LM's convention: ``_`` becomes ``-``, names of sections are dropped, a list is
``--key v1 v2``, ``true`` is ``--key``, ``false`` is nothing, or ``--no-key`` where the program's
default is true, and null is "not given". The spelling of the YAML is kept, so that the same
configuration drives a Megatron-LM checkout, whose parser may lack this project's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.config.arguments.compat.unsupported import why_unused
from flagscale.config.arguments.spec.reading import read_arguments
from flagscale.config.arguments.spec.registry import arguments, lookup
from flagscale.config.arguments.spec.train_arguments import GivenArgument, TrainArguments
from flagscale.config.arguments.spec.values import format_value, is_negative_number, to_word
from flagscale.errors import ConfigError, Problem

_NO_OFF_SWITCH = frozenset({"exit_signal_handler", "use_mcore_models", "manual_gc"})
"""True by default here, but false in Megatron-LM, whose parser has no ``--no-…`` for them."""


def command_line(args: TrainArguments, *, external: bool = False) -> list[str]:
    """Return the command line of the training program, in the order of the configuration.

    ``external`` is for a training program that is not this project's: its own parser judges the
    arguments.

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
            problems.append(Problem(argument.key, str(error), argument.place))
    if problems:
        raise ConfigError(problems)
    return argv


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command line of plain values by name."""
    return command_line(read_arguments(values, absolute_paths=False).arguments)


def _words_of_argument(argument: GivenArgument, external: bool) -> list[str]:
    name, value = argument.name, argument.value
    if not external and not argument.known and why_unused(name):
        return []  # the program would refuse it; the launcher reports that it has no effect
    flag = "--" + name.replace("_", "-")
    # A program's own parser may take no word after a switch, however the YAML writes it.
    if isinstance(argument.converted, bool):
        return [flag] if argument.converted else _switched_off(name, external)
    if isinstance(value, (list, tuple)):
        return [flag, *_words_of_list(value)]
    text = to_word(value)
    # A word that starts with a dash would be taken for the next flag.
    dashed = text.startswith("-") and not is_negative_number(text)
    return [f"{flag}={text}"] if dashed else [flag, text]


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


def _words_of_list(values: Sequence[Any]) -> list[str]:
    words = []
    for item in values:
        if item is None or isinstance(item, (Mapping, list, tuple)):
            raise ValueError(f"expected a list of plain values, found {format_value(item)} in it")
        text = to_word(item)
        if text.startswith("-") and not is_negative_number(text):
            raise ValueError(
                f"an item of a list cannot start with a dash, found {format_value(item)}"
            )
        words.append(text)
    return words
