"""Generations of groups: the part of the store that a group uses.

A store may contain keys of an earlier incarnation of a group: of ranks that torchrun has restarted,
of a group that the program has destroyed, of an earlier run. So each group keeps its keys under the
name of its generation. The ranks of the default group agree on theirs, which makes them wait for
each other (``csrc/core/generation.h``). Groups that are created afterwards derive theirs from it
without waiting. If another backend made the default group, the ranks of each group agree.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_lock = threading.Lock()
_group_counts: Counter[str] = Counter()
"""Number of groups that this process has created, by the name that :func:`_derive` gives them
first.
"""


def get_store(options: Any, extension: Any) -> tuple[Any, str]:
    """Return the store for a new group, and the name of the group's generation.

    Args:
        options: torch's ``DistributedBackendOptions`` of the group.
        extension: the compiled module.

    Raises:
        DistBackendError: a rank did not come within the group's timeout, or the store failed.
    """
    world_generation = _find_world_generation(options, extension)
    if world_generation is not None:
        generation = _derive(world_generation, options.group_id)
    else:
        generation = extension.agree_on_generation(
            store=options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            global_ranks=list(options.global_ranks_in_group),
        )
    return PrefixStore(generation, options.store), generation


def _find_world_generation(options: Any, extension: Any) -> str | None:
    """Return the generation of the default group; None if this is the default group, or if another
    backend made it.
    """
    # torch gives the default group, of all ranks, an empty list.
    if not options.global_ranks_in_group or not dist.is_initialized():
        return None
    world = dist.distributed_c10d._get_default_group()
    for device in sorted(world._device_types, key=str):
        backend = world._get_backend(device)
        if isinstance(backend, extension.Backend):
            return str(backend.generation)
    return None


def _derive(world_generation: str, group_id: str) -> str:
    """Return a generation for a group of a job. All members create groups with the same name in the
    same order, so they derive the same one.
    """
    name = f"{world_generation}/{group_id}"
    with _lock:
        _group_counts[name] += 1
        return f"{name}/{_group_counts[name]}"
