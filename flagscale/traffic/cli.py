"""``flagscale bench``: traffic between hosts, and what is measured under it."""

from __future__ import annotations

from functools import partial

from flagscale.commands import Command, run_group

COMMANDS = {
    "traffic": Command("flagscale.traffic.launch", "background traffic, calibrated to a tail"),
    "training": Command(
        "flagscale.trials.launch", "models trained under several arms, with and without"
    ),
}

main_bench = partial(
    run_group,
    "flagscale bench",
    "Traffic between hosts, and what is measured under it.",
    COMMANDS,
    more="; `flagscale comm bench` measures collectives",
)
