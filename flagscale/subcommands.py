"""A word of the command line with commands of its own below it, such as ``flagscale comm``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from flagscale.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """What a word stands for: ``main(words, prog=...)`` of a module, which is looked up when it is
    asked for. ``first``: the words it begins with; ``lacks`` says why it cannot run here."""

    module: str
    about: str
    first: tuple[str, ...] = ()
    shown: str = "..."
    lacks: Callable[[], str | None] = lambda: None


def run_group(
    prog: str, about: str, commands: Mapping[str, Command], words: Sequence[str], *, more: str = ""
) -> int:
    """Run ``<prog> <words>``; the exit code. ``more`` is the help's last word.

    Raises:
        FlagscaleError: for what the user can mend.
    """
    lines = [f"  {f'{name} {one.shown}':15} {one.about}" for name, one in commands.items()]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog="\n".join(["commands", *lines, f"each has a --help of its own{more}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(commands))
    if not words:
        parser.print_help()
        return 2
    # What follows belongs to the command, which parses it itself.
    name = parser.parse_args(words[:1]).command
    command = commands[name]
    if missing := command.lacks():
        raise ConfigError(f"{prog} {name}: {missing}")
    main = import_module(command.module).main
    code: int = main([*command.first, *words[1:]], prog=f"{prog} {name}")
    return code
