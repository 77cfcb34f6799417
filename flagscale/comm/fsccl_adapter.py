"""The adapter of fsccl, the collective library in this repository."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale import __version__
from flagscale.comm.base import CommBackend, DeviceType, device_missing, missing_torch
from flagscale.comm.options import Option, OptionValues
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Fsccl(CommBackend):
    name = "fsccl"
    summary = "this project's collectives: shared memory in a host, messages between clusters"
    devices = ("cpu", "cuda")
    how_to_get = "a wheel with a prebuilt one, or a C++17 compiler and ninja (docs/fsccl.md)"
    environment: ClassVar[Mapping[str, str]] = {
        "FSCCL_DEBUG": "INFO: say which algorithm each operation took",
        "FSCCL_CLUSTERS": "sizes of clusters, split by hand, such as 4,4",
        "FSCCL_CUDA": "0: leave CUDA tensors alone, also where there is a GPU",
        "FSCCL_SOCKET_IFNAME": "the network interface between hosts",
        "FSCCL_TCP_INTERFACES": "how many of these share large messages",
        "FSCCL_ALGO": "all_reduce between clusters by ring, tree or transpose; auto: by size",
        "FSCCL_PIPELINE_K": "pipelined schedules of so many chunks; 0: other algorithms",
        "FSCCL_PIPELINE_NELEM": "elements of a send of a pipelined schedule",
        "FSCCL_TAIL": "bounded: all_reduce of large floats by datagrams, in bounded time",
        "FSCCL_TAIL_GROUPS": "groups that sum so, by patterns of their group_desc; else all",
        "FSCCL_TAIL_BYTES": "the smallest all_reduce in bounded time",
        "FSCCL_TAIL_LIMIT": "percent of one that may be left out",
        "FSCCL_TAIL_ABOVE": "above that limit: repeat it exactly, or skip it",
        "FSCCL_TAIL_FEEDBACK": "true: what is left out is added to the next gradient",
        "FSCCL_TAIL_RATE": "Mbit/s that a rank sends in bounded time; 0: learned",
    }
    own_options = (
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
            shape="sizes with commas between them, such as 4,4",
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
            shape="patterns with commas between them, such as *DATA_PARALLEL*",
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

    def unavailable(self, device: DeviceType) -> str | None:
        if missing := missing_torch():
            return missing
        from flagscale.comm.fsccl.build import unavailable
        from flagscale.comm.fsccl.native import why_no_cuda

        if device == "cuda":  # its engine for GPUs is written for NVIDIA's
            try:
                missing = device_missing(device) or why_no_cuda()
            except ConfigError as error:
                missing = str(error)
            if missing:
                return missing
        return unavailable()

    def init_options(
        self, device: torch.device, values: OptionValues | None = None
    ) -> Mapping[str, Any]:
        if device.type == "cpu":  # also on a host with GPUs: its tensors need not go there
            os.environ.setdefault("FSCCL_DEVICE", "cpu")
        return {}

    @contextmanager
    def creating(self) -> Iterator[None]:
        # Importing it is what makes torch know the name.
        import flagscale.comm.fsccl  # noqa: F401
        from flagscale.comm.fsccl.build import load_extension

        # Compiled now where it must be, and not while the ranks wait for each other.
        load_extension()
        yield

    def misfit(self, values: OptionValues, ranks: int) -> str | None:
        sizes = str(values.get("clusters") or os.environ.get("FSCCL_CLUSTERS") or ranks)
        given = sum(int(size) for size in sizes.split(",") if size.isdecimal())
        if given == ranks:
            return None
        return f"clusters={sizes}: the sizes add up to {given}, and there are {ranks} rank(s)"

    def version(self) -> str | None:
        return __version__

    def origin(self) -> str | None:
        from flagscale.comm.fsccl.build import how

        return how()
