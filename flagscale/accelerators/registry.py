"""The kinds of chips that ``device`` can name, installed ones among them.

A package adds one by an entry point, whose name is the kind::

    [project.entry-points."flagscale.accelerators"]
    npu = "my_package.chip:Npu"

It names an :class:`~flagscale.accelerators.base.Accelerator`, or a class of one that takes no
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
"""The kind of every machine."""
ACCELERATORS = Registry(
    "flagscale.accelerators",
    "kind of device",
    {
        "cuda": "flagscale.accelerators.cuda:Cuda",
        CPU: "flagscale.accelerators.cpu:Cpu",
    },
)
# Kinds become names of variables and functions of the shell.
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def names() -> list[str]:
    """The kinds that a YAML may name, ``auto`` and the CPU first."""
    return [AUTO, CPU, *(name for name in ACCELERATORS.names() if name != CPU)]


@cache
def accelerator(kind: str) -> Accelerator:
    """The adapter of ``kind``.

    Raises:
        ConfigError: there is none, or a package's does not load; the message says which.
    """
    if ACCELERATORS.missing(kind):
        known = ", ".join(names())
        raise ConfigError(f"no kind of device is called {kind!r}; known: {known}")
    made: Accelerator = ACCELERATORS.made(kind, Accelerator)
    if not _NAME.fullmatch(kind):
        raise ConfigError(
            f"the kind {kind!r} of {type(made).__module__}: expected a to z, 0 to 9, _"
        )
    return made


def unusable(wanted: str) -> str:
    """Why nobody can be told to use this kind, in words; empty where it is one, or ``auto``."""
    try:
        if wanted != AUTO:
            accelerator(wanted)
    except ConfigError as error:
        return error.message
    return ""


@cache
def _found() -> tuple[tuple[Accelerator, ...], Mapping[str, str]]:
    usable, broken = [], {}
    for kind in ACCELERATORS.names():
        try:
            usable.append(accelerator(kind))
        except ConfigError as error:
            broken[kind] = error.message
    return tuple(usable), broken


def every() -> tuple[Accelerator, ...]:
    """All adapters that load, in the order in which ``auto`` looks for devices: this project's,
    those of packages by name, and the CPU last."""
    usable = _found()[0]
    return (*(a for a in usable if a.name != CPU), accelerator(CPU))


def accelerators() -> tuple[Accelerator, ...]:
    """All but the CPU."""
    return every()[:-1]


def broken() -> Mapping[str, str]:
    """The kinds of packages that do not load, with the reason."""
    return _found()[1]


def preferred(wanted: str, devices: Mapping[str, int]) -> str:
    """The kind that ranks of a host use where a YAML says ``wanted`` and the host has so many
    ``devices`` of each kind. Needs no torch."""
    if wanted != AUTO:
        return wanted
    return next((a.name for a in accelerators() if devices.get(a.name)), CPU)


def chosen(wanted: str) -> Accelerator:
    """The kind that this process uses where it is told ``wanted``: of ``auto`` the first whose
    devices torch can use, else the CPU. Imports torch.

    Raises:
        ConfigError: no kind is called so, or its adapter does not load.
    """
    if wanted != AUTO:
        return accelerator(wanted)
    return next(a for a in every() if a.missing() is None)
