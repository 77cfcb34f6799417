"""The device of a rank: an adapter (:mod:`.base`) with a ``torch.device``. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.registry import choose_accelerator, get_accelerator, list_accelerators

_GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    accelerator: Accelerator
    torch_device: torch.device

    @classmethod
    def from_torch(cls, torch_device: torch.device) -> Device:
        """Return the device of a ``torch.device``: of the kind with the same name, or the first of
        its type.

        Raises:
            ConfigError: no kind has devices of this type.
        """
        same_type = [a for a in list_accelerators() if a.torch_type == torch_device.type]
        same_name = [a for a in same_type if a.name == torch_device.type]
        adapter = next(iter((*same_name, *same_type)), None)
        return cls(adapter or get_accelerator(torch_device.type), torch_device)

    @property
    def kind(self) -> str:
        """The kind, as in ``device`` of a YAML."""
        return self.accelerator.name

    @property
    def is_host(self) -> bool:
        """True if its memory is host memory and its operations are synchronous."""
        return self.accelerator.is_host

    @property
    def product(self) -> str:
        """The vendor's product name, such as ``NVIDIA H200``."""
        return self.accelerator.product_name(self.torch_device)

    @property
    def name(self) -> str:
        """Name in a run's log: the product, or the kind if the device is the host itself."""
        return self.kind if self.is_host else self.product

    @property
    def compiles(self) -> bool:
        """True if ranks are faster with ``torch.compile``."""
        return self.accelerator.compiles

    @property
    def symmetric_memory(self) -> bool:
        """True if torch supports symmetric memory on it."""
        return self.accelerator.symmetric_memory

    @property
    def supports_fp8(self) -> bool:
        """True if it supports FP8 GEMMs."""
        return self.accelerator.supports_fp8(self.torch_device)

    @property
    def supports_block_scaled_fp8(self) -> bool:
        """True if its FP8 GEMMs support one scale per block of 128 elements."""
        return self.accelerator.supports_block_scaled_fp8(self.torch_device)

    @property
    def nominal_bus_gb_per_second(self) -> float | None:
        """Nominal limit of its bus bandwidth in 1e9 bytes per second; None if unknown."""
        return self.accelerator.bus_gb_per_second(self.product)

    def synchronize(self) -> None:
        """Wait for all work that was submitted to the device."""
        self.accelerator.synchronize(self.torch_device)

    def peak_memory_gib(self) -> float | None:
        """Return the peak of memory allocated by tensors in GiB; None if it is not counted."""
        peak = self.accelerator.peak_memory(self.torch_device)
        return None if peak is None else (peak + _shared_bytes) / _GIB

    def peak_tflops(self, *, sixteen_bit: bool) -> float | None:
        """Return its peak 16-bit TFLOP/s; None if unknown or if training is not ``sixteen_bit``."""
        return self.accelerator.peak_tflops(self.product) if sixteen_bit else None

    def create_event(self, *, timed: bool = False) -> Any:
        """Return a new stream event. ``timed`` events measure elapsed time."""
        return self.accelerator.create_event(timed=timed)

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """See :meth:`Accelerator.copy_to_host`."""
        return self.accelerator.copy_to_host(tensor)

    def allocate_host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Accelerator.allocate_host_buffer`."""
        return self.accelerator.allocate_host_buffer(shape, dtype)

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """See :meth:`Accelerator.register_host_memory`."""
        return self.accelerator.register_host_memory(tensor)

    def side_stream(self) -> AbstractContextManager[None]:
        """See :meth:`Accelerator.side_stream`."""
        return self.accelerator.side_stream()

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """See :meth:`Accelerator.capture_graph`."""
        return self.accelerator.capture_graph(work)


_current: Device | None = None
_shared_bytes = 0


def count_shared_memory(tensor: torch.Tensor) -> None:
    """Count memory that other devices can read as allocated for good.

    torch's allocator of symmetric memory is not the one whose peak it reports.
    """
    global _shared_bytes  # noqa: PLW0603 - per process, as torch's own counts
    _shared_bytes += tensor.numel() * tensor.element_size()


def select_device(kind_or_auto: str, local_rank: int) -> Device:
    """Return the device of a local rank and make it the current one.

    ``kind_or_auto`` is a kind, or ``auto``: the first kind that has devices here, else the CPU.

    Raises:
        ConfigError: the kind is unknown, its adapter fails to load, or this machine has fewer such
            devices than ranks.
    """
    global _current  # noqa: PLW0603 - per process, as torch's own current device
    accelerator = choose_accelerator(kind_or_auto)
    _current = Device(accelerator, accelerator.select(local_rank))
    return _current


def current_device() -> Device:
    """Return the device that this process has selected, by default the CPU."""
    return _current or Device.from_torch(torch.device("cpu"))
