"""What an adapter of a communication backend says and does. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import accelerator
from flagscale.comm import options as comm_options
from flagscale.comm.options import Option, OptionValues

if TYPE_CHECKING:
    import torch

DeviceType = str
"""A kind of device, as :mod:`flagscale.accelerators` knows it."""

OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"),
    *("broadcast", "reduce", "gather", "scatter", "sendrecv", "permute", "barrier"),
)
"""What ``torch.distributed`` can ask of a backend, as the benchmark calls it."""

TRAINING = ("all_reduce", "all_gather", "broadcast", "sendrecv")
"""What training needs whatever its layout is; pipeline stages send and receive."""


class CommBackend(ABC):
    """How one communication library is used through ``torch.distributed``."""

    name: str
    """What a YAML calls it."""
    summary: str
    """One line for ``--help`` and documentation."""
    devices: tuple[DeviceType, ...]
    """The devices whose tensors it moves, by kind or by torch's type of them."""
    operations: tuple[str, ...] = OPERATIONS
    """What it can do on some device, of :data:`OPERATIONS`."""
    own_options: tuple[Option, ...] = ()
    """What a YAML may set of it beside its :attr:`environment`, or of that with its values."""
    how_to_get: str = ""
    """What to do where it is missing."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that steer it, each with what it does."""

    def serves(self, device: DeviceType) -> bool:
        """Whether it moves tensors of ``device``."""
        return device in self.devices or accelerator(device).torch_type in self.devices

    def operations_on(self, device: DeviceType) -> tuple[str, ...]:
        """What it can do with tensors of ``device``, of :data:`OPERATIONS`."""
        return self.operations

    @abstractmethod
    def unavailable(self, device: DeviceType) -> str | None:
        """Why this machine cannot use it for tensors of ``device``; None when it can."""

    def torch_backend(self, device: DeviceType) -> str:
        """The ``backend`` argument of ``torch.distributed.init_process_group``."""
        return self.name

    @property
    def options(self) -> tuple[Option, ...]:
        """Everything a YAML may set of it, under ``train.system.comm``."""
        told = {option.variable for option in self.own_options}
        others = {name: doc for name, doc in self.environment.items() if name not in told}
        return (*self.own_options, *comm_options.of_variables(self.name, others))

    def export(self, values: OptionValues) -> None:
        """Set the variables of this process that options amount to; before :meth:`creating`."""
        comm_options.export(self.options, values)

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        """Further arguments of ``init_process_group`` for a rank on ``device``, with the options
        that a YAML sets."""
        return {}

    @contextmanager
    def creating(self) -> Iterator[None]:
        """What must hold while its process groups are created: a plug-in imported, a switch set."""
        yield

    def version(self) -> str | None:
        """Its version; None where it cannot be told, or where it is not installed."""
        return None

    def origin(self) -> str | None:
        """Where this machine's comes from, if that is more than its version says."""
        return None

    def misfit(self, values: OptionValues, ranks: int) -> str | None:
        """Why these options do not fit a job of so many ranks; None where they do."""
        return None

    def resolve(self, device: DeviceType) -> CommBackend:
        """The backend that really runs: itself, unless it stands for a choice."""
        return self


def missing_torch() -> str | None:
    """Why torch cannot be used; None when it can."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def distribution_version(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def device_missing(device: DeviceType) -> str | None:
    """Why no such device can be used here; None when one can. Imports torch."""
    return accelerator(device).missing()
