"""What moves a rank's tensors among its like: its native library, found, told and made.

Ranks with the same device, vendor, library and reach form a cluster (``csrc/device/engine.h``).
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

CUDA_SWITCH = "FSCCL_CUDA"

Make = Callable[[int, int, Sequence[int]], Any]
"""Of a cluster's number, this rank's index in it, and its group ranks: a ``c10d::Backend``."""


@dataclass(frozen=True)
class Native:
    """What a rank tells the others of its group."""

    device: str = "cpu"
    """As torch calls it: ``cpu`` or ``cuda``."""
    vendor: str = "cpu"
    library: str = "own"
    """``own``: the core's shared memory. With its version, where unlike ones do not mix."""
    reach: str = ""
    """A name for ranks that reach each other; those with the same name do. Empty: all do."""

    def told(self) -> list[str]:
        return list(astuple(self))


def of_this_rank() -> Native:
    """What the environment and this machine make of this rank.

    Environment: ``FSCCL_CUDA=0`` leaves CUDA tensors alone, as does ``FSCCL_DEVICE=cpu``, which
    makes this a rank of the host also where there is a GPU; ``FSCCL_DEVICE=cuda`` insists on one;
    ``FSCCL_NATIVE`` names the library inside clusters of CPU ranks; ``FSCCL_REACH`` divides ranks
    that cannot reach each other.

    Raises:
        ConfigError: a variable has an unfit value.
    """
    device = _choice("FSCCL_DEVICE", ("cpu", "cuda"))
    reach = os.environ.get("FSCCL_REACH", "")
    if not reach.isprintable():
        raise ConfigError(f"FSCCL_REACH={reach!r}: expected a name in printable characters")
    library = _choice("FSCCL_NATIVE", ("own", "gloo", "fsccl"))
    host = Native(library=library or "own", reach=reach)
    if device == "cpu":  # nor is the driver asked
        return host
    if missing := why_no_cuda():
        if device == "cuda":
            raise ConfigError(f"FSCCL_DEVICE=cuda: {missing}")
        return host
    if library:
        raise ConfigError(
            f"FSCCL_NATIVE={library} is for ranks on CPUs: those on GPUs use nccl",
            hint="FSCCL_DEVICE=cpu makes this rank one on its CPU",
        )
    return _cuda(reach)


def why_no_cuda() -> str | None:
    """Why this rank moves no CUDA tensors; None when it does.

    Raises:
        ConfigError: ``FSCCL_CUDA`` is neither 0 nor 1.
    """
    if _choice(CUDA_SWITCH, ("0", "1")) == "0":
        return f"{CUDA_SWITCH}=0 leaves CUDA tensors alone"
    if torch.version.hip is not None:
        return "fsccl knows NVIDIA's GPUs only, not those of ROCm"
    if not torch.cuda.is_available():
        return "there is no CUDA device on this machine"
    return None if dist.is_nccl_available() else "this build of torch has no nccl"


def prepare(native: Native) -> None:
    """Make ready in this process what groups of this rank use. Idempotent.

    Raises:
        BuildError: the NVLink engine's kernels cannot be compiled.
    """
    if native.library.endswith("+nvlink"):
        nvlink.prepare()


def has_options(native: Native, options: Any) -> bool:
    """Whether a group's ``pg_options`` are those of the native library."""
    return native.device == "cuda" and isinstance(options, dist.ProcessGroupNCCL.Options)


def maker(native: Native, extension: Any, options: Any, library_options: Any = None) -> Make:
    """What makes the native library's backends for a group.

    Args:
        native: this rank's.
        extension: the compiled module.
        options: torch's ``DistributedBackendOptions`` of the group.
        library_options: see :func:`has_options`.
    """
    everyone = list(options.global_ranks_in_group)

    def make(cluster: int, index: int, ranks: Sequence[int]) -> Any:
        # A connection of its own: libraries wait in the store, and whoever waits on a connection
        # keeps other groups of this process from it, for which other ranks may be waiting.
        store = PrefixStore(f"native/{cluster}", options.store.clone())
        # The default group has no list: there, ranks are their own numbers.
        of_job = [everyone[r] if everyone else r for r in ranks]
        name = f"{options.group_id}/native{cluster}"
        if native.library.startswith("nccl"):
            made = library_options or dist.ProcessGroupNCCL.Options()
            made._timeout = options.timeout
            made.global_ranks_in_group = of_job
            made.group_name = name
            return dist.ProcessGroupNCCL(store, index, len(ranks), made)
        if native.library == "gloo":
            return dist.ProcessGroupGloo(store, index, len(ranks), options.timeout)
        return extension.Backend(
            store=store,
            rank=index,
            size=len(ranks),
            timeout=options.timeout,
            name=name,
            global_ranks=of_job,
            options=None,
            native=Native().told(),
            make_native=None,
        )

    return make


def _cuda(reach: str) -> Native:
    from torch.cuda import nccl

    version = ".".join(str(number) for number in nccl.version())  # type: ignore[no-untyped-call]
    # Ranks with and without the engine must not take themselves for alike.
    engine = "+nvlink" if nvlink.wanted() else ""
    return Native("cuda", "nvidia", f"nccl {version}{engine}", reach)


def _choice(variable: str, known: Sequence[str]) -> str | None:
    found = os.environ.get(variable) or None
    if found is not None and found not in known:
        raise ConfigError(f"{variable}={found}: expected one of {', '.join(known)}")
    return found
