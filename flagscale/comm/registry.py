"""Registry of the communication backends that ``distributed_backend`` in a YAML can name.

An adapter defines torch's name of a backend, the supported devices, the reason why this machine
cannot use it, if any, and the creation of its process group. No module here imports torch before
a process group is created, so that the launcher can list and check backends on a machine without
torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.registry import get_accelerator, list_accelerators
from flagscale.comm.base import (
    CommBackend,
    DeviceType,
    explain_missing_device,
    explain_missing_torch,
)
from flagscale.comm.fsccl_adapter import Fsccl
from flagscale.comm.options import Option, OptionValues, parse_options
from flagscale.comm.plugins import (
    DeviceMap,
    Flagcx,
    Mpi,
    TorchComms,
    Ucc,
    is_device_map,
    load_installed_backends,
)
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CommBackend",
    "DeviceType",
    "get_backend",
    "get_usable_backend",
    "list_backend_names",
    "parse_backend_options",
]

_CONFIG_KEY = "distributed_backend"


class Gloo(CommBackend):
    """Adapter of gloo."""

    name = "gloo"
    summary = "torch's own TCP collectives; those of GPU memory go through host memory"
    devices = ("cpu", "cuda")
    how_to_get = "every wheel of torch has it"
    environment: ClassVar[Mapping[str, str]] = {
        "GLOO_SOCKET_IFNAME": "the network interface, where the host name's is the wrong one",
    }

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        import torch.distributed as dist

        if not dist.is_gloo_available():
            return "this build of torch has no gloo"
        return explain_missing_device(device)

    def operations_for(self, device: DeviceType) -> tuple[str, ...]:
        # Its collectives copy GPU memory to the host and back. Its point-to-point operations treat
        # the address as host memory.
        messages = () if get_accelerator(device).is_host else ("sendrecv", "permute")
        return tuple(name for name in self.operations if name not in messages)


_NCCL_OPTIONS = (
    Option("is_high_priority_stream", "run its kernels at high priority", "bool"),
    # Variables apply to every communicator; options alone only to the default group's.
    Option(
        "min_ctas", "minimum number of thread blocks of a kernel", "int", 1, 64, "NCCL_MIN_CTAS"
    ),
    Option(
        "max_ctas", "maximum number of thread blocks of a kernel", "int", 1, 64, "NCCL_MAX_CTAS"
    ),
    Option(
        "cga_cluster_size",
        "thread blocks of a cluster",
        "int",
        maximum=8,
        variable="NCCL_CGA_CLUSTER_SIZE",
    ),
    Option("net_name", "the network plug-in, such as IB or Socket", variable="NCCL_NET"),
    Option("split_share", "let split communicators share resources", "bool"),
)


def _build_nccl_options(values: OptionValues) -> Any:
    """Return ``ProcessGroupNCCL.Options``. Most options are fields of its ``config``."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    for name, value in values.items():
        target = options if name == "is_high_priority_stream" else options.config
        # torch's binding of NCCL's struct rejects a bool for an int field.
        setattr(target, name, int(value) if name == "split_share" else value)
    return options


class Nccl(CommBackend):
    """Adapter of NCCL."""

    name = "nccl"
    summary = "NVIDIA's collectives, for tensors in GPU memory"
    devices = ("cuda",)
    how_to_get = "a CUDA build of torch and an NVIDIA driver"
    environment: ClassVar[Mapping[str, str]] = {
        "NCCL_SOCKET_IFNAME": "the network interface for bootstrap, and for data without RDMA",
        "NCCL_IB_HCA": "the RDMA adapters to use",
        "NCCL_DEBUG": "INFO: log its transports and algorithms",
    }

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        import torch.distributed as dist

        # NCCL supports NVIDIA only, whatever kinds of devices are installed.
        if problem := explain_missing_device("cuda"):
            return problem
        if device != "cuda":
            device_name = get_accelerator(device).display_name
            return f"nccl moves GPU memory only, and the training device is the {device_name}"
        return None if dist.is_nccl_available() else "this build of torch has no nccl"

    specific_options = _NCCL_OPTIONS

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        # Binding the device connects eagerly, so that a broken link is detected here and not in the
        # first collective, and sub-groups can split the communicator instead of creating a new one.
        names = {option.name for option in self.specific_options}
        nccl_values = {name: value for name, value in (values or {}).items() if name in names}
        return {
            "device_id": device,
            **({"pg_options": _build_nccl_options(nccl_values)} if nccl_values else {}),
        }

    def version(self) -> str | None:
        if self.explain_unavailable("cuda") is not None:
            return None
        from torch.cuda import nccl

        return ".".join(str(number) for number in nccl.version())  # type: ignore[no-untyped-call]


