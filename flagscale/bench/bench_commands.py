"""``flagscale bench``: traffic between hosts, and what is measured under it."""

from __future__ import annotations

from functools import partial

from flagscale.subcommands import Command, run_group

COMMANDS = {
    "traffic": Command("flagscale.bench.traffic.cli", "background traffic, calibrated to a tail"),
    "training": Command(
        "flagscale.bench.training.cli", "models trained under several arms, with and without"
    ),
}

main_bench = partial(
    run_group,
    "flagscale bench",
    "Traffic between hosts, and what is measured under it.",
    COMMANDS,
    more="; `flagscale comm bench` measures collectives",
)
