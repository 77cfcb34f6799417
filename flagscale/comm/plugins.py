"""Backends beyond torch's everyday two: MPI, UCC, plug-ins of vendors, maps from device to backend.

A package of a third party adds its own by an entry point:

    [project.entry-points."flagscale.comm_backends"]
    mylib = "mylib.flagscale:MyBackend"

The name is what a YAML says; the object is a :class:`CommBackend` or a class of one that takes no
arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import accelerator
from flagscale.comm.base import (
    OPERATIONS,
    CommBackend,
    DeviceType,
    device_missing,
    distribution_version,
    missing_torch,
)
from flagscale.comm.options import Option, OptionValues
from flagscale.errors import ConfigError
from flagscale.registry import Registry

if TYPE_CHECKING:
    import torch

INSTALLED = Registry("flagscale.comm_backends", "communication backend", {})


class Mpi(CommBackend):
    name = "mpi"
    summary = "the MPI library that torch was built with, for host memory"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    operations = tuple(name for name in OPERATIONS if name != "reduce_scatter")
    how_to_get = "build torch from source on a machine with MPI: no wheel contains it"

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        import torch.distributed as dist

        return None if dist.is_mpi_available() else "this build of torch has no MPI"


class Ucc(CommBackend):
    name = "ucc"
    summary = "Unified Collective Communication, over UCX, NCCL or SHARP"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    how_to_get = "build torch with USE_UCC=1, or use NVIDIA's PyTorch container"
    environment: ClassVar[Mapping[str, str]] = {
        "UCC_TLS": "the transports of its collectives, such as ucp,nccl",
        "UCX_TLS": "the transports below them, such as rc,cuda_copy,cuda_ipc",
    }

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        import torch.distributed as dist

        return None if dist.is_ucc_available() else "this build of torch has no UCC"


class Flagcx(CommBackend):
    name = "flagcx"
    summary = "FlagCX's torch plug-in: collectives across chips of different makers"
    devices: tuple[DeviceType, ...] = ("cuda",)
    how_to_get = "build FlagCX and install its plug-in: pip install ./plugin/torch"
    environment: ClassVar[Mapping[str, str]] = {
        "FLAGCX_IB_HCA": "the network adapters to use, such as mlx5",
        "FLAGCX_ENABLE_TOPO_DETECT": "TRUE: look for the fastest way between devices",
        "FLAGCX_DEBUG": "INFO: say what it does",
    }

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        if importlib.util.find_spec("flagcx") is None:
            return "the Python module flagcx is not installed"
        if accelerator(device).is_host:
            return "flagcx moves device memory only"
        return device_missing(device)

    def serves(self, device: DeviceType) -> bool:
        # It is built for one of many makers' chips, and only that build itself could tell whose.
        return not accelerator(device).is_host

    def torch_backend(self, device: DeviceType) -> str:
        # It has no collectives for host memory, which object collectives need.
        return f"cpu:gloo,{accelerator(device).torch_type}:flagcx"

    @contextmanager
    def creating(self) -> Iterator[None]:
        importlib.import_module("flagcx")
        yield

    def version(self) -> str | None:
        return distribution_version("flagcx")


class TorchComms(CommBackend):
    name = "torchcomms"
    summary = "torchcomms under torch.distributed: ncclx on CUDA, gloo on the CPU"
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    how_to_get = "pip install torchcomms, of the version that fits torch"
    environment: ClassVar[Mapping[str, str]] = {
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1: for every group of the program, not this one alone",
    }

    @property
    def options(self) -> tuple[Option, ...]:
        # Its variable is the switch that choosing this backend turns on anyway.
        return self.own_options

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        if importlib.util.find_spec("torchcomms") is None:
            return "the Python module torchcomms is not installed"
        if importlib.util.find_spec("torch.distributed.config") is None:
            return "this torch does not know torchcomms; it needs 2.12 or later"
        return device_missing(device)

    def torch_backend(self, device: DeviceType) -> str:
        # ncclx is NVIDIA's nccl with additions.
        return "cuda:ncclx" if device == "cuda" else "cpu:gloo"

    @contextmanager
    def creating(self) -> Iterator[None]:
        config: Any = importlib.import_module("torch.distributed.config")
        before = config.use_torchcomms
        config.use_torchcomms = True
        try:
            yield
        finally:
            config.use_torchcomms = before

    def version(self) -> str | None:
        return distribution_version("torchcomms")


_OF_A_BUILD = ("gloo", "mpi", "nccl", "ucc")
"""Backends that a build of torch has or not; others come with packages of their own."""


class DeviceMap(CommBackend):
    """torch's own form: ``cpu:gloo,cuda:nccl``, a backend for each kind of device."""

    summary = "a backend for each kind of device"

    def __init__(self, text: str, known: Callable[[str], CommBackend | None]) -> None:
        self.name = text
        self._parts = _parse_map(text)
        self._known = known
        adapters = [adapter for adapter in map(known, self._parts.values()) if adapter]
        self.operations = tuple(o for o in OPERATIONS if all(o in a.operations for a in adapters))
        self.devices = tuple(self._parts)

    def operations_on(self, device: DeviceType) -> tuple[str, ...]:
        adapter = self._known(self._parts.get(accelerator(device).torch_type, ""))
        return self.operations if adapter is None else adapter.operations_on(device)

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        part = self._parts.get(accelerator(device).torch_type)
        if part is None:
            return f"{self.name!r} names no backend for {device}"
        import torch.distributed as dist

        adapter = self._known(part)
        if adapter is not None:
            missing = adapter.unavailable(device)
        elif not dist.is_backend_available(part):
            missing = f"torch knows no backend {part!r}; is its plug-in installed and imported?"
        if missing:
            return missing
        # torch makes a group of every part, whatever device the ranks are on.
        absent = [one for one in _OF_A_BUILD if one in self._parts.values()]
        absent = [one for one in absent if not dist.is_backend_available(one)]
        return f"this build of torch has no {absent[0]}" if absent else None

    @property
    def options(self) -> tuple[Option, ...]:
        """Those of all parts that are variables: arguments of one part cannot reach it."""
        found: dict[str, Option] = {}
        for adapter in map(self._known, self._parts.values()):
            for option in adapter.options if adapter else ():
                if option.variable is not None:
                    found.setdefault(option.name, option)
        return tuple(found.values())

    def export(self, values: OptionValues) -> None:
        for adapter in map(self._known, self._parts.values()):
            if adapter is not None:
                adapter.export(values)

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        import torch

        # Who moves host memory alone is told so; arguments of one part cannot reach it.
        part = self._parts.get("cpu", "")
        adapter = self._known(part)
        if adapter is not None and (device.type == "cpu" or self._parts.get(device.type) != part):
            adapter.init_options(torch.device("cpu"), values)
        return {}

    @contextmanager
    def creating(self) -> Iterator[None]:
        adapters = [self._known(part) for part in self._parts.values()]
        # Two switches at once would each be meant for the whole string.
        first = next((a for a in adapters if isinstance(a, Flagcx | TorchComms)), None)
        if first is None:
            yield
            return
        with first.creating():
            yield


def is_device_map(name: str) -> bool:
    """Whether ``name`` is meant as a map from devices to backends."""
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


class Broken(CommBackend):
    """A third party's entry point that does not load: listed, with the reason."""

    devices: tuple[DeviceType, ...] = ("cpu", "cuda")

    def __init__(self, name: str, reason: str, how_to_get: str) -> None:
        self.name = name
        self.summary = f"from {reason.partition(':')[0]}, which does not load"
        self.how_to_get = how_to_get
        self._reason = reason

    def unavailable(self, device: DeviceType) -> str | None:
        return self._reason


def third_parties() -> dict[str, CommBackend]:
    """The backends of installed packages, by name. One that does not load is there as well, and
    says why it cannot be used."""
    return {name: _made(name) for name in INSTALLED.others()}


def _made(name: str) -> CommBackend:
    try:
        made: CommBackend = INSTALLED.made(name, CommBackend)
    except ConfigError as error:
        return Broken(name, error.message, error.hint or "")
    return made
