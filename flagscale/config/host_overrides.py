"""Settings that differ between hosts: iteration over ``device_type_specific`` and
``node_specific``, and notes about their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from flagscale.config import schema
from flagscale.config.arguments.compat.names import why_unsupported, why_unused
from flagscale.config.arguments.spec.registry import lookup


def iter_host_overrides(
    by_type: Mapping[str, schema.HostOverride], by_host: Mapping[str, schema.HostOverride]
) -> Iterator[tuple[str, schema.HostOverride]]:
    """Yield the dotted key and the settings of every device type and host that has its own."""
    for section, overrides in zip(schema.SPECIFIC_SECTIONS, (by_type, by_host), strict=True):
        for name, override in overrides.items():
            yield f"{section}.{name}", override


def note_host_overrides(
    by_type: Mapping[str, schema.HostOverride],
    by_host: Mapping[str, schema.HostOverride],
    program: Path,
) -> Iterator[str]:
    """Yield a note about overridden arguments that only an external ``program`` can interpret."""
    keys = [
        argument.key
        for _, override in iter_host_overrides(by_type, by_host)
        for argument in override.arguments.entries
        if is_external_argument(argument.name)
    ]
    if keys:
        yield (
            f"{', '.join(keys)}: not checked whether ranks may differ in them; only "
            f"{program.name} defines them"
        )


def is_external_argument(name: str) -> bool:
    """Return True if this project neither has nor refuses an argument of this name, so that only an
    external program can have it.
    """
    return lookup(name) is None and why_unsupported(name) is None and why_unused(name) is None
