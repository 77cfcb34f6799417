"""The process groups a measurement runs in: one a replica group, for each backend."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from flagscale.bench.collectives.devices import BenchDevice
from flagscale.comm.base import CommBackend
from flagscale.comm.options import OptionValues


@dataclass(frozen=True)
class RankGroup:
    """The ranks that one operation joins, as this rank sees them."""

    backend: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    index: int
    """This rank's place in ``ranks``; -1 when it has none."""
    process_group: dist.ProcessGroup

    def backend_on(self, device: BenchDevice) -> Any:
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
    device: BenchDevice,
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
            _connect(process_group, device)
    if mine is None:
        return RankGroup(backend.name, groups[0], -1, _get_default_group())
    return mine


def _connect(process_group: dist.ProcessGroup, device: BenchDevice) -> None:
    """Communicators on a GPU are made by the first operation; registering memory needs one."""
    if device.is_cuda:
        dist.all_reduce(torch.zeros(1, device=device.torch_device), group=process_group)
        device.synchronize()
