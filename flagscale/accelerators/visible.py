"""Interpretation of ``*_VISIBLE_DEVICES`` variables, and the number of ranks that follows from
them.

Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from flagscale.accelerators.registry import (
    AUTO,
    CPU,
    choose_kind,
    get_accelerator,
    list_device_accelerators,
)

_VARIABLE_SUFFIX = "_VISIBLE_DEVICES"
# Read by the container runtime, not by the job: its value is `all` or uses the host's numbering.
_CONTAINER_VARIABLE = "NVIDIA_VISIBLE_DEVICES"


def count_visible_devices(environment: Mapping[str, str], kind: str = CPU) -> int | None:
    """Return the number of devices that ``*_VISIBLE_DEVICES`` variables leave visible.

    It is the smallest where several are set, and None where none sets a limit. ``kind`` is the
    kind of device that ranks use; variables of other kinds are ignored, unless it is the CPU.

    The entries of a list such as ``0,1`` or ``GPU-8a…,MIG-3f…`` are counted. ``all`` is no
    limit. An empty value or ``-1`` hides every device, so ranks cannot be counted by devices: no
    limit either.
    """
    kind_by_variable = {
        adapter.visible_variable: adapter.name for adapter in list_device_accelerators()
    }
    counts = [
        _count_entries(value)
        for name, value in environment.items()
        if (
            name in kind_by_variable
            or (name.endswith(_VARIABLE_SUFFIX) and name != _CONTAINER_VARIABLE)
        )
        and kind in (CPU, kind_by_variable.get(name, kind))
    ]
    return min((count for count in counts if count is not None), default=None)


def _count_entries(value: str) -> int | None:
    terminators = ("", "-1", "all", "none", "void", "NoDevFiles")
    # CUDA reads a list up to the first entry that is invalid. -1 and empty entries end it.
    valid_entries = takewhile(lambda entry: entry.strip() not in terminators, value.split(","))
    return len(list(valid_entries)) or None


def hides_all_devices(environment: Mapping[str, str], kind: str) -> bool:
    """Return True if the variable of this kind is set and hides every device."""
    value = environment.get(get_accelerator(kind).visible_variable or "")
    return value is not None and _count_entries(value) is None and value.strip() != "all"


def choose_visible_kind(
    configured_kind: str, devices: Mapping[str, int], environment: Mapping[str, str]
) -> str:
    """Return the kind of device that ranks use.

    ``configured_kind`` is the kind in the YAML. ``auto`` selects the first kind of ``devices`` that
    ``environment`` does not hide, else the CPU.
    """
    return choose_kind(
        configured_kind,
        {k: n for k, n in devices.items() if n and not hides_all_devices(environment, k)},
    )


def count_automatic_ranks(
    environment: Mapping[str, str], devices: Mapping[str, int], configured_kind: str = AUTO
) -> int:
    """Return the number of ranks for ``nproc_per_node: auto``.

    It is the number of devices that are installed and visible, or 1 without any.
    ``configured_kind`` is the kind in the YAML; ``cpu`` is treated like ``auto``. Devices of
    unknown kinds are counted by their variable alone.
    """
    kind = choose_visible_kind(
        AUTO if configured_kind == CPU else configured_kind, devices, environment
    )
    visible = count_visible_devices(environment, kind)
    installed = devices.get(kind)
    if installed and not hides_all_devices(environment, kind):
        return min(installed, visible or installed)
    known_variables = {adapter.visible_variable for adapter in list_device_accelerators()}
    unknown_variables = {
        name: value for name, value in environment.items() if name not in known_variables
    }
    return count_visible_devices(unknown_variables) or 1
