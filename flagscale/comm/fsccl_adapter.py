"""Adapter of fsccl, the collective library of this project."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale import __version__
from flagscale.comm.base import (
    CommBackend,
    DeviceType,
    explain_missing_device,
    explain_missing_torch,
)
from flagscale.comm.options import Option, OptionValues
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Fsccl(CommBackend):
    """Adapter of fsccl."""

    name = "fsccl"
    summary = "this project's collectives: shared memory within a host, messages between clusters"
    devices = ("cpu", "cuda")
    how_to_get = "a wheel with a prebuilt one, or a C++17 compiler and ninja (docs/design/fsccl.md)"
    environment: ClassVar[Mapping[str, str]] = {
        "FSCCL_DEBUG": "INFO: log the algorithm of each operation",
        "FSCCL_CLUSTERS": "manual sizes of clusters (ranks that share memory), such as 4,4",
        "FSCCL_CUDA": "0: do not handle CUDA tensors, even where there is a GPU",
        "FSCCL_SOCKET_IFNAME": "the network interface between hosts",
        "FSCCL_TCP_INTERFACES": "number of these interfaces that share large messages",
        "FSCCL_ALGO": "all_reduce between clusters: ring, tree or transpose; auto: by size",
        "FSCCL_PIPELINE_K": "number of chunks of pipelined schedules; 0: other algorithms",
        "FSCCL_PIPELINE_NELEM": "elements per send of a pipelined schedule",
        "FSCCL_TAIL": "bounded: all_reduce of large float tensors over UDP, in bounded time",
        "FSCCL_TAIL_GROUPS": "groups that use it, as patterns of their group_desc; default: all",
        "FSCCL_TAIL_BYTES": "minimum size of an all_reduce in bounded time, in bytes",
        "FSCCL_TAIL_LIMIT": "maximum percentage of an all_reduce that may be missing",
        "FSCCL_TAIL_ABOVE": "above this limit: repeat the operation exactly, or skip it",
        "FSCCL_TAIL_FEEDBACK": "true: missing parts are added to the next gradient",
        "FSCCL_TAIL_RATE": "send rate of a rank in bounded time, in Mbit/s; 0: estimated",
    }
    specific_options = (
        Option(
            "debug",
            environment["FSCCL_DEBUG"],
            variable="FSCCL_DEBUG",
            pattern="INFO|WARN",
            shape="INFO or WARN",
        ),
        Option(
            "clusters",
            environment["FSCCL_CLUSTERS"],
            variable="FSCCL_CLUSTERS",
            pattern="[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*",
            shape="comma-separated sizes, such as 4,4",
        ),
        Option(
            "algo",
            environment["FSCCL_ALGO"],
            variable="FSCCL_ALGO",
            pattern="auto|ring|tree|transpose",
            shape="auto, ring, tree or transpose",
        ),
        Option(
            "pipeline_k",
            environment["FSCCL_PIPELINE_K"],
            "int",
            maximum=64,
            variable="FSCCL_PIPELINE_K",
        ),
        Option(
            "pipeline_nelem",
            environment["FSCCL_PIPELINE_NELEM"],
            "int",
            minimum=1,
            maximum=1 << 26,
            variable="FSCCL_PIPELINE_NELEM",
        ),
        Option(
            "tail",
            environment["FSCCL_TAIL"],
            variable="FSCCL_TAIL",
            pattern="bounded|exact",
            shape="bounded or exact",
        ),
        Option(
            "tail_groups",
            environment["FSCCL_TAIL_GROUPS"],
            variable="FSCCL_TAIL_GROUPS",
            pattern=r"[^,\s]+(,[^,\s]+)*",
            shape="comma-separated patterns, such as *DATA_PARALLEL*",
        ),
        Option(
            "tail_bytes",
            environment["FSCCL_TAIL_BYTES"],
            "int",
            minimum=65536,
            variable="FSCCL_TAIL_BYTES",
        ),
        Option(
            "tail_limit",
            environment["FSCCL_TAIL_LIMIT"],
            "int",
            maximum=100,
            variable="FSCCL_TAIL_LIMIT",
        ),
        Option(
            "tail_above",
            environment["FSCCL_TAIL_ABOVE"],
            variable="FSCCL_TAIL_ABOVE",
            pattern="repeat|skip",
            shape="repeat or skip",
        ),
        Option(
            "tail_feedback",
            environment["FSCCL_TAIL_FEEDBACK"],
            "bool",
            variable="FSCCL_TAIL_FEEDBACK",
        ),
        Option(
            "tail_rate",
            environment["FSCCL_TAIL_RATE"],
            "int",
            maximum=1_000_000,
            variable="FSCCL_TAIL_RATE",
        ),
    )

    def explain_unavailable(self, device: DeviceType) -> str | None:
        if problem := explain_missing_torch():
            return problem
        from flagscale.comm.fsccl.build import unavailable_reason
        from flagscale.comm.fsccl.native import explain_no_cuda

        if device == "cuda":  # the GPU engine supports NVIDIA only
            try:
                problem = explain_missing_device(device) or explain_no_cuda()
            except ConfigError as error:
                problem = str(error)
            if problem:
                return problem
        return unavailable_reason()

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        # also on a host with GPUs, because tensors of a CPU rank never go there
        if device.type == "cpu":
            os.environ.setdefault("FSCCL_DEVICE", "cpu")
        return {}

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        # Importing the package registers the backend with torch.
        import flagscale.comm.fsccl  # noqa: F401
        from flagscale.comm.fsccl.build import load_extension

        # If compilation is necessary, it happens here and not while ranks wait for each other.
        load_extension()
        yield

    def explain_mismatch(self, values: OptionValues, ranks: int) -> str | None:
        sizes = str(values.get("clusters") or os.environ.get("FSCCL_CLUSTERS") or ranks)
        total = sum(int(size) for size in sizes.split(",") if size.isdecimal())
        if total == ranks:
            return None
        return f"clusters={sizes}: the sizes add up to {total}, and there are {ranks} rank(s)"

    def version(self) -> str | None:
        return __version__

    def origin(self) -> str | None:
        from flagscale.comm.fsccl.build import describe_origin

        return describe_origin()
