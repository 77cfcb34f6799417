"""``flagscale comm``: the backends of this machine, and what measures them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from flagscale.comm.base import missing_torch
from flagscale.errors import ConfigError

_COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "bench": ("flagscale.bench.collectives.launch", (), "measure collectives"),
    "groups": ("flagscale.bench.groups.launch", (), "measure the creation of process groups"),
    "pipeline": ("flagscale.bench.pipeline.launch", (), "measure fsccl's pipelined schedules"),
    "tune": (
        *("flagscale.comm.fsccl.nvlink_check", ("--store", "--quick")),
        "measure fsccl's NVLink kernels and keep the table",
    ),
}
"""Of each command its module, whose ``main`` it is, the words it begins with, and what it does."""

_LINES = [f"  {name + ' ...':15} {about[2]}" for name, about in _COMMANDS.items()]
_EPILOG = """\
commands
  list [--json]   every backend a YAML can name, and what is missing for it on this machine
{lines}
each has a --help of its own"""


def main_comm(words: Sequence[str]) -> int:
    """Run ``flagscale comm <words>``; the exit code.

    Raises:
        FlagscaleError: for what the user can mend.
    """
    parser = argparse.ArgumentParser(
        prog="flagscale comm",
        description="Communication backends: list and measure them.",
        epilog=_EPILOG.format(lines="\n".join(_LINES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("list", *_COMMANDS))
    if not words:
        parser.print_help()
        return 2
    # What follows belongs to the command, which parses it itself.
    command, rest = parser.parse_args(words[:1]).command, list(words[1:])
    if command == "list":
        options = argparse.ArgumentParser(prog="flagscale comm list")
        options.add_argument("--json", action="store_true", help="for programs")
        from flagscale.comm.listing import show

        show("json" if options.parse_args(rest).json else "table")
        return 0
    if command == "tune" and (missing := missing_torch()):
        raise ConfigError(f"flagscale comm tune measures GPUs: {missing}")
    module, first, _ = _COMMANDS[command]
    code: int = import_module(module).main([*first, *rest], prog=f"flagscale comm {command}")
    return code
