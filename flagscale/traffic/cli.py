"""``flagscale bench``: traffic between hosts, and what is measured under it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

COMMANDS: dict[str, tuple[str, str]] = {
    "traffic": ("flagscale.traffic.launch", "background traffic, calibrated to a tail"),
    "training": ("flagscale.trials.launch", "models trained under several arms, with and without"),
}
"""Of each command its module, whose ``main(words, prog=...)`` it is, and what it does. Modules are
looked up when they are asked for."""

_EPILOG = """\
commands
{lines}
each has a --help of its own; `flagscale comm bench` measures collectives"""


def main_bench(words: Sequence[str]) -> int:
    """Run ``flagscale bench <words>``; the exit code.

    Raises:
        FlagscaleError: for what the user can mend.
    """
    lines = "\n".join(f"  {name + ' ...':15} {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="flagscale bench",
        description="Traffic between hosts, and what is measured under it.",
        epilog=_EPILOG.format(lines=lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(COMMANDS))
    if not words:
        parser.print_help()
        return 2
    # What follows belongs to the command, which parses it itself.
    command = parser.parse_args(words[:1]).command
    module, _ = COMMANDS[command]
    code: int = import_module(module).main(list(words[1:]), prog=f"flagscale bench {command}")
    return code
