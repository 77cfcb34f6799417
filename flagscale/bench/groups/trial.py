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

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from flagscale.bench import codec, rendezvous
from flagscale.bench.collectives import devices
from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.groups.plan import ON_ACCELERATORS, Sample, TrialPlan
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry

_TIMEOUT = timedelta(minutes=10)
_MIB = 2**20


def run_rank(plan: TrialPlan, world: BenchWorld) -> int:
    """One measurement, as one of its ranks; rank 0 writes the result."""
    place = plan.of.placement
    store = rendezvous.rendezvous(world, place.timeout)
    # All but one, as in a sub-group of a node; two ranks at least have something to say.
    members = plan.of.members or max(min(2, world.size), world.size - 1)
    groups = members_of(plan.count, members, world.size)
    sample = _measure(plan, groups, world, store)
    if world.rank == 0:
        plan.result.write_text(codec.encode(sample))
    dist.destroy_process_group()
    rendezvous.clean_up(world)
    rendezvous.exit_store(store, world, place.timeout)
    return 0


def members_of(count: int, members: int, world: int) -> list[list[int]]:
    """``count`` groups of ``members`` ranks, each one rank further round than the one before."""
    return [sorted((first + i) % world for i in range(members)) for first in range(count)]


def _measure(plan: TrialPlan, groups: list[list[int]], world: BenchWorld, store: Store) -> Sample:
    """Measure one variant in this fresh process; every rank of ``world`` calls it."""
    place, variant = plan.of.placement, plan.variant
    device = devices.choose(place.device, world.local_rank)
    values = registry.options_of(place.backend, plan.of.comm)
    backend = registry.usable(place.backend, device.kind, given_by="--backend")
    backend.export(values)
    before = _used(device)
    _together(store, world, "start")
    begin = time.perf_counter()
    with backend.creating():
        given = backend.init_options(device.torch_device, values).get("pg_options")
        options: dict[str, Any] = {"timeout": _TIMEOUT, "pg_options": given}
        named: dict[str, Any] = {"backend": backend.torch_backend(device.kind), **options}
        bound: dict[str, Any] = (
            {"device_id": device.torch_device} if variant in ON_ACCELERATORS else {}
        )
        rendezvous.join(PrefixStore("world", store), world, **named, **bound)
        created_world = time.perf_counter() - begin
        if variant == "warm":
            _all_reduce(None, device)
        _together(store, world, "create")
        begin = time.perf_counter()
        if variant == "split":
            handles = [dist.split_group(None, [ranks], **options) for ranks in groups]
        else:
            handles = [dist.new_group(ranks, **named) for ranks in groups]
    device.synchronize()
    create = time.perf_counter() - begin
    mine = [h for h, ranks in zip(handles, groups, strict=True) if world.rank in ranks]
    first, second = (_turn(name, mine, store, world, device) for name in ("first", "second"))
    memory = (_used(device) - before) / _MIB
    own = Sample(created_world, create, first, second, memory, splits=_splits(device))
    return _most(own, world, store)


def _turn(
    name: str, handles: list[Any], store: Store, world: BenchWorld, device: BenchDevice
) -> float:
    """Seconds of an operation on each of this rank's groups, one after the other."""
    _together(store, world, name)
    begin = time.perf_counter()
    for handle in handles:
        _all_reduce(handle, device)
    return time.perf_counter() - begin


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
    store.set(f"sample/{world.rank}", codec.encode(own))
    texts = [store.get(f"sample/{rank}") for rank in range(world.size)]
    samples = [asdict(codec.decode(Sample, text)) for text in texts]
    _together(store, world, "end")
    return Sample(**{name: max(s[name] for s in samples) for name in samples[0]})
