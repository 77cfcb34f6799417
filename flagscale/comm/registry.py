"""The communication backends that ``distributed_backend`` of a YAML can name.

A backend is one small adapter: it says which string torch knows it by, which devices it serves,
whether this machine can use it and if not, why, and how its process group is started. Adapters
register by name; nothing here imports torch until a process group is about to be made, so that
the launcher can list and check backends on a machine without torch.
"""

from __future__ import annotations

import difflib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

DeviceType = Literal["cpu", "cuda"]


class CommBackend(ABC):
    """How one communication library is used through ``torch.distributed``."""

    name: str
    """What a YAML calls it."""
    summary: str
    """One line for ``--help`` and documentation."""
    devices: tuple[DeviceType, ...]
    """The devices whose tensors it moves."""

    @abstractmethod
    def unavailable(self, device: DeviceType) -> str | None:
        """Why this machine cannot use it for tensors of ``device``; None when it can."""

    def torch_backend(self, device: DeviceType) -> str:
        """The ``backend`` argument of ``torch.distributed.init_process_group``."""
        return self.name

    def init_options(self, device: torch.device) -> Mapping[str, Any]:
        """Further arguments of ``init_process_group`` for a rank on ``device``."""
        return {}

    def resolve(self, device: DeviceType) -> CommBackend:
        """The backend that really runs: itself, unless it stands for a choice."""
        return self


def _missing_torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


class Gloo(CommBackend):
    name = "gloo"
    summary = "torch's own TCP collectives, for tensors in host memory"
    devices = ("cpu",)

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := _missing_torch():
            return missing
        if device != "cpu":
            return "megatron.core needs collectives on device memory, which gloo does not offer"
        import torch.distributed as dist

        return None if dist.is_gloo_available() else "this build of torch has no gloo"


class Nccl(CommBackend):
    name = "nccl"
    summary = "NVIDIA's collectives, for tensors in GPU memory"
    devices = ("cuda",)

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := _missing_torch():
            return missing
        import torch
        import torch.distributed as dist

        if not torch.cuda.is_available():
            return "no CUDA device is visible (check CUDA_VISIBLE_DEVICES and the driver)"
        if device != "cuda":
            return "nccl moves GPU memory only, and the training device is the CPU"
        return None if dist.is_nccl_available() else "this build of torch has no nccl"

    def init_options(self, device: torch.device) -> Mapping[str, Any]:
        # Binding the device connects at once, so that a broken link shows here and not in the
        # first collective, and lets sub-groups split the communicator instead of making anew.
        return {"device_id": device}


class Auto(CommBackend):
    name = "auto"
    summary = "nccl on CUDA, gloo on the CPU"
    devices = ("cpu", "cuda")

    def unavailable(self, device: DeviceType) -> str | None:
        return self.resolve(device).unavailable(device)

    def torch_backend(self, device: DeviceType) -> str:
        return self.resolve(device).torch_backend(device)

    def resolve(self, device: DeviceType) -> CommBackend:
        return backend("nccl" if device == "cuda" else "gloo")


_BACKENDS: dict[str, CommBackend] = {b.name: b for b in (Auto(), Nccl(), Gloo())}


def names() -> tuple[str, ...]:
    """The names a YAML may give, in the order they are shown."""
    return tuple(_BACKENDS)


def backend(name: str) -> CommBackend:
    """The adapter called ``name``.

    Raises:
        ConfigError: no backend has this name; the message gives the nearest and all names.
    """
    found = _BACKENDS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, _BACKENDS, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"distributed_backend: {name!r} is not a known backend{meant} "
        f"(known: {', '.join(_BACKENDS)})"
    )


def usable(name: str, device: DeviceType) -> CommBackend:
    """The backend that runs when a YAML says ``name`` and training is on ``device``.

    Raises:
        ConfigError: the name is unknown, or this machine cannot use the backend.
    """
    found = backend(name).resolve(device)
    reason = found.unavailable(device)
    if reason is None:
        return found
    others = [b for b in _BACKENDS if b != name and backend(b).unavailable(device) is None]
    hint = f"on this machine these work: {', '.join(others)}" if others else None
    raise ConfigError(f"distributed_backend: {name!r} cannot be used here: {reason}", hint=hint)
