"""NVLink engine in Python: installation in this process, and calls without a torch process group.

docs/fsccl.md describes the engine and its speed, csrc/nvlink its protocol.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink_compile import compile_kernels
from flagscale.comm.fsccl.tune import load_tables
from flagscale.errors import ConfigError

VARIABLE = "FSCCL_NVLINK"
SLOT_VARIABLE = "FSCCL_NVLINK_SLOT_BYTES"
BLOCKS_VARIABLE = "FSCCL_NVLINK_BLOCKS"
_CAPABILITY = (8, 0)  # bfloat16 in registers

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


def is_enabled() -> bool:
    """Return whether the NVLink engine is used on this rank's GPU.

    ``FSCCL_NVLINK=0`` disables it; ``1`` makes an unsupported GPU an error.

    Raises:
        ConfigError: ``FSCCL_NVLINK`` is neither, or is 1 and the GPU is not supported.
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
def prepare_engine() -> None:
    """Compile the kernels, check the settings, and register :func:`install_engine`.

    The GPU of a group is known only with its first tensor, so the engine is installed then.
    Compiling now keeps other ranks from waiting for this one, and reports errors early. Every group
    calls it; later calls do nothing.

    Raises:
        ConfigError: a variable has an invalid value, or the stored tables are invalid.
        BuildError: the kernels cannot be compiled.
    """
    engine = load_extension().nvlink
    read_slot_bytes()
    read_max_blocks()
    for ranks, table in load_tables(torch.cuda.get_device_name()).items():
        try:
            engine.check_table(table)
        except ValueError as error:
            raise ConfigError(f"the stored table for {ranks} ranks: {error}") from error
    compile_kernels(torch.cuda.get_device_capability())
    engine.set_installer(install_engine)


def install_engine(device: int) -> None:
    """Compile the kernels for this GPU and install its engine in this process. Idempotent.

    Raises:
        BuildError: the kernels cannot be compiled.
        RuntimeError: CUDA's driver returns an error.
    """
    engine = load_extension().nvlink
    if engine.installed(device):
        return
    paths = compile_kernels(torch.cuda.get_device_capability(device))
    cubins = {unit: path.read_bytes() for unit, path in paths.items()}
    tables = load_tables(torch.cuda.get_device_name(device))
    engine.install(device, cubins, tables, read_slot_bytes(), read_max_blocks())


def read_slot_bytes() -> int:
    """Return ``FSCCL_NVLINK_SLOT_BYTES``, the bytes of a staging slot; 0 if it is unset.

    Raises:
        ConfigError: it is not a multiple of 512 of at least 2048.
    """
    text = os.environ.get(SLOT_VARIABLE, "") or "0"
    if not text.isdigit() or int(text) % 512 != 0 or 0 < int(text) < 2048:
        raise ConfigError(
            f"{SLOT_VARIABLE}={text}: expected a multiple of 512 bytes, at least 2048"
        )
    return int(text)


def read_max_blocks() -> int:
    """Return ``FSCCL_NVLINK_BLOCKS``, the largest grid of a kernel; 0 if it is unset.

    Raises:
        ConfigError: it is not a number from 1 to 64.
    """
    text = os.environ.get(BLOCKS_VARIABLE, "")
    limit = load_extension().nvlink.max_blocks
    if text and not (text.isdigit() and 0 < int(text) <= limit):
        raise ConfigError(f"{BLOCKS_VARIABLE}={text}: expected a number from 1 to {limit}")
    return int(text or 0)


@dataclass(frozen=True)
class KernelShape:
    """Algorithm of a kernel and its grid; 0 leaves the choice to the engine."""

    algorithm: str  # flagged, lines, two_shot, staged, direct
    blocks: int = 0
    threads: int = 0


Exchange = Callable[[bytes], Sequence[bytes]]


class NvlinkCommunicator:
    """Rank of a group on the engine, without a torch process group.

    Args:
        device: the number of the GPU; its engine must be installed.
        rank: this rank in the group.
        size: ranks of the group, 2 to 8.
        timeout: seconds that a kernel waits for a peer; 0 for ever.
    """

    def __init__(self, device: int, rank: int, size: int, timeout: float = 30.0) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._communicator: Any = load_extension().nvlink.Communicator(
            device, rank, size, int(timeout * 1000)
        )

    def connect(self, exchange: Exchange) -> None:
        """Connect to the peers; ``exchange`` is an all-gather of one byte string per rank."""
        self.connect_peers(exchange(self.peer_info()))

    def peer_info(self) -> bytes:
        return bytes(self._communicator.peer_info())

    def connect_peers(self, infos: Sequence[bytes]) -> None:
        self._communicator.connect(list(infos))

    def register_memory(self, tensor: torch.Tensor, exchange: Exchange) -> None:
        """Let peers read and write this memory directly; see connect_memory() in
        csrc/nvlink/engine.h.
        """
        self.connect_memory(tensor, exchange(self.memory_handle(tensor)))

    def memory_handle(self, tensor: torch.Tensor) -> bytes:
        return bytes(self._communicator.memory_handle(tensor.data_ptr(), tensor.nbytes))

    def connect_memory(self, tensor: torch.Tensor, handles: Sequence[bytes]) -> None:
        self._communicator.connect_memory(tensor.data_ptr(), tensor.nbytes, list(handles))

    def run(
        self,
        collective: str,
        source: torch.Tensor,
        out: torch.Tensor,
        *,
        op: str = "sum",
        factor: float = 1.0,
        root: int = 0,
        shape: KernelShape | None = None,
    ) -> bool:
        """Put a collective of contiguous tensors on the current stream.

        The tensors have ``size`` equal parts where the collective has; they may be the same tensor.

        Returns:
            False if another library is faster by the table, or if ``shape`` cannot do it.

        Raises:
            RuntimeError: the group has failed, or an argument is invalid.
        """
        whole = out if collective != "all_gather" else source
        parts = self.size if collective == "all_to_all" else 1
        return bool(
            self._communicator.run(
                collective,
                source.data_ptr(),
                out.data_ptr(),
                whole.nbytes // parts,
                DTYPES[source.dtype],
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
        """Return the error after which nothing can be run, or None. Later results are worth
        nothing.
        """
        error: str | None = self._communicator.failure()
        return error

    def abort(self) -> None:
        self._communicator.abort()
