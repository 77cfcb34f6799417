"""The communication backends that ``distributed_backend`` of a YAML can name.

A backend is one small adapter: it says which string torch knows it by, which devices it serves,
whether this machine can use it and if not, why, and how its process group is started. Adapters
register by name; nothing here imports torch until a process group is about to be made, so that
the launcher can list and check backends on a machine without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import accelerator, every
from flagscale.comm.base import CommBackend, DeviceType, device_missing, missing_torch
from flagscale.comm.fsccl_adapter import Fsccl
from flagscale.comm.options import Option, OptionValues, parse
from flagscale.comm.plugins import (
    DeviceMap,
    Flagcx,
    Mpi,
    TorchComms,
    Ucc,
    is_device_map,
    third_parties,
)
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["CommBackend", "DeviceType", "backend", "names", "options_of", "usable"]

_KEY = "distributed_backend"


class Gloo(CommBackend):
    name = "gloo"
    summary = "torch's own TCP collectives; those of GPU memory go through host memory"
    devices = ("cpu", "cuda")
    how_to_get = "every wheel of torch has it"
    environment: ClassVar[Mapping[str, str]] = {
        "GLOO_SOCKET_IFNAME": "the network interface, where the host name's is the wrong one",
    }

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        import torch.distributed as dist

        if not dist.is_gloo_available():
            return "this build of torch has no gloo"
        return device_missing(device)

    def operations_on(self, device: DeviceType) -> tuple[str, ...]:
        # Its collectives copy GPU memory to the host and back; its messages are handed the
        # address as if it were the host's.
        messages = () if accelerator(device).is_host else ("sendrecv", "permute")
        return tuple(name for name in self.operations if name not in messages)


_NCCL_OPTIONS = (
    Option("is_high_priority_stream", "run its kernels before others that wait", "bool"),
    # The variables reach every communicator; options alone, the default group's.
    Option("min_ctas", "thread blocks of a kernel, at least", "int", 1, 64, "NCCL_MIN_CTAS"),
    Option("max_ctas", "thread blocks of a kernel, at most", "int", 1, 64, "NCCL_MAX_CTAS"),
    Option(
        *("cga_cluster_size", "thread blocks of a cluster", "int"),
        maximum=8,
        variable="NCCL_CGA_CLUSTER_SIZE",
    ),
    Option("net_name", "the network plug-in, such as IB or Socket", variable="NCCL_NET"),
    Option("split_share", "let split communicators share resources", "bool"),
)


def _nccl_options(values: OptionValues) -> Any:
    """``ProcessGroupNCCL.Options``, some of whose fields are those of its ``config``."""
    from torch.distributed import ProcessGroupNCCL

    made = ProcessGroupNCCL.Options()
    for name, value in values.items():
        holder = made if name == "is_high_priority_stream" else made.config
        # What NCCL's struct holds as an int torch does not take as a bool.
        setattr(holder, name, int(value) if name == "split_share" else value)
    return made


class Nccl(CommBackend):
    name = "nccl"
    summary = "NVIDIA's collectives, for tensors in GPU memory"
    devices = ("cuda",)
    how_to_get = "a CUDA build of torch and an NVIDIA driver"
    environment: ClassVar[Mapping[str, str]] = {
        "NCCL_SOCKET_IFNAME": "the network interface for meeting, and for data without RDMA",
        "NCCL_IB_HCA": "the RDMA adapters to use",
        "NCCL_DEBUG": "INFO: say which ways and algorithms it takes",
    }

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        import torch.distributed as dist

        # It is NVIDIA's own, whatever kinds of devices there are.
        if missing := device_missing("cuda"):
            return missing
        if device != "cuda":
            where = accelerator(device).shown
            return f"nccl moves GPU memory only, and the training device is the {where}"
        return None if dist.is_nccl_available() else "this build of torch has no nccl"

    own_options = _NCCL_OPTIONS

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        # Binding the device connects at once, so that a broken link shows here and not in the
        # first collective, and lets sub-groups split the communicator instead of making anew.
        names = {option.name for option in self.own_options}
        own = {name: value for name, value in (values or {}).items() if name in names}
        return {"device_id": device, **({"pg_options": _nccl_options(own)} if own else {})}

    def version(self) -> str | None:
        if self.unavailable("cuda") is not None:
            return None
        from torch.cuda import nccl

        return ".".join(str(number) for number in nccl.version())  # type: ignore[no-untyped-call]


class Auto(CommBackend):
    name = "auto"
    summary = "nccl on CUDA, gloo on the CPU"
    devices = ("cpu", "cuda")

    def serves(self, device: DeviceType) -> bool:
        return True

    def unavailable(self, device: DeviceType) -> str | None:
        return self.resolve(device).unavailable(device)

    @property
    def options(self) -> tuple[Option, ...]:
        # Which of them runs is known on the host alone; what means nothing to it is left out.
        defaults = dict.fromkeys(kind.default_backend for kind in every())
        options = (option for own in filter(None, map(_find, defaults)) for option in own.options)
        return tuple({option.name: option for option in options}.values())

    def operations_on(self, device: DeviceType) -> tuple[str, ...]:
        return self.resolve(device).operations_on(device)

    def torch_backend(self, device: DeviceType) -> str:
        return self.resolve(device).torch_backend(device)

    def resolve(self, device: DeviceType) -> CommBackend:
        return backend(accelerator(device).default_backend)


_OWN: dict[str, CommBackend] = {
    b.name: b for b in (Auto(), Nccl(), Gloo(), Fsccl(), Mpi(), Ucc(), Flagcx(), TorchComms())
}


@cache
def _all() -> dict[str, CommBackend]:
    """Ours and those of installed packages; a package cannot take one of our names."""
    return {**third_parties(), **_OWN}


def names() -> tuple[str, ...]:
    """The names a YAML may give, in the order they are shown; a map from devices is one more."""
    return (*_OWN, *(name for name in _all() if name not in _OWN))


def backend(name: str, given_by: str = _KEY) -> CommBackend:
    """The adapter called ``name``, or one for a map such as ``cpu:gloo,cuda:nccl``.

    ``given_by``: the key or flag that messages say the name is a value of.

    Raises:
        ConfigError: no backend has this name; the message gives the nearest and all names.
    """
    found = _find(name)
    if found is not None:
        return found
    if is_device_map(name):
        return DeviceMap(name, _find)
    near = difflib.get_close_matches(name, _all(), n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{given_by}: {name!r} is not a known backend{meant} (known: {', '.join(names())})"
    )


def _find(name: str) -> CommBackend | None:
    # Packages are looked at only for a name that is not ours: it takes a while.
    return _OWN.get(name) or _all().get(name)


def options_of(name: str, words: Sequence[str]) -> OptionValues:
    """The options that a YAML sets for the backend it calls ``name``, from ``name=value`` words.

    Raises:
        ConfigError: the name is unknown, or with every option that is unknown or has an unfit
            value; keys are the options' names.
    """
    found = backend(name)
    return parse(name, found.options, words)


def usable(
    name: str, device: DeviceType, operations: Collection[str] = (), given_by: str = _KEY
) -> CommBackend:
    """The backend that runs when a YAML says ``name`` and its tensors are on ``device``.

    ``given_by``: as for :func:`backend`.

    Raises:
        ConfigError: the name is unknown, this machine cannot use the backend, or the backend
            cannot do one of ``operations`` on ``device``.
    """
    found = backend(name, given_by).resolve(device)
    reason = _unfit(found, device, operations)
    if reason is None:
        return found
    others = [b for b in names() if b != name and _unfit(backend(b), device, operations) is None]
    hints = [f"to get it: {found.how_to_get}"] if found.how_to_get else []
    hints += [f"on this machine these work: {', '.join(others)}"] if others else []
    raise ConfigError(
        f"{given_by}: {name!r} cannot be used here: {reason}",
        hint="; ".join(hints) or None,
    )


def _unfit(found: CommBackend, device: DeviceType, operations: Collection[str]) -> str | None:
    """Why a backend does not do; None when it does."""
    if reason := found.unavailable(device):
        return reason
    kind = accelerator(device)
    where = "host memory" if kind.is_host else f"{kind.unit} memory"
    if not found.serves(device):
        return f"it does not move {where}"
    able = found.operations_on(device)
    lacking = [name for name in operations if name not in able]
    return f"it cannot do {', '.join(lacking)} on {where}" if lacking else None
