"""Rules of the copies of the training state in host memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.spec.argument import Values, Violation

INTERVAL = "non_persistent_save_interval"


def check_memory_checkpoints(values: Values) -> Iterator[Violation]:
    """Check that arguments of copies are given only where there are copies."""
    if values[INTERVAL]:
        return
    for name in ("non_persistent_ckpt_type", "replication", "replication_jump"):
        if values[name]:
            yield name, f"requires {INTERVAL}, the steps between copies in memory; leave it out"
