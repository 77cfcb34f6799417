"""Command groups such as ``flagscale comm``, which have commands of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from flagscale.errors import ConfigError


@dataclass(frozen=True)
class Subcommand:
    """Command of a group: ``main(arguments, prog=...)`` of a module, which is imported on use.

    ``summary`` is its help text and ``usage`` its arguments. ``leading_arguments`` are inserted
    before the user's. ``explain_unavailable`` returns the reason why it cannot run here, or None.
    """

    module: str
    summary: str
    leading_arguments: tuple[str, ...] = ()
    usage: str = "..."
    explain_unavailable: Callable[[], str | None] = lambda: None


def run_group(
    prog: str,
    summary: str,
    commands: Mapping[str, Subcommand],
    arguments: Sequence[str],
    *,
    epilog: str = "",
) -> int:
    """Run ``<prog> <arguments>`` and return the exit code. ``epilog`` is appended to the help's
    last line.

    Raises:
        FlagscaleError: a user error.
    """
    lines = [f"  {f'{name} {c.usage}':15} {c.summary}" for name, c in commands.items()]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=summary,
        epilog="\n".join(["commands", *lines, f"each has a --help of its own{epilog}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(commands))
    if not arguments:
        parser.print_help()
        return 2
    # The remaining arguments belong to the command, which parses them itself.
    name = parser.parse_args(arguments[:1]).command
    command = commands[name]
    if problem := command.explain_unavailable():
        raise ConfigError(f"{prog} {name}: {problem}")
    main = import_module(command.module).main
    exit_code: int = main([*command.leading_arguments, *arguments[1:]], prog=f"{prog} {name}")
    return exit_code
