"""Bash by which a host tells what chips it has, put together of what every adapter knows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from flagscale.accelerators.registry import CPU, accelerator, accelerators


def looks() -> dict[str, str]:
    """What to run on a host to count the chips of each kind: see
    :attr:`~flagscale.accelerators.base.Accelerator.look`."""
    return {found.name: found.look for found in accelerators()}


def defaults(devices: Mapping[str, int]) -> Mapping[str, str]:
    """The variables that ranks get on a host with so many ``devices`` of each kind, where nobody
    gives other values: those of the first kind that it has."""
    kinds = (found for found in accelerators() if devices.get(found.name))
    return next(kinds, accelerator(CPU)).defaults


def defaults_of_unprobed() -> Iterator[str]:
    """Lines of bash that set the same on a host that nobody has asked: it looks by itself."""
    word = "if"
    for found in accelerators():
        yield f"{word} {found.present}; then"
        word = "elif"
        if found.defaults_reason:
            yield f"    # {found.defaults_reason}"
        yield from _exports(found.defaults)
    yield "else"
    yield from _exports(accelerator(CPU).defaults)
    yield "fi"


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    if not variables:
        yield "    :"
    for name, value in variables.items():
        quoted = shlex.quote(value)
        word = f"${{{name}:-{quoted}}}"
        # Within double quotes the quotes of a value would be part of it; an assignment needs none.
        yield f'    export {name}="{word}"' if quoted == value else f"    export {name}={word}"
