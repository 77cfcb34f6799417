"""Adapters of MPI, UCC, vendors' plug-ins, and maps from device to backend.

A third-party package adds a backend by an entry point:

    [project.entry-points."flagscale.comm_backends"]
    mylib = "mylib.flagscale:MyBackend"

The name is used in a YAML. The object is a :class:`CommBackend` or a subclass that takes no
arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import get_accelerator
from flagscale.comm.base import (
    OPERATIONS,
    CommBackend,
    DeviceType,
    distribution_version,
    explain_missing_device,
    explain_missing_torch,
)
from flagscale.comm.options import Option, OptionValues
from flagscale.errors import ConfigError
from flagscale.registry import Registry

if TYPE_CHECKING:
    import torch

INSTALLED_BACKENDS = Registry("flagscale.comm_backends", "communication backend", {})


class Mpi(CommBackend):
    """Adapter of MPI."""

    name = "mpi"
    summary = "the MPI library that torch was built with, for host memory"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    operations = tuple(name for name in OPERATIONS if name != "reduce_scatter")
    how_to_get = "build torch from source on a machine with MPI: no wheel contains it"

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        import torch.distributed as dist

        return None if dist.is_mpi_available() else "this build of torch has no MPI"


class Ucc(CommBackend):
    """Adapter of UCC."""

    name = "ucc"
    summary = "Unified Collective Communication, over UCX, NCCL or SHARP"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    how_to_get = "build torch with USE_UCC=1, or use NVIDIA's PyTorch container"
    environment: ClassVar[Mapping[str, str]] = {
        "UCC_TLS": "the transports of its collectives, such as ucp,nccl",
        "UCX_TLS": "the transports below them, such as rc,cuda_copy,cuda_ipc",
    }

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        import torch.distributed as dist

        return None if dist.is_ucc_available() else "this build of torch has no UCC"


class Flagcx(CommBackend):
    """Adapter of FlagCX."""

    name = "flagcx"
    summary = "FlagCX's torch plug-in: collectives across chips of different vendors"
    devices: tuple[DeviceType, ...] = ("cuda",)
    how_to_get = "build FlagCX and install its plug-in: pip install ./plugin/torch"
    environment: ClassVar[Mapping[str, str]] = {
        "FLAGCX_IB_HCA": "the network adapters to use, such as mlx5",
        "FLAGCX_ENABLE_TOPO_DETECT": "TRUE: detect the fastest path between devices",
        "FLAGCX_DEBUG": "INFO: log its operations",
    }

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        if importlib.util.find_spec("flagcx") is None:
            return "the Python module flagcx is not installed"
        if get_accelerator(device).is_host:
            return "flagcx moves device memory only"
        return explain_missing_device(device)

    def supports_device(self, device: DeviceType) -> bool:
        # It is built for the chips of one of many vendors. Only that build could report which.
        return not get_accelerator(device).is_host

    def torch_backend(self, device: DeviceType) -> str:
        # It has no collectives for host memory, which collectives of objects use.
        return f"cpu:gloo,{get_accelerator(device).torch_type}:flagcx"

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        importlib.import_module("flagcx")
        yield

    def version(self) -> str | None:
        return distribution_version("flagcx")


class TorchComms(CommBackend):
    """Adapter of torchcomms."""

    name = "torchcomms"
    summary = "torchcomms under torch.distributed: ncclx on CUDA, gloo on the CPU"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    how_to_get = "pip install torchcomms, of the version that fits torch"
    environment: ClassVar[Mapping[str, str]] = {
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1: for every group of the program, not this one alone",
    }

    @property
    def options(self) -> tuple[Option, ...]:
        # Its variable is the flag that selecting this backend sets anyway.
        return self.specific_options

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        if importlib.util.find_spec("torchcomms") is None:
            return "the Python module torchcomms is not installed"
        if importlib.util.find_spec("torch.distributed.config") is None:
            return "this torch does not support torchcomms; it needs 2.12 or later"
        return explain_missing_device(device)

    def torch_backend(self, device: DeviceType) -> str:
        # ncclx is NVIDIA's NCCL with extensions.
        return "cuda:ncclx" if device == "cuda" else "cpu:gloo"

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        config: Any = importlib.import_module("torch.distributed.config")
        previous = config.use_torchcomms
        config.use_torchcomms = True
        try:
            yield
        finally:
            config.use_torchcomms = previous

    def version(self) -> str | None:
        return distribution_version("torchcomms")


_BUILD_DEPENDENT = ("gloo", "mpi", "nccl", "ucc")
"""Backends that depend on torch's build options. Other backends come in packages of their own."""


