"""One measurement on one rank: the default group, further groups, their first two operations.

The variants differ in one thing each:

=====  ==========================================================================================
bound  the default group is bound to a device (``device_id``), which connects it at once and lets
       ``new_group`` split its communicator (ncclCommSplit) instead of making one from nothing
cold   nothing is bound; communicators are made by each group's first operation
warm   as cold, but the default group has run an operation before: the control, for without it the
       very first communicator of the process is counted as the cost of the sub-group
split  as bound, with ``split_group`` in place of ``new_group``
=====  ==========================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.groups.plan import ON_ACCELERATORS, Sample, Variant
from flagscale.bench.world import BenchWorld
from flagscale.comm.base import CommBackend
from flagscale.comm.options import OptionValues

_TIMEOUT = timedelta(minutes=10)
_MIB = 2**20


def members_of(count: int, members: int, world: int) -> list[list[int]]:
    """``count`` groups of ``members`` ranks, each one rank further round than the one before."""
    return [sorted((first + i) % world for i in range(members)) for first in range(count)]


def measure(
    variant: Variant,
    groups: list[list[int]],
    world: BenchWorld,
    store: Store,
    device: BenchDevice,
    backend: CommBackend,
    options: OptionValues,
) -> Sample:
    """Measure one variant in this fresh process; every rank of ``world`` calls it."""
    before = _used(device)
    _together(store, world, "start")
    begin = time.perf_counter()
    with backend.creating():
        given = backend.init_options(device.torch_device, options).get("pg_options")
        _create_world(variant, world, store, device, backend, given)
        created_world = time.perf_counter() - begin
        if variant == "warm":
            _all_reduce(None, device)
        _together(store, world, "create")
        begin = time.perf_counter()
        handles = [_create(variant, ranks, device, backend, given) for ranks in groups]
    device.synchronize()
    create = time.perf_counter() - begin
    mine = [h for h, ranks in zip(handles, groups, strict=True) if world.rank in ranks]
    turns = []
    for turn in ("first", "second"):
        _together(store, world, turn)
        begin = time.perf_counter()
        for handle in mine:
            _all_reduce(handle, device)
        turns.append(time.perf_counter() - begin)
    own = Sample(
        world=created_world,
        create=create,
        first=turns[0],
        second=turns[1],
        memory=(_used(device) - before) / _MIB,
        splits=_splits(device),
    )
    return _most(own, world, store)


def _create_world(
    variant: Variant,
    world: BenchWorld,
    store: Store,
    device: BenchDevice,
    backend: CommBackend,
    options: Any,
) -> None:
    bound: dict[str, Any] = {"device_id": device.torch_device} if variant in ON_ACCELERATORS else {}
    dist.init_process_group(
        backend.torch_backend(device.kind),
        store=PrefixStore("world", store),
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
        pg_options=options,
        **bound,
    )


def _create(
    variant: Variant, ranks: list[int], device: BenchDevice, backend: CommBackend, options: Any
) -> dist.ProcessGroup | None:
    if variant == "split":
        return dist.split_group(None, [ranks], timeout=_TIMEOUT, pg_options=options)
    handle: dist.ProcessGroup | None = dist.new_group(
        ranks,
        timeout=_TIMEOUT,
        backend=backend.torch_backend(device.kind),
        pg_options=options,
    )
    return handle


def _all_reduce(group: dist.ProcessGroup | None, device: BenchDevice) -> None:
    dist.all_reduce(torch.ones(1024, device=device.torch_device), group=group)
    device.synchronize()


def _together(store: Store, world: BenchWorld, name: str) -> None:
    """All ranks are here. Through the store: a collective would warm what is to be measured."""
    if store.add(f"here/{name}", 1) == world.size:
        store.set(f"all/{name}", "1")
    store.wait([f"all/{name}"], _TIMEOUT)


def _used(device: BenchDevice) -> float:
    """Bytes of the device that are in use, by anyone: what NCCL holds is not torch's."""
    if not device.is_cuda:
        return 0.0
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return float(total - free)


def _splits(device: BenchDevice) -> int:
    """The backend's own count of splits of the default group's communicator."""
    from torch.distributed.distributed_c10d import _get_default_group

    backend: Any = _get_default_group()._get_backend(device.torch_device)
    count: Callable[[], int] | None = getattr(backend, "comm_split_count", None)
    return int(count()) if count is not None else -1


def _most(own: Sample, world: BenchWorld, store: Store) -> Sample:
    """Of every number the most over the ranks."""
    store.set(f"sample/{world.rank}", json.dumps(asdict(own)))
    samples = [json.loads(store.get(f"sample/{rank}")) for rank in range(world.size)]
    _together(store, world, "end")
    return Sample(**{name: max(s[name] for s in samples) for name in samples[0]})
