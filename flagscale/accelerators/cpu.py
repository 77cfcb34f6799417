"""Adapter of the CPU, which every machine has and which ranks use if there is no faster device."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flagscale.accelerators.base import Accelerator

if TYPE_CHECKING:
    import torch


class Cpu(Accelerator):
    """Adapter of the CPU."""

    name = "cpu"
    title = "CPU"
    # Compiling costs a dozen seconds at the first step and gains nothing on a CPU.
    default_variables: ClassVar[Mapping[str, str]] = {"TORCHDYNAMO_DISABLE": "1"}
    dispatch_key = "CPU"

    def count_devices(self) -> int:
        """Return 1: ranks share the CPU, however many cores it has."""
        return 1

    def explain_unavailable(self) -> str | None:
        return None

    def select(self, local_rank: int) -> torch.device:
        import torch

        return torch.device(self.torch_type)

    def next_device(self, device: torch.device) -> torch.device:
        """Return ``device``: a host has one CPU device."""
        return device

    def product_name(self, device: torch.device) -> str:
        return processor_name()

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: operations are synchronous."""

    def peak_memory(self, device: torch.device) -> int | None:
        return None

    def allocated_memory(self, device: torch.device) -> int | None:
        return None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Do nothing: memory is not counted."""

    def available_memory(self, device: torch.device) -> int | None:
        return None

    def empty_cache(self) -> None:
        """Do nothing: the allocator frees memory itself."""

    def used_memory(self, device: torch.device) -> int:
        """Return 0: no process uses device memory, because there is none.

        The numbers of this process's tensors above are None instead: torch does not count them.
        """
        return 0

    def get_rng_state(self) -> torch.Tensor | None:
        """Return None: its generator is torch's global one, which is saved anyway."""
        return None

    def supports_fp8(self, device: torch.device) -> bool:
        """Return True: FP8 GEMMs are emulated, slow but correct."""
        return True

    def supports_block_scaled_fp8(self, device: torch.device) -> bool:
        """Return True: block-scaled FP8 GEMMs are emulated
        (:mod:`flagscale.train.layers.fp8_blockwise`).
        """
        return True


def processor_name() -> str:
    """Return the vendor's name of this machine's processor."""
    fallback = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return fallback
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else fallback
