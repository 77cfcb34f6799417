"""Where a rank measures: its device, with the few calls that differ between kinds of devices, and
the process groups it joins: one a replica group, for each backend."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from flagscale.bench.machine import processor
from flagscale.comm.base import CommBackend
from flagscale.comm.options import OptionValues
from flagscale.errors import ConfigError

NOMINAL_BUS_GB = {
    **{"V100": 150.0, "A100": 300.0, "A800": 200.0, "H100": 450.0, "H200": 450.0},
    **{"H800": 200.0, "H20": 450.0, "B200": 900.0, "GB200": 900.0},
}
"""NVLink in one direction, in 1e9 bytes a second, by a word of the device's name."""


@dataclass(frozen=True)
class BenchDevice:
    """One rank's device."""

    torch_device: torch.device

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.torch_device.type == "cuda" else "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        """What the maker calls it."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else processor()

    @property
    def nominal_gb(self) -> float | None:
        """The nominal limit of its bus bandwidth; None where it is not known."""
        return next((NOMINAL_BUS_GB[w] for w in self.name.split() if w in NOMINAL_BUS_GB), None)

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of ``work``, as a function that launches it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a backend's watchdog) may go on calling the driver meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay


def choose(wanted: str, local_rank: int) -> BenchDevice:
    """The device of the rank ``local_rank`` of its host, made current.

    Raises:
        ConfigError: CUDA is wanted and absent, or there are fewer GPUs than ranks.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        # A rank's share of the machine is one thread; more would fight for the others' cores.
        torch.set_num_threads(1)
        return BenchDevice(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is visible", hint="or --device cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"local rank {local_rank} has no GPU: this host shows {count}")
    torch.cuda.set_device(local_rank)
    return BenchDevice(torch.device("cuda", local_rank))


def pin(local_rank: int) -> None:
    """Keep this process on one of the CPUs it may use."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[local_rank % len(allowed)]})


_PROBE_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
_COPIES = 10


def probe_copies(device: BenchDevice) -> float:
    """What plain copies reach, in 1e9 bytes a second: of all ranks at once to the next GPU of
    this host.

    On a single GPU the copy stays on it; on a CPU it is one within memory, the way of every
    message between ranks of one host. The better half of the copies counts.
    """
    size, neighbour = _PROBE_BYTES[device.kind], device.torch_device
    if device.is_cuda:
        following = (device.torch_device.index or 0) + 1
        neighbour = torch.device("cuda", following % torch.cuda.device_count())
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
            if device.is_cuda:
                # Communicators are made by the first operation; registering memory needs one.
                dist.all_reduce(torch.zeros(1, device=device.torch_device), group=process_group)
                device.synchronize()
    return mine or RankGroup(backend.name, groups[0], -1, _get_default_group())
