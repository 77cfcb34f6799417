"""Settings that differ between hosts: ``device_type_specific`` and ``node_specific``."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config import schema
from flagscale.config.arguments.compat.unsupported import why_unsupported, why_unused
from flagscale.config.arguments.spec.registry import lookup


def iter_host_overrides(experiment: schema.Experiment) -> Iterator[tuple[str, schema.HostOverride]]:
    """Every part that is specific to something, with its dotted key."""
    for section, parts in zip(
        schema.SPECIFIC_SECTIONS, (experiment.by_type, experiment.by_host), strict=True
    ):
        for name, specific in parts.items():
            yield f"{section}.{name}", specific


def note_host_overrides(experiment: schema.Experiment) -> Iterator[str]:
    """A note of arguments that differ by host and that only another's program knows."""
    keys = [
        argument.key
        for _, specific in iter_host_overrides(experiment)
        for argument in specific.arguments.entries
        if is_unknown_here(argument.name)
    ]
    if keys:
        yield (
            f"{', '.join(keys)}: whether its ranks may differ in them is for "
            f"{experiment.task.entrypoint.name} to say"
        )


def is_unknown_here(name: str) -> bool:
    """Return whether only another program can have an argument of this name."""
    return lookup(name) is None and why_unsupported(name) is None and why_unused(name) is None
