"""Device of a rank, and the process groups it joins: one per replica group and backend."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from flagscale.accelerators.device import Device, select_device
from flagscale.comm.base import CommBackend
from flagscale.comm.options import OptionValues


def select_rank_device(kind: str, local_rank: int) -> Device:
    """Return the device of a local rank, and make it torch's current device.

    Raises:
        ConfigError: the kind is unknown, or the host has no such devices or fewer than ranks.
    """
    device = select_device(kind, local_rank)
    if device.is_host:
        # One thread per rank: more would compete for the other ranks' cores.
        torch.set_num_threads(1)
    return device


def pin_to_cpu(local_rank: int) -> None:
    """Bind this process to one of the CPUs it may use."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[local_rank % len(allowed)]})


_PROBE_BYTES = {"host": 32 * 2**20, "device": 256 * 2**20}
_COPY_COUNT = 10


def probe_copies(device: Device) -> float:
    """Measure the bandwidth of plain copies from this rank's GPU to the next GPU of its host, and
    return it in 1e9 bytes per second. All ranks call this at the same time.

    With a single GPU, source and target are on the same one. On a CPU it is a copy within memory,
    which every message between ranks of a host requires. The result is the mean of the faster half
    of the copies.
    """
    size = _PROBE_BYTES["host" if device.is_host else "device"]
    neighbour = device.accelerator.next_device(device.torch_device)
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros(size, dtype=torch.uint8, device=neighbour)
    target.copy_(source)
    device.synchronize()
    times = []
    for _ in range(_COPY_COUNT):
        begin = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    fastest_times = sorted(times)[: _COPY_COUNT // 2]
    return size / (sum(fastest_times) / len(fastest_times)) / 1e9


@dataclass(frozen=True)
class RankGroup:
    """Process group on one backend, with this rank's index in it."""

    backend: str
    ranks: tuple[int, ...]
    """Global ranks in the order of the group."""
    index: int
    """Index of this rank in ``ranks``; -1 if it is no member."""
    process_group: dist.ProcessGroup

    def backend_for(self, device: Device) -> Any:
        """Return torch's backend object for tensors on ``device``."""
        return self.process_group._get_backend(device.torch_device)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_member(self) -> bool:
        return self.index >= 0


def create_group(
    backend: CommBackend,
    groups: tuple[tuple[int, ...], ...],
    rank: int,
    device: Device,
    timeout_seconds: float,
    options: OptionValues,
) -> RankGroup:
    """Create process groups, and return the one of ``rank``. Every rank calls this with the same
    groups, after setting the variables for ``options``. A rank outside of all groups gets a
    group in which it is no member.
    """
    own_group: RankGroup | None = None
    init_options = backend.init_options(device.torch_device, options)
    for ranks in groups:
        with backend.creation_context():
            process_group: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_seconds),
                backend=backend.torch_backend(device.kind),
                pg_options=init_options.get("pg_options"),
            )
        if rank in ranks:
            own_group = RankGroup(backend.name, ranks, ranks.index(rank), process_group)
            if not device.is_host:
                # The first operation creates the communicator, which registering memory requires.
                dist.all_reduce(torch.zeros(1, device=device.torch_device), group=process_group)
                device.synchronize()
    return own_group or RankGroup(backend.name, groups[0], -1, _get_default_group())