class DeviceMap(CommBackend):
    """Map from device types to backends in torch's syntax, such as ``cpu:gloo,cuda:nccl``."""

    summary = "a backend for each kind of device"

    def __init__(self, device_map: str, find_backend: Callable[[str], CommBackend | None]) -> None:
        self.name = device_map
        self._backend_by_device = _parse_map(device_map)
        self._find_backend = find_backend
        adapters = [
            adapter for adapter in map(find_backend, self._backend_by_device.values()) if adapter
        ]
        self.operations = tuple(o for o in OPERATIONS if all(o in a.operations for a in adapters))
        self.devices = tuple(self._backend_by_device)

    def operations_for(self, device: DeviceType) -> tuple[str, ...]:
        adapter = self._find_backend(
            self._backend_by_device.get(get_accelerator(device).torch_type, "")
        )
        return self.operations if adapter is None else adapter.operations_for(device)

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        part = self._backend_by_device.get(get_accelerator(device).torch_type)
        if part is None:
            return f"{self.name!r} names no backend for {device}"
        import torch.distributed as dist

        adapter = self._find_backend(part)
        if adapter is not None:
            problem = adapter.explain_unavailable(device)
        elif not dist.is_backend_available(part):
            problem = f"torch knows no backend {part!r}; is its plug-in installed and imported?"
        if problem:
            return problem
        # torch creates a group for every part, whatever device the ranks are on.
        for name in _BUILD_DEPENDENT:
            if name in self._backend_by_device.values() and not dist.is_backend_available(name):
                return f"this build of torch has no {name}"
        return None

    @property
    def options(self) -> tuple[Option, ...]:
        """Options of all parts that set variables. Arguments of ``init_process_group`` cannot reach
        a part.
        """
        options: dict[str, Option] = {}
        for adapter in map(self._find_backend, self._backend_by_device.values()):
            for option in adapter.options if adapter else ():
                if option.variable is not None:
                    options.setdefault(option.name, option)
        return tuple(options.values())

    def export_options(self, values: OptionValues) -> None:
        for adapter in map(self._find_backend, self._backend_by_device.values()):
            if adapter is not None:
                adapter.export_options(values)

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        import torch

        # The part for host memory alone is configured here. Arguments of one part cannot reach it.
        part = self._backend_by_device.get("cpu", "")
        adapter = self._find_backend(part)
        if adapter is not None and (
            device.type == "cpu" or self._backend_by_device.get(device.type) != part
        ):
            adapter.init_options(torch.device("cpu"), values)
        return {}

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        adapters = [self._find_backend(part) for part in self._backend_by_device.values()]
        # With two such flags at once, each would apply to the whole string.
        first = next((a for a in adapters if isinstance(a, Flagcx | TorchComms)), None)
        if first is None:
            yield
            return
        with first.creation_context():
            yield


def is_device_map(name: str) -> bool:
    """Return True if ``name`` has the syntax of a map from devices to backends."""
    return ":" in name


def _parse_map(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in text.split(","):
        device, colon, name = part.strip().partition(":")
        if not (colon and device.isidentifier() and name.isidentifier()):
            raise ConfigError(
                f"distributed_backend: {part!r} in {text!r} is no device:backend; "
                "expected such as cpu:gloo,cuda:nccl"
            )
        if device in parts:
            raise ConfigError(f"distributed_backend: {text!r} names {device} twice")
        parts[device] = name
    return parts


class BrokenBackend(CommBackend):
    """Backend of a third-party package that fails to load; it is listed with the reason."""

    devices: tuple[DeviceType, ...] = ("cpu", "cuda")

    def __init__(self, name: str, reason: str, how_to_get: str) -> None:
        self.name = name
        self.summary = f"from {reason.partition(':')[0]}, which does not load"
        self.how_to_get = how_to_get
        self._reason = reason

    def explain_unavailable(self, device: DeviceType) -> str | None:
        return self._reason


def load_installed_backends() -> dict[str, CommBackend]:
    """Return the backends of installed packages by name, including those that fail to load."""
    return {name: _load_backend(name) for name in INSTALLED_BACKENDS.installed_names()}


def _load_backend(name: str) -> CommBackend:
    try:
        backend: CommBackend = INSTALLED_BACKENDS.create(name, CommBackend)
    except ConfigError as error:
        return BrokenBackend(name, error.message, error.hint or "")
    return backend
