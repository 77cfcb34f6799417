"""The engine for GPUs that reach each other's memory: installing it, and calling it by itself.

docs/fsccl.md tells what it does and how fast; csrc/nvlink has its protocol.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink_compile import kernels
from flagscale.comm.fsccl.tune import stored_tables
from flagscale.errors import ConfigError

VARIABLE = "FSCCL_NVLINK"
SLOT_VARIABLE = "FSCCL_NVLINK_SLOT_BYTES"
BLOCKS_VARIABLE = "FSCCL_NVLINK_BLOCKS"
_CAPABILITY = (8, 0)  # bfloat16 in registers
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")

DTYPES: dict[torch.dtype, str] = {
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.uint16: "uint16",
    torch.int16: "int16",
    torch.uint32: "uint32",
    torch.int32: "int32",
    torch.uint64: "uint64",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bool: "bool",
}


def wanted() -> bool:
    """Whether this rank's GPU takes part: ``FSCCL_NVLINK=0`` says no, and ``1`` insists.

    Raises:
        ConfigError: ``FSCCL_NVLINK`` is neither, or insists on a GPU that cannot.
    """
    value = os.environ.get(VARIABLE) or ""
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}={value}: expected 0 or 1")
    if value == "0":
        return False
    capability = torch.cuda.get_device_capability()
    if value == "1" and capability < _CAPABILITY:
        raise ConfigError(
            f"{VARIABLE}=1: the engine needs a GPU of compute capability "
            f"{'.'.join(map(str, _CAPABILITY))}, this one has {'.'.join(map(str, capability))}"
        )
    return capability >= _CAPABILITY


@functools.cache
def prepare() -> None:
    """Have the engine installed for the GPU of a group's first tensor, which is known only then.
    What can be wrong shows now, and its kernels are compiled now, and not while others wait for
    this rank. Once: every group asks for it.

    Raises:
        ConfigError: a variable has an unfit value, or the stored tables are not fit.
        BuildError: the kernels cannot be compiled.
    """
    engine = load_extension().nvlink
    slot_bytes()
    most_blocks()
    for ranks, table in stored_tables(torch.cuda.get_device_name()).items():
        try:
            engine.check_table(table)
        except ValueError as error:
            raise ConfigError(f"the stored table for {ranks} ranks: {error}") from error
    kernels(torch.cuda.get_device_capability())
    engine.on_demand(install)


def install(device: int) -> None:
    """Compile the kernels for this GPU and install its engine in this process. Idempotent.

    Raises:
        BuildError: the kernels cannot be compiled.
        RuntimeError: CUDA's driver refuses something.
    """
    engine = load_extension().nvlink
    if engine.installed(device):
        return
    paths = kernels(torch.cuda.get_device_capability(device))
    cubins = {unit: path.read_bytes() for unit, path in paths.items()}
    tables = stored_tables(torch.cuda.get_device_name(device))
    engine.install(device, cubins, tables, slot_bytes(), most_blocks())


def slot_bytes() -> int:
    """What ``FSCCL_NVLINK_SLOT_BYTES`` says; 0: nothing.

    Raises:
        ConfigError: it is not the size of a slot.
    """
    text = os.environ.get(SLOT_VARIABLE, "") or "0"
    if not text.isdigit() or int(text) % 512 != 0 or 0 < int(text) < 2048:
        raise ConfigError(
            f"{SLOT_VARIABLE}={text}: expected a multiple of 512 bytes, at least 2048"
        )
    return int(text)


def most_blocks() -> int:
    """What ``FSCCL_NVLINK_BLOCKS`` says; 0: nothing.

    Raises:
        ConfigError: it is not a number of blocks.
    """
    text = os.environ.get(BLOCKS_VARIABLE, "")
    most = load_extension().nvlink.max_blocks
    if text and not (text.isdigit() and 0 < int(text) <= most):
        raise ConfigError(f"{BLOCKS_VARIABLE}={text}: expected a number from 1 to {most}")
    return int(text or 0)


@dataclass(frozen=True)
class Shape:
    """An algorithm and its grid; 0 leaves the choice to the engine."""

    algorithm: str  # flagged, lines, two_shot, staged, direct
    blocks: int = 0
    threads: int = 0


Exchange = Callable[[bytes], Sequence[bytes]]


class Member:
    """One rank's part of a group on the engine, without a torch process group.

    Args:
        device: the number of the GPU; its engine must be installed.
        rank: this rank in the group.
        size: ranks of the group, 2 to 8.
        timeout: seconds a kernel waits for a peer; 0 for ever.
    """

    def __init__(self, device: int, rank: int, size: int, timeout: float = 30.0) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._raw: Any = load_extension().nvlink.Communicator(
            device, rank, size, int(timeout * 1000)
        )

    def connect(self, exchange: Exchange) -> None:
        """Meet the others: ``exchange`` takes this rank's bytes and gives those of all ranks."""
        self.connect_to(exchange(self.card()))

    def card(self) -> bytes:
        return bytes(self._raw.card())

    def connect_to(self, cards: Sequence[bytes]) -> None:
        self._raw.connect(list(cards))

    def register(self, tensor: torch.Tensor, exchange: Exchange) -> None:
        """Let peers read and write this memory directly; see connect_memory in engine.h."""
        self.register_with(tensor, exchange(self.memory_card(tensor)))

    def memory_card(self, tensor: torch.Tensor) -> bytes:
        return bytes(self._raw.memory_card(tensor.data_ptr(), tensor.nbytes))

    def register_with(self, tensor: torch.Tensor, cards: Sequence[bytes]) -> None:
        self._raw.connect_memory(tensor.data_ptr(), tensor.nbytes, list(cards))

    def run(
        self,
        collective: str,
        given: torch.Tensor,
        out: torch.Tensor,
        *,
        op: str = "sum",
        factor: float = 1.0,
        root: int = 0,
        shape: Shape | None = None,
    ) -> bool:
        """Put a collective of contiguous tensors on the current stream.

        ``given`` and ``out`` have ``size`` equal parts where the collective has; they may be one.

        Returns:
            False if another library is faster by the table, or if ``shape`` cannot do it.

        Raises:
            RuntimeError: the group has failed, or an argument makes no sense.
        """
        whole = out if collective != "all_gather" else given
        parts = self.size if collective == "all_to_all" else 1
        return bool(
            self._raw.run(
                collective,
                given.data_ptr(),
                out.data_ptr(),
                whole.nbytes // parts,
                DTYPES[given.dtype],
                op,
                factor,
                root,
                torch.cuda.current_stream(self.device).cuda_stream,
                shape.algorithm if shape else "",
                shape.blocks if shape else 0,
                shape.threads if shape else 0,
            )
        )

    def failure(self) -> str | None:
        """Why nothing can be run any more, if so; what was computed since is worth nothing."""
        why: str | None = self._raw.failure()
        return why

    def abort(self) -> None:
        self._raw.abort()
