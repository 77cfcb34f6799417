"""The ways to reach a host, by name. Others come from the entry points ``flagscale.executors``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.hosts.executor import Opener
from flagscale.registry import Registry

EXECUTORS: Registry = Registry(
    "flagscale.executors",
    "way to reach a host",
    {"local": "flagscale.hosts.local:LocalOpener", "ssh": "flagscale.hosts.ssh.opener:SshOpener"},
)


def opener(via: str, settings: Mapping[str, Any]) -> Opener:
    """What reaches hosts in this way. ``settings`` are those of all hosts of a run that are reached
    so. Raises :class:`~flagscale.errors.ConfigError` for a way that nobody knows."""
    made: Opener = EXECUTORS.load(via)(settings)
    return made
