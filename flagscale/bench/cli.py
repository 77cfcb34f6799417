"""``flagscale comm``: the backends of this machine, and what measures them."""

from __future__ import annotations

from functools import partial

from flagscale.comm.base import missing_torch
from flagscale.subcommands import Command, run_group

_COMMANDS = {
    "list": Command(
        "flagscale.comm.listing",
        "every backend a YAML can name, and what is missing for it on this machine",
        shown="[--json]",
    ),
    "bench": Command("flagscale.bench.collectives.cli", "measure collectives"),
    "groups": Command("flagscale.bench.groups.cli", "measure the creation of process groups"),
    "pipeline": Command("flagscale.bench.pipeline.cli", "measure fsccl's pipelined schedules"),
    "tune": Command(
        "flagscale.comm.fsccl.nvlink_check",
        "measure fsccl's NVLink kernels and keep the table",
        first=("--store", "--quick"),
        lacks=missing_torch,
    ),
}

main_comm = partial(
    run_group, "flagscale comm", "Communication backends: list and measure them.", _COMMANDS
)
