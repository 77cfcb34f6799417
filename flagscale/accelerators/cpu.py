"""The CPU: the kind of every machine, and what ranks use where there is nothing faster."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flagscale.accelerators.base import Accelerator

if TYPE_CHECKING:
    import torch


class Cpu(Accelerator):
    name = "cpu"
    title = "CPU"
    # Compiling costs a dozen seconds at the first step and gains nothing on a CPU.
    defaults: ClassVar[Mapping[str, str]] = {"TORCHDYNAMO_DISABLE": "1"}
    dispatch_key = "CPU"

    def count(self) -> int:
        """Ranks share it, so it is one however many cores it has."""
        return 1

    def missing(self) -> str | None:
        return None

    def select(self, local_rank: int) -> torch.device:
        import torch

        return torch.device(self.torch_type)

    def neighbour(self, device: torch.device) -> torch.device:
        return device

    def product(self, device: torch.device) -> str:
        return processor()

    def synchronize(self, device: torch.device) -> None:
        """All work is done when its call returns."""

    def peak_memory(self, device: torch.device) -> int | None:
        return None

    def held_memory(self, device: torch.device) -> int | None:
        return None

    def forget_peak(self, device: torch.device) -> None:
        """Nothing is counted."""

    def room(self, device: torch.device) -> int | None:
        return None

    def give_back(self) -> None:
        """The allocator does."""

    def used_memory(self, device: torch.device) -> int:
        """Nothing of a device's."""
        return 0

    def random_state(self) -> torch.Tensor | None:
        """Its generator is torch's own, which is everybody's."""
        return None

    def multiplies_eight_bits(self, device: torch.device) -> bool:
        """Slowly, but right."""
        return True

    def multiplies_blocks(self, device: torch.device) -> bool:
        """By the numbers that they stand for (:mod:`flagscale.train.layers.blocks`)."""
        return True


def processor() -> str:
    """What the maker calls this machine's processor."""
    other = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return other
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else other
