"""Where a rank measures: its device, and the process groups it joins: one a replica group, for
each backend."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from flagscale.accelerators.device import Device, select
from flagscale.comm.base import CommBackend
from flagscale.comm.options import OptionValues


def choose(wanted: str, local_rank: int) -> Device:
    """The device of the rank ``local_rank`` of its host, made current.

    Raises:
        ConfigError: no kind is called so, or there are no such devices or fewer than ranks.
    """
    device = select(wanted, local_rank)
    if device.is_host:
        # A rank's share of the machine is one thread; more would fight for the others' cores.
        torch.set_num_threads(1)
    return device


def pin(local_rank: int) -> None:
    """Keep this process on one of the CPUs it may use."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[local_rank % len(allowed)]})


_PROBE_BYTES = {"host": 32 * 2**20, "device": 256 * 2**20}
_COPIES = 10


def probe_copies(device: Device) -> float:
    """What plain copies reach, in 1e9 bytes a second: of all ranks at once to the next GPU of
    this host.

    On a single GPU the copy stays on it; on a CPU it is one within memory, the way of every
    message between ranks of one host. The better half of the copies counts.
    """
    size = _PROBE_BYTES["host" if device.is_host else "device"]
    neighbour = device.accelerator.neighbour(device.torch_device)
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros(size, dtype=torch.uint8, device=neighbour)
    target.copy_(source)
    device.synchronize()
    times = []
    for _ in range(_COPIES):
        begin = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    better = sorted(times)[: _COPIES // 2]
    return size / (sum(better) / len(better)) / 1e9


@dataclass(frozen=True)
class RankGroup:
    """The ranks that one operation joins, as this rank sees them."""

    backend: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    index: int
    """This rank's place in ``ranks``; -1 when it has none."""
    process_group: dist.ProcessGroup

    def backend_on(self, device: Device) -> Any:
        """torch's object of the backend for tensors of ``device``."""
        return self.process_group._get_backend(device.torch_device)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def member(self) -> bool:
        return self.index >= 0


def form(
    backend: CommBackend,
    groups: tuple[tuple[int, ...], ...],
    rank: int,
    device: Device,
    seconds: float,
    options: OptionValues,
) -> RankGroup:
    """The group of ``rank`` among ``groups``; every rank calls this with the same groups. The
    variables that ``options`` amount to are set already.

    A rank outside of all groups gets one it is no member of.
    """
    mine: RankGroup | None = None
    given = backend.init_options(device.torch_device, options)
    for ranks in groups:
        with backend.creating():
            process_group: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=seconds),
                backend=backend.torch_backend(device.kind),
                pg_options=given.get("pg_options"),
            )
        if rank in ranks:
            mine = RankGroup(backend.name, ranks, ranks.index(rank), process_group)
            if not device.is_host:
                # Communicators are made by the first operation; registering memory needs one.
                dist.all_reduce(torch.zeros(1, device=device.torch_device), group=process_group)
                device.synchronize()
    return mine or RankGroup(backend.name, groups[0], -1, _get_default_group())