class Auto(CommBackend):
    """Backend that depends on the device of the ranks."""

    name = "auto"
    summary = "nccl on CUDA, gloo on the CPU"
    devices = ("cpu", "cuda")

    def supports_device(self, device: DeviceType) -> bool:
        return True

    def explain_unavailable(self, device: DeviceType) -> str | None:
        return self.resolve_for(device).explain_unavailable(device)

    @property
    def options(self) -> tuple[Option, ...]:
        # The selected backend is only known on the host. Options of other backends have no effect
        # there.
        defaults = dict.fromkeys(kind.default_backend for kind in list_accelerators())
        options = (
            option
            for choice in filter(None, map(_find_backend, defaults))
            for option in choice.options
        )
        return tuple({option.name: option for option in options}.values())

    def operations_for(self, device: DeviceType) -> tuple[str, ...]:
        return self.resolve_for(device).operations_for(device)

    def torch_backend(self, device: DeviceType) -> str:
        return self.resolve_for(device).torch_backend(device)

    def resolve_for(self, device: DeviceType) -> CommBackend:
        return get_backend(get_accelerator(device).default_backend)


_BUILTIN: dict[str, CommBackend] = {
    b.name: b for b in (Auto(), Nccl(), Gloo(), Fsccl(), Mpi(), Ucc(), Flagcx(), TorchComms())
}


@cache
def _load_backends() -> dict[str, CommBackend]:
    """Return the built-in backends and those of installed packages. Packages cannot override
    built-in names.
    """
    return {**load_installed_backends(), **_BUILTIN}


def list_backend_names() -> tuple[str, ...]:
    """Return the names that a YAML may use, in display order. Device maps are valid in addition."""
    return (*_BUILTIN, *(name for name in _load_backends() if name not in _BUILTIN))


def get_backend(name: str, source: str = _CONFIG_KEY) -> CommBackend:
    """Return the adapter called ``name``, or one for a map such as ``cpu:gloo,cuda:nccl``.

    ``source`` is the key or flag that messages name as the source of ``name``.

    Raises:
        ConfigError: no backend has this name. The message contains the closest name and all names.
    """
    known_backend = _find_backend(name)
    if known_backend is not None:
        return known_backend
    if is_device_map(name):
        return DeviceMap(name, _find_backend)
    close_matches = difflib.get_close_matches(name, _load_backends(), n=1)
    suggestion = f"; did you mean {close_matches[0]!r}?" if close_matches else ""
    names = ", ".join(list_backend_names())
    raise ConfigError(f"{source}: {name!r} is not a known backend{suggestion} (known: {names})")


def _find_backend(name: str) -> CommBackend | None:
    # Packages are only searched for names that are not built in, because it takes long.
    return _BUILTIN.get(name) or _load_backends().get(name)


def parse_backend_options(name: str, words: Sequence[str]) -> OptionValues:
    """Parse the ``name=value`` words that a YAML sets for the backend ``name``.

    Raises:
        ConfigError: the backend is unknown, an option is unknown, or a value is invalid. The error
            has a problem for each option, by the option's name.
    """
    return parse_options(name, get_backend(name).options, words)


def get_usable_backend(
    name: str, device: DeviceType, operations: Collection[str] = (), source: str = _CONFIG_KEY
) -> CommBackend:
    """Return the backend that runs for ``name`` and tensors on ``device``, after checking it.

    ``source`` is as for :func:`get_backend`.

    Raises:
        ConfigError: the name is unknown, this machine cannot use the backend, or the backend does
            not support one of ``operations`` on ``device``.
    """
    usable_backend = get_backend(name, source).resolve_for(device)
    reason = _explain_unfit(usable_backend, device, operations)
    if reason is None:
        return usable_backend
    alternatives = [
        b
        for b in list_backend_names()
        if b != name and _explain_unfit(get_backend(b), device, operations) is None
    ]
    hints = [f"to get it: {usable_backend.how_to_get}"] if usable_backend.how_to_get else []
    hints += [f"on this machine these work: {', '.join(alternatives)}"] if alternatives else []
    raise ConfigError(
        f"{source}: {name!r} cannot be used here: {reason}",
        hint="; ".join(hints) or None,
    )


def _explain_unfit(
    backend: CommBackend, device: DeviceType, operations: Collection[str]
) -> str | None:
    """Return the reason why a backend cannot be used; None if it can."""
    if reason := backend.explain_unavailable(device):
        return reason
    kind = get_accelerator(device)
    memory_kind = "host memory" if kind.is_host else f"{kind.unit} memory"
    if not backend.supports_device(device):
        return f"it does not move {memory_kind}"
    supported = backend.operations_for(device)
    unsupported = [name for name in operations if name not in supported]
    return f"it cannot do {', '.join(unsupported)} on {memory_kind}" if unsupported else None
