"""What plain copies between neighbours reach: the limit that a collective is held against."""

from __future__ import annotations

import time

import torch

from flagscale.bench.collectives.devices import BenchDevice

_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
_COPIES = 10


def probe_copies(device: BenchDevice) -> float:
    """Bytes a second, in 1e9, of copies to the next GPU of this host; every rank copies at once.

    On a single GPU the copy stays on it; on a CPU it is one within memory, the way of every
    message between ranks of one host. The better half of the copies counts.
    """
    size = _BYTES[device.kind]
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros(size, dtype=torch.uint8, device=_neighbour(device))
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


def _neighbour(device: BenchDevice) -> torch.device:
    if not device.is_cuda:
        return device.torch_device
    index = device.torch_device.index or 0
    return torch.device("cuda", (index + 1) % torch.cuda.device_count())
