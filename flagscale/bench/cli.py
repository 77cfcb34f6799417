"""Command groups ``flagscale bench`` and ``flagscale comm``: benchmarks, and the list of backends.

Each command is the ``main`` of a benchmark's ``cli`` module. ``flagscale comm bench`` is another
name of ``flagscale bench collectives``; ``groups``, ``pipeline`` and ``agreement`` have the same
name in both groups.
"""

from __future__ import annotations

from functools import partial

from flagscale.comm.base import explain_missing_torch
from flagscale.subcommands import Subcommand, run_group

_LIST_COMMAND = Subcommand(
    "flagscale.comm.listing",
    "every backend a YAML can name, and what is missing for it on this machine",
    usage="[--json]",
)
_COLLECTIVES_COMMAND = Subcommand("flagscale.bench.collectives.cli", "measure collectives")
_COMMUNICATION_COMMANDS = {
    "groups": Subcommand("flagscale.bench.groups.cli", "measure the creation of process groups"),
    "pipeline": Subcommand("flagscale.bench.pipeline.cli", "measure fsccl's pipelined schedules"),
    "agreement": Subcommand(
        "flagscale.bench.agreement.cli", "compare the measurements with those of nccl-tests"
    ),
}
BENCH_COMMANDS = {
    "collectives": _COLLECTIVES_COMMAND,
    **_COMMUNICATION_COMMANDS,
    "traffic": Subcommand(
        "flagscale.bench.traffic.cli", "load a network to a calibrated tail latency"
    ),
    "training": Subcommand(
        "flagscale.bench.training.cli", "compare algorithms by training, with and without traffic"
    ),
    "list": _LIST_COMMAND,
}
COMM_COMMANDS = {
    "list": _LIST_COMMAND,
    "bench": _COLLECTIVES_COMMAND,
    **_COMMUNICATION_COMMANDS,
    "tune": Subcommand(
        "flagscale.comm.fsccl.nvlink_check",
        "measure fsccl's NVLink kernels and keep the table",
        leading_arguments=("--store", "--quick"),
        explain_unavailable=explain_missing_torch,
    ),
}

main_bench = partial(
    run_group,
    "flagscale bench",
    "Benchmarks of collectives, of networks under load, and of training.",
    BENCH_COMMANDS,
)
main_comm = partial(
    run_group,
    "flagscale comm",
    "Communication backends: list and measure them.",
    COMM_COMMANDS,
)
