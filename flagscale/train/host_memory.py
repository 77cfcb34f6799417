"""Memory of the hosts, for state that ranks keep there."""

from __future__ import annotations

import socket
from pathlib import Path

from flagscale.train.distributed import gather_from_ranks

_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


def explain_lack_of_memory(needed_bytes: int) -> str | None:
    """Return what a host lacks for all its ranks together; None if every host has it. Collective.

    Args:
        needed_bytes: memory that this rank is going to allocate on its host.
    """
    ranks = gather_from_ranks((socket.gethostname(), needed_bytes, read_available_memory()))
    needed: dict[str, int] = {}
    available: dict[str, int] = {}
    for host, rank_bytes, available_bytes in ranks:
        needed[host] = needed.get(host, 0) + rank_bytes
        if available_bytes is not None:
            available[host] = min(available.get(host, available_bytes), available_bytes)
    for host, host_bytes in needed.items():
        if host_bytes > available.get(host, host_bytes):
            return (
                f"the ranks of {host} need {host_bytes / _GIB:.1f} GiB of its memory, and "
                f"{available[host] / _GIB:.1f} GiB are available"
            )
    return None


def read_available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP
) -> int | None:
    """Return the bytes that processes can allocate on this host, or None if they are not known.

    In a container these are what its limit leaves (cgroup v2).
    """
    amounts = []
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail")]
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # Cached files count as used, but are dropped when memory is needed.
        statistics = (cgroup / "memory.stat").read_text(encoding="ascii").split()
        cached = int(statistics[statistics.index("file") + 1])
        if limit != "max":
            amounts.append(int(limit) - used + cached)
    except (OSError, ValueError):
        pass  # no such file: another system, or no limit
    return min(amounts, default=None)
