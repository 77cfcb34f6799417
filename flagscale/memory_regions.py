"""Memory of a host that outlives its ranks, for copies of their training state.

The agent of a host owns it: anonymous files (``memfd_create``) that ranks open through ``/proc``.
It is kept when the ranks are started again, and the kernel frees it with the last process of the
run, so nothing is left after any kind of end. Standard library alone.
"""

from __future__ import annotations

import os
from typing import NamedTuple

VARIABLE = "FLAGSCALE_HOST_MEMORY"
"""Environment variable of ranks: the agent's pid and the descriptors, ``pid:fd,fd,…``."""
_REGIONS_PER_RANK = 4


class RankRegions(NamedTuple):
    """Paths of a rank's regions: two for copies of its own state, two for those of another rank."""

    own: tuple[str, str]
    others: tuple[str, str]


def create_regions(ranks: int) -> dict[str, str]:
    """Create empty regions for the ranks of this host.

    Returns:
        The environment variable with which ranks find them; none if the system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        return {}
    try:
        descriptors = [
            os.memfd_create(f"flagscale-{index}") for index in range(ranks * _REGIONS_PER_RANK)
        ]
    except OSError:
        return {}
    return {VARIABLE: f"{os.getpid()}:{','.join(map(str, descriptors))}"}


def find_regions(local_rank: int) -> RankRegions | None:
    """Return the regions of a rank of this host; None if it has none that this process can open."""
    pid, _, numbers = os.environ.get(VARIABLE, "").partition(":")
    descriptors = numbers.split(",")[local_rank * _REGIONS_PER_RANK :][:_REGIONS_PER_RANK]
    if len(descriptors) < _REGIONS_PER_RANK:
        return None
    paths = [f"/proc/{pid}/fd/{number}" for number in descriptors]
    # In a container, the agent may have another pid, or be invisible.
    if not all(os.access(path, os.R_OK | os.W_OK) for path in paths):
        return None
    return RankRegions((paths[0], paths[1]), (paths[2], paths[3]))
