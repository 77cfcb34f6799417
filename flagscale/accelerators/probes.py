"""Bash code by which a host reports its devices, assembled from all adapters."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from flagscale.accelerators.registry import CPU, get_accelerator, list_device_accelerators


def count_scripts() -> dict[str, str]:
    """Return the commands that count the devices of a host, by kind. See
    :attr:`~flagscale.accelerators.base.Accelerator.count_script`.
    """
    return {adapter.name: adapter.count_script for adapter in list_device_accelerators()}


def default_variables(devices: Mapping[str, int]) -> Mapping[str, str]:
    """Return the default variables of ranks on a host with these numbers of ``devices`` by kind.

    They are those of the first kind that the host has. The user's values take precedence.
    """
    present_adapters = (
        adapter for adapter in list_device_accelerators() if devices.get(adapter.name)
    )
    return next(present_adapters, get_accelerator(CPU)).default_variables


def default_variables_script() -> Iterator[str]:
    """Yield bash lines that set the same variables on a host that was not probed, by checking it
    there.
    """
    keyword = "if"
    for adapter in list_device_accelerators():
        yield f"{keyword} {adapter.presence_condition}; then"
        keyword = "elif"
        if adapter.default_variables_reason:
            yield f"    # {adapter.default_variables_reason}"
        yield from _iter_exports(adapter.default_variables)
    yield "else"
    yield from _iter_exports(get_accelerator(CPU).default_variables)
    yield "fi"


def _iter_exports(variables: Mapping[str, str]) -> Iterator[str]:
    if not variables:
        yield "    :"
    for name, value in variables.items():
        quoted = shlex.quote(value)
        expansion = f"${{{name}:-{quoted}}}"
        # Within double quotes, the quotes of a value would be part of it. An assignment needs none.
        yield (
            f'    export {name}="{expansion}"'
            if quoted == value
            else f"    export {name}={expansion}"
        )
