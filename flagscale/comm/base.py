"""Base class of the adapters of communication backends. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import get_accelerator
from flagscale.comm import options as comm_options
from flagscale.comm.options import Option, OptionValues

if TYPE_CHECKING:
    import torch

DeviceType = str
"""A kind of device in :mod:`flagscale.accelerators`, such as ``cuda``."""

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
    "permute",
    "barrier",
)
"""Operations of ``torch.distributed``, with the names that the benchmark uses."""

TRAINING_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "sendrecv")
"""Operations that training uses with every layout. Pipeline stages use sendrecv."""


class CommBackend(ABC):
    """Adapter that makes a communication library usable through ``torch.distributed``."""

    name: str
    """Name in a YAML."""
    summary: str
    """One line for ``--help`` and documentation."""
    devices: tuple[DeviceType, ...]
    """Devices whose tensors it supports, by kind or by torch device type."""
    operations: tuple[str, ...] = OPERATIONS
    """Subset of :data:`OPERATIONS` that it supports on any device."""
    specific_options: tuple[Option, ...] = ()
    """Options in a YAML that are not in :attr:`environment`, or that restrict the values of a
    variable.
    """
    how_to_get: str = ""
    """Instructions for installing it."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that configure it, with their documentation."""

    def supports_device(self, device: DeviceType) -> bool:
        """Return True if it supports tensors on ``device``."""
        return device in self.devices or get_accelerator(device).torch_type in self.devices

    def operations_for(self, device: DeviceType) -> tuple[str, ...]:
        """Return the subset of :data:`OPERATIONS` that it supports for tensors on ``device``."""
        return self.operations

    @abstractmethod
    def explain_unavailable(self, device: DeviceType) -> str | None:
        """Return the reason why this machine cannot use it for tensors on ``device``; None if it
        can.
        """

    def torch_backend(self, device: DeviceType) -> str:
        """Return the ``backend`` argument of ``torch.distributed.init_process_group``."""
        return self.name

    @property
    def options(self) -> tuple[Option, ...]:
        """All options in a YAML, under ``train.system.comm``."""
        specific_variables = {option.variable for option in self.specific_options}
        other_variables = {
            name: doc for name, doc in self.environment.items() if name not in specific_variables
        }
        return (
            *self.specific_options,
            *comm_options.options_from_variables(self.name, other_variables),
        )

    def export_options(self, values: OptionValues) -> None:
        """Set this process's environment variables for option values; call it before
        :meth:`creation_context`.
        """
        comm_options.export_variables(self.options, values)

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        """Return further arguments of ``init_process_group`` for a rank on ``device`` and option
        values.
        """
        return {}

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        """Context manager for the creation of process groups, which imports a plug-in or sets a
        flag.
        """
        yield

    def version(self) -> str | None:
        """Return its version; None if it is not installed or its version is unknown."""
        return None

    def origin(self) -> str | None:
        """Return the origin of this machine's build, if the version does not imply it."""
        return None

    def explain_mismatch(self, values: OptionValues, ranks: int) -> str | None:
        """Return the reason why option values do not fit a job of ``ranks`` ranks; None if they
        do."""
        return None

    def resolve_for(self, device: DeviceType) -> CommBackend:
        """Return the backend that really runs on ``device``: itself, unless it stands for a
        choice."""
        return self


def explain_missing_torch() -> str | None:
    """Return the reason why torch cannot be used; None if it can."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def explain_missing_device(device: DeviceType) -> str | None:
    """Return the reason why no such device can be used here; None if one can. Imports torch."""
    return get_accelerator(device).explain_unavailable()
