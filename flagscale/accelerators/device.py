"""The device of a rank. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.registry import accelerator, chosen, every

_GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    accelerator: Accelerator
    torch_device: torch.device

    @classmethod
    def of(cls, torch_device: torch.device) -> Device:
        """The device that torch knows so, by the kind of that name, or the first of that type.

        Raises:
            ConfigError: no kind has devices of this type.
        """
        kinds = [a for a in every() if a.torch_type == torch_device.type]
        named = [a for a in kinds if a.name == torch_device.type]
        found = next(iter((*named, *kinds)), None)
        return cls(found or accelerator(torch_device.type), torch_device)

    @property
    def kind(self) -> str:
        """What ``device`` of a YAML calls it."""
        return self.accelerator.name

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's and its work is done when a call returns."""
        return self.accelerator.is_host

    @property
    def product(self) -> str:
        """What the maker calls it, such as ``NVIDIA H200``."""
        return self.accelerator.product(self.torch_device)

    @property
    def name(self) -> str:
        """What a run's log calls it: the product, or the kind where that is the host itself."""
        return self.kind if self.is_host else self.product

    @property
    def compiles(self) -> bool:
        """Whether ranks gain by ``torch.compile``."""
        return self.accelerator.compiles

    @property
    def symmetric_memory(self) -> bool:
        """Whether torch's operators over symmetric memory know it."""
        return self.accelerator.symmetric_memory

    @property
    def multiplies_eight_bits(self) -> bool:
        """Whether there are matrix products of 8-bit floats."""
        return self.accelerator.multiplies_eight_bits(self.torch_device)

    @property
    def multiplies_blocks(self) -> bool:
        """Whether such products take a scale for every block of 128 numbers."""
        return self.accelerator.multiplies_blocks(self.torch_device)

    @property
    def nominal_gb(self) -> float | None:
        """The nominal limit of its bus bandwidth, in 1e9 bytes a second; None where it is not
        known."""
        return self.accelerator.bus_gb(self.product)

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        self.accelerator.synchronize(self.torch_device)

    def peak_memory_gib(self) -> float | None:
        """Most memory that tensors have held at once, in GiB; None where it is not counted."""
        peak = self.accelerator.peak_memory(self.torch_device)
        return None if peak is None else peak / _GIB

    def peak_tflops(self, *, sixteen_bit: bool) -> float | None:
        """Its peak TFLOP/s; None where it is not known or training is not in 16 bits."""
        return self.accelerator.peak_tflops(self.product) if sixteen_bit else None

    def event(self, *, timed: bool = False) -> Any:
        """A new event of its streams; ``timed``: one that tells the time between two."""
        return self.accelerator.event(timed=timed)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """See :meth:`Accelerator.fetch`."""
        return self.accelerator.fetch(tensor)

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Accelerator.landing`."""
        return self.accelerator.landing(shape, dtype)

    def beside(self) -> AbstractContextManager[None]:
        """See :meth:`Accelerator.beside`."""
        return self.accelerator.beside()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` as a function that does it again, at less cost where the chip has graphs."""
        return self.accelerator.capture(work)


_current: Device | None = None


def select(wanted: str, local_rank: int) -> Device:
    """The device of the rank ``local_rank`` of its host, made current. ``wanted`` is a kind, or
    ``auto``, which takes the first kind that has devices here, else the CPU.

    Raises:
        ConfigError: no kind is called so, its adapter does not load, this machine has no such
            device, or fewer than ranks.
    """
    global _current  # noqa: PLW0603 - as torch's own current device is, it is the process's
    kind = chosen(wanted)
    _current = Device(kind, kind.select(local_rank))
    return _current


def current() -> Device:
    """The device that this process has selected; the CPU where it has not."""
    return _current or Device.of(torch.device("cpu"))
