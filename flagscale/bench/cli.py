"""``flagscale comm``: the backends of this machine, and what measures them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flagscale.comm.base import missing_torch
from flagscale.errors import ConfigError

_EPILOG = """\
commands
  list [--json]   every backend a YAML can name, and what is missing for it on this machine
  bench ...       measure collectives; flagscale comm bench --help
  groups ...      measure the creation of process groups; flagscale comm groups --help
  tune ...        measure fsccl's NVLink kernels and keep the table; flagscale comm tune --help
  pipeline ...    measure fsccl's pipelined schedules; flagscale comm pipeline --help
"""


def main_comm(words: Sequence[str]) -> int:
    """Run ``flagscale comm <words>``; the exit code.

    Raises:
        FlagscaleError: for what the user can mend.
    """
    parser = argparse.ArgumentParser(
        prog="flagscale comm",
        description="Communication backends: list and measure them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("list", "bench", "groups", "pipeline", "tune"))
    if not words:
        parser.print_help()
        return 2
    # What follows belongs to the command, which parses it itself.
    command, rest = parser.parse_args(words[:1]).command, list(words[1:])
    if command == "bench":
        from flagscale.bench.collectives.launch import main

        return main(rest, prog="flagscale comm bench")
    if command == "groups":
        from flagscale.bench.groups.launch import main as main_groups

        return main_groups(rest, prog="flagscale comm groups")
    if command == "pipeline":
        from flagscale.bench.pipeline.launch import main as main_pipeline

        return main_pipeline(rest, prog="flagscale comm pipeline")
    if command == "tune":
        if missing := missing_torch():
            raise ConfigError(f"flagscale comm tune measures GPUs: {missing}")
        from flagscale.comm.fsccl.nvlink_check import main as main_tune

        return main_tune(["--store", "--quick", *rest], prog="flagscale comm tune")
    options = argparse.ArgumentParser(prog="flagscale comm list")
    options.add_argument("--json", action="store_true", help="for programs")
    from flagscale.comm.listing import show

    show("json" if options.parse_args(rest).json else "table")
    return 0
