"""How many devices a host offers, found out without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
SUFFIX = "_VISIBLE_DEVICES"
# Speaks to the container runtime, not to the job: it is `all` or the host's numbering.
_NOT_FOR_JOBS = "NVIDIA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """How many devices ``*_VISIBLE_DEVICES`` variables leave visible, the fewest where several
    are set; None where none limits anything.

    A list such as ``0,1`` or ``GPU-8a…,MIG-3f…`` counts its entries. ``all`` is no limit. An empty
    value or ``-1`` hides every device, so the job has none to be counted by: no limit either.
    """
    counts = [
        _entries(value)
        for name, value in environment.items()
        if name.endswith(SUFFIX) and name != _NOT_FOR_JOBS
    ]
    return min((count for count in counts if count is not None), default=None)


def _entries(value: str) -> int | None:
    entries = [entry.strip() for entry in value.split(",")]
    # CUDA reads a list up to the first entry that it does not know; -1 and empty end it.
    kept: list[str] = []
    for entry in entries:
        if entry in ("", "-1", "all", "none", "void", "NoDevFiles"):
            break
        kept.append(entry)
    return len(kept) or None


def hidden(environment: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set and hides every GPU."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    return value is not None and _entries(value) is None and value.strip() != "all"


def installed_gpus() -> int:
    """How many NVIDIA GPUs this machine has: the driver's list, else ``nvidia-smi -L``."""
    try:
        return sum(1 for _ in _NVIDIA_PROC.iterdir())
    except OSError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))


def automatic_ranks(environment: Mapping[str, str], installed: int) -> int:
    """What ``nproc_per_node: auto`` means: one rank a device that is there and visible, 1 without
    any. Devices of other makers are counted by their variable alone."""
    visible = visible_devices(environment)
    if installed and not hidden(environment):
        return min(installed, visible or installed)
    others = {name: v for name, v in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    return visible_devices(others) or 1
