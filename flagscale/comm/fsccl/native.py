"""Native library of a rank: its selection, and creation of its backends.

The native library, such as NCCL, transfers a rank's tensors to ranks with the same library. Ranks
whose :class:`NativeLibrary` is equal form a cluster; between clusters fsccl transfers the data
through host memory (``csrc/device/engine.h``). backend.py calls this module for every new group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from flagscale.comm.fsccl import nvlink
from flagscale.errors import ConfigError

CUDA_VARIABLE = "FSCCL_CUDA"

MakeNativeBackend = Callable[[int, int, Sequence[int]], Any]
"""Function that creates a ``c10d::Backend`` for a cluster. Its arguments are the cluster's number,
this rank's index in the cluster, and the group ranks of the cluster's members.
"""


@dataclass(frozen=True)
class NativeLibrary:
    """Description of a rank's native library, which it sends to the other ranks of its group."""

    device: str = "cpu"
    """torch's device type: ``cpu`` or ``cuda``."""
    vendor: str = "cpu"
    library: str = "own"
    """``own`` is the shared memory of fsccl's core. Includes the library's version if different
    versions are incompatible.
    """
    reach: str = ""
    """Name of a set of ranks whose native libraries can connect to each other
    (``FSCCL_REACH``). Empty: all ranks can.
    """

    def as_strings(self) -> list[str]:
        """Return the fields in the order in which the extension module takes them."""
        return list(astuple(self))


def detect_native_library() -> NativeLibrary:
    """Return the native library of this rank, from the environment and this machine's hardware.

    Environment:

    - ``FSCCL_CUDA=0`` leaves CUDA tensors to other backends, as does ``FSCCL_DEVICE=cpu``, which
      makes this a CPU rank even if there is a GPU.
    - ``FSCCL_DEVICE=cuda`` requires a GPU.
    - ``FSCCL_NATIVE`` selects the library of CPU ranks.
    - ``FSCCL_REACH`` gives ranks that cannot connect to each other different names.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    device = _read_choice("FSCCL_DEVICE", ("cpu", "cuda"))
    reach = os.environ.get("FSCCL_REACH", "")
    if not reach.isprintable():
        raise ConfigError(f"FSCCL_REACH={reach!r}: expected a name in printable characters")
    library = _read_choice("FSCCL_NATIVE", ("own", "gloo", "fsccl"))
    cpu_library = NativeLibrary(library=library or "own", reach=reach)
    if device == "cpu":  # before the driver is queried
        return cpu_library
    if no_cuda_reason := explain_no_cuda():
        if device == "cuda":
            raise ConfigError(f"FSCCL_DEVICE=cuda: {no_cuda_reason}")
        return cpu_library
    if library:
        raise ConfigError(
            f"FSCCL_NATIVE={library} is for ranks on CPUs: those on GPUs use nccl",
            hint="FSCCL_DEVICE=cpu makes this a CPU rank",
        )
    return _detect_cuda_library(reach)


def explain_no_cuda() -> str | None:
    """Return the reason why this rank does not support CUDA tensors; None if it does.

    Raises:
        ConfigError: ``FSCCL_CUDA`` is neither 0 nor 1.
    """
    if _read_choice(CUDA_VARIABLE, ("0", "1")) == "0":
        return f"{CUDA_VARIABLE}=0 leaves CUDA tensors alone"
    if torch.version.hip is not None:
        return "fsccl supports only NVIDIA's GPUs, not ROCm"
    if not torch.cuda.is_available():
        return "there is no CUDA device on this machine"
    return None if dist.is_nccl_available() else "this build of torch has no nccl"


def prepare_native_library(native: NativeLibrary) -> None:
    """Initialize the process-wide resources of the native library. Idempotent.

    Raises:
        BuildError: the NVLink engine's kernels cannot be compiled.
    """
    if native.library.endswith("+nvlink"):
        nvlink.prepare_engine()


def accepts_options(native: NativeLibrary, options: Any) -> bool:
    """Return True if a group's ``pg_options`` are those of the native library."""
    return native.device == "cuda" and isinstance(options, dist.ProcessGroupNCCL.Options)


def native_backend_factory(
    native: NativeLibrary, extension: Any, options: Any, store: Any, library_options: Any = None
) -> MakeNativeBackend:
    """Return the factory of the native library's backends for a group.

    Args:
        native: description of this rank's native library.
        extension: the compiled module.
        options: torch's ``DistributedBackendOptions`` of the group.
        store: store of the group's generation.
        library_options: options of the native library, see :func:`accepts_options`.
    """
    global_ranks = list(options.global_ranks_in_group)

    def make_backend(cluster: int, index: int, ranks: Sequence[int]) -> Any:
        # A separate connection: libraries wait in the store, and a wait blocks the connection for
        # other groups of this process, on which other ranks may depend.
        cluster_store = PrefixStore(f"native/{cluster}", store.clone())
        # The default group has no list: its group ranks are the global ranks.
        member_global_ranks = [global_ranks[r] if global_ranks else r for r in ranks]
        name = f"{options.group_id}/native{cluster}"
        if native.library.startswith("nccl"):
            nccl_options = library_options or dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            nccl_options.global_ranks_in_group = member_global_ranks
            nccl_options.group_name = name
            return dist.ProcessGroupNCCL(cluster_store, index, len(ranks), nccl_options)
        if native.library == "gloo":
            return dist.ProcessGroupGloo(cluster_store, index, len(ranks), options.timeout)
        return extension.Backend(
            store=cluster_store,
            generation="",
            rank=index,
            size=len(ranks),
            timeout=options.timeout,
            name=name,
            global_ranks=member_global_ranks,
            options=None,
            native=NativeLibrary().as_strings(),
            make_native=None,
        )

    return make_backend


def _detect_cuda_library(reach: str) -> NativeLibrary:
    from torch.cuda import nccl

    version = ".".join(str(number) for number in nccl.version())  # type: ignore[no-untyped-call]
    # Ranks with and without the engine must not be in the same cluster.
    engine = "+nvlink" if nvlink.is_enabled() else ""
    return NativeLibrary("cuda", "nvidia", f"nccl {version}{engine}", reach)


def _read_choice(variable: str, choices: Sequence[str]) -> str | None:
    value = os.environ.get(variable) or None
    if value is not None and value not in choices:
        raise ConfigError(f"{variable}={value}: expected one of {', '.join(choices)}")
    return value
