"""The device a rank trains on: choosing it, and the few operations that differ between kinds.

megatron.core is written for CUDA. Its adapted source tree (``tools/patch/unpatch.py``) follows
``FLAGSCALE_DEVICE``; the wheel as published works on CUDA alone. So :func:`choose` must run before
the first import of ``megatron.core``.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from flagscale.errors import ConfigError

DEVICE_VARIABLE = "FLAGSCALE_DEVICE"
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    torch_device: torch.device

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.torch_device.type == "cuda" else "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def name(self) -> str:
        """What the maker calls it, such as ``NVIDIA H200``; ``cpu`` for a CPU."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    @property
    def multiplies_eight_bits(self) -> bool:
        """Whether there are matrix products of 8-bit floats; a CPU's are slow, but right."""
        if not self.is_cuda:
            return True
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 9)

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def peak_memory_gib(self) -> float | None:
        """Most memory that tensors have held at once, in GiB; None where it is not counted."""
        if not self.is_cuda:
            return None
        return torch.cuda.max_memory_allocated(self.torch_device) / GIB


def choose(wanted: str, local_rank: int) -> Device:
    """The device of the rank ``local_rank`` of its host, made current.

    ``wanted`` is ``auto``, ``cpu`` or ``cuda``. ``FLAGSCALE_DEVICE`` overrides ``auto``.

    Raises:
        ConfigError: CUDA is wanted and absent, there are fewer GPUs than ranks, or the CPU is
            meant and megatron.core is the published wheel, which cannot run there.
    """
    if wanted == "auto":
        wanted = os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ[DEVICE_VARIABLE] = wanted
    if wanted == "cuda":
        return _cuda(local_rank)
    # Compiling the fused elementwise functions costs 12 s at the first step and gains nothing here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _require_adapted_core()
    return Device(torch.device("cpu"))


def _cuda(local_rank: int) -> Device:
    if not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda is asked for, but no CUDA device is visible",
            hint="check the driver and CUDA_VISIBLE_DEVICES, or set device: cpu",
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this host shows {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
            hint="lower nproc_per_node or make more GPUs visible",
        )
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank))


def _require_adapted_core() -> None:
    try:
        core = importlib.util.find_spec("megatron.core")
        adapted = importlib.util.find_spec("megatron.core.device")
    except ModuleNotFoundError:
        core = adapted = None
    if core is None:
        raise ConfigError(
            "megatron.core is not installed",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM",
        )
    if adapted is None:
        raise ConfigError(
            f"megatron.core in {core.origin} is the published one, which trains on CUDA only, "
            "and the training device is the CPU",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM, and start training "
            "with third_party/Megatron-LM first in PYTHONPATH (the launcher does that)",
        )
