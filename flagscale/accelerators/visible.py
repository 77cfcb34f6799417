"""Which devices of a host are left to ranks: what ``*_VISIBLE_DEVICES`` variables mean, and how
many ranks that makes. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from flagscale.accelerators.registry import AUTO, CPU, accelerator, accelerators, preferred

_SUFFIX = "_VISIBLE_DEVICES"
# Speaks to the container runtime, not to the job: it is `all` or the host's numbering.
_NOT_FOR_JOBS = "NVIDIA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str], kind: str = CPU) -> int | None:
    """How many devices ``*_VISIBLE_DEVICES`` variables leave visible, the fewest where several
    are set; None where none limits anything. ``kind``: what the ranks use; variables of other
    kinds are nothing to them, unless that is the CPU.

    A list such as ``0,1`` or ``GPU-8a…,MIG-3f…`` counts its entries. ``all`` is no limit. An empty
    value or ``-1`` hides every device, so the job has none to be counted by: no limit either.
    """
    known = {found.visible_variable: found.name for found in accelerators()}
    counts = [
        _entries(value)
        for name, value in environment.items()
        if (name in known or (name.endswith(_SUFFIX) and name != _NOT_FOR_JOBS))
        and kind in (CPU, known.get(name, kind))
    ]
    return min((count for count in counts if count is not None), default=None)


def _entries(value: str) -> int | None:
    none = ("", "-1", "all", "none", "void", "NoDevFiles")
    # CUDA reads a list up to the first entry that it does not know; -1 and empty end it.
    kept = takewhile(lambda entry: entry.strip() not in none, value.split(","))
    return len(list(kept)) or None


def hidden(environment: Mapping[str, str], kind: str) -> bool:
    """Whether the variable of this kind of chip is set and hides every device."""
    value = environment.get(accelerator(kind).visible_variable or "")
    return value is not None and _entries(value) is None and value.strip() != "all"


def kind_of(wanted: str, devices: Mapping[str, int], environment: Mapping[str, str]) -> str:
    """The kind of device that ranks use: what the YAML says is ``wanted``, of ``auto`` the first
    of ``devices`` that ``environment`` does not hide, else the CPU."""
    return preferred(wanted, {k: n for k, n in devices.items() if n and not hidden(environment, k)})


def automatic_ranks(
    environment: Mapping[str, str], devices: Mapping[str, int], wanted: str = AUTO
) -> int:
    """What ``nproc_per_node: auto`` means: one rank a device that is there and visible, 1 without
    any. ``wanted``: the kind that the YAML asks for; ``cpu`` counts as ``auto`` does. Devices of
    kinds that nobody knows are counted by their variable alone."""
    kind = kind_of(AUTO if wanted == CPU else wanted, devices, environment)
    visible = visible_devices(environment, kind)
    installed = devices.get(kind)
    if installed and not hidden(environment, kind):
        return min(installed, visible or installed)
    known = {found.visible_variable for found in accelerators()}
    others = {name: value for name, value in environment.items() if name not in known}
    return visible_devices(others) or 1
