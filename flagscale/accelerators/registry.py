"""Registry of the kinds of devices that ``device`` can name, including those of installed packages.

A package adds a kind by an entry point, whose name is the kind::

    [project.entry-points."flagscale.accelerators"]
    npu = "my_package.chip:Npu"

It refers to an :class:`~flagscale.accelerators.base.Accelerator`, or a subclass that takes no
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from flagscale.accelerators.base import Accelerator
from flagscale.errors import ConfigError
from flagscale.registry import Registry

AUTO = "auto"
CPU = "cpu"
"""The kind of device that every machine has."""
ACCELERATORS = Registry(
    "flagscale.accelerators",
    "kind of device",
    {
        "cuda": "flagscale.accelerators.cuda:Cuda",
        CPU: "flagscale.accelerators.cpu:Cpu",
    },
)
# Kinds become part of names of shell variables and functions.
_KIND_PATTERN = re.compile(r"[a-z][a-z0-9_]*")


def list_device_kinds() -> list[str]:
    """Return the kinds that a YAML may name, ``auto`` and the CPU first."""
    return [AUTO, CPU, *(name for name in ACCELERATORS.names() if name != CPU)]


@cache
def get_accelerator(kind: str) -> Accelerator:
    """Return the adapter of ``kind``.

    Raises:
        ConfigError: the kind is unknown, or a package's adapter fails to load.
    """
    if ACCELERATORS.explain_missing(kind):
        kinds = ", ".join(list_device_kinds())
        raise ConfigError(f"no kind of device is called {kind!r}; known: {kinds}")
    adapter: Accelerator = ACCELERATORS.create(kind, Accelerator)
    if not _KIND_PATTERN.fullmatch(kind):
        raise ConfigError(
            f"the kind {kind!r} of {type(adapter).__module__}: expected a to z, 0 to 9, _"
        )
    return adapter


def explain_unusable_kind(kind: str) -> str:
    """Return the reason why a kind cannot be used; empty for a valid kind or ``auto``."""
    try:
        if kind != AUTO:
            get_accelerator(kind)
    except ConfigError as error:
        return error.message
    return ""


@cache
def _load_all() -> tuple[tuple[Accelerator, ...], Mapping[str, str]]:
    usable, broken = [], {}
    for kind in ACCELERATORS.names():
        try:
            usable.append(get_accelerator(kind))
        except ConfigError as error:
            broken[kind] = error.message
    return tuple(usable), broken


def list_accelerators() -> tuple[Accelerator, ...]:
    """Return all adapters that load, in the order in which ``auto`` tries them.

    These are the built-in ones, those of packages by name, and the CPU last.
    """
    usable = _load_all()[0]
    return (*(a for a in usable if a.name != CPU), get_accelerator(CPU))


def list_device_accelerators() -> tuple[Accelerator, ...]:
    """Return all adapters that load, without the CPU."""
    return list_accelerators()[:-1]


def list_broken_kinds() -> Mapping[str, str]:
    """Return the kinds of packages that fail to load, with the reason."""
    return _load_all()[1]


def choose_kind(kind: str, devices: Mapping[str, int]) -> str:
    """Return the kind that ranks of a host use.

    ``kind`` is the kind in the YAML; ``auto`` selects the first kind of which the host has
    ``devices``. Works without torch.
    """
    if kind != AUTO:
        return kind
    return next((a.name for a in list_device_accelerators() if devices.get(a.name)), CPU)


def choose_accelerator(kind: str) -> Accelerator:
    """Return the adapter that this process uses for ``kind``.

    ``auto`` selects the first kind whose devices torch can use, else the CPU. Imports torch.

    Raises:
        ConfigError: the kind is unknown, or its adapter fails to load.
    """
    if kind != AUTO:
        return get_accelerator(kind)
    return next(a for a in list_accelerators() if a.explain_unavailable() is None)
