"""NVLink engine: installation in this process, and calls without a torch process group.

The NVLink engine runs collectives of GPUs of one host as CUDA kernels that access the memory of
peers (csrc/nvlink/engine.h). native.py prepares it for process groups; nvlink_check.py calls it
directly to check and to measure it. docs/design/fsccl.md describes its design.
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

ENABLE_VARIABLE = "FSCCL_NVLINK"
SLOT_BYTES_VARIABLE = "FSCCL_NVLINK_SLOT_BYTES"
MAX_BLOCKS_VARIABLE = "FSCCL_NVLINK_BLOCKS"
_MIN_COMPUTE_CAPABILITY = (8, 0)  # kernels convert bfloat16 in registers

DTYPE_NAMES: dict[torch.dtype, str] = {
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
    setting = os.environ.get(ENABLE_VARIABLE) or ""
    if setting not in ("", "0", "1"):
        raise ConfigError(f"{ENABLE_VARIABLE}={setting}: expected 0 or 1")
    if setting == "0":
        return False
    capability = torch.cuda.get_device_capability()
    if setting == "1" and capability < _MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"{ENABLE_VARIABLE}=1: the engine needs a GPU of compute capability "
            f"{'.'.join(map(str, _MIN_COMPUTE_CAPABILITY))}, "
            f"this one has {'.'.join(map(str, capability))}"
        )
    return capability >= _MIN_COMPUTE_CAPABILITY


@functools.cache
def prepare_engine() -> None:
    """Compile the kernels, check the settings, and register :func:`install_engine`.

    The engine itself is installed when the group's first tensor shows on which GPU it works.
    Compiling already now avoids that other ranks wait for this one then, and reports errors early.
    Called for every group; later calls do nothing.

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
    text = os.environ.get(SLOT_BYTES_VARIABLE, "") or "0"
    if not text.isdigit() or int(text) % 512 != 0 or 0 < int(text) < 2048:
        raise ConfigError(
            f"{SLOT_BYTES_VARIABLE}={text}: expected a multiple of 512 bytes, at least 2048"
        )
    return int(text)


def read_max_blocks() -> int:
    """Return ``FSCCL_NVLINK_BLOCKS``, the largest grid of a kernel; 0 if it is unset.

    Raises:
        ConfigError: it is not a number from 1 to 64.
    """
    text = os.environ.get(MAX_BLOCKS_VARIABLE, "")
    max_blocks = load_extension().nvlink.max_blocks
    if text and not (text.isdigit() and 0 < int(text) <= max_blocks):
        raise ConfigError(f"{MAX_BLOCKS_VARIABLE}={text}: expected a number from 1 to {max_blocks}")
    return int(text or 0)


@dataclass(frozen=True)
class KernelShape:
    """Algorithm of a kernel and its grid."""

    algorithm: str
    """``flagged``, ``lines`` (both send small messages in one step), ``two_shot``, ``staged`` or
    ``direct``; csrc/nvlink/kernel_plan.h describes them.
    """
    blocks: int = 0  # 0: the engine chooses
    threads: int = 0  # per block; 0: the engine chooses


Exchange = Callable[[bytes], Sequence[bytes]]
"""All-gather of one byte string per rank, in the order of ranks."""


class NvlinkCommunicator:
    """One rank's member of a group that uses the engine without a torch process group.

    Args:
        device: the number of the GPU; its engine must be installed.
        rank: this rank in the group.
        size: number of ranks of the group, 2 to 8.
        timeout: seconds for which a kernel waits for a peer; 0: no timeout.
    """

    def __init__(self, device: int, rank: int, size: int, timeout: float = 30.0) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._communicator: Any = load_extension().nvlink.Communicator(
            device, rank, size, int(timeout * 1000)
        )

    def connect(self, exchange: Exchange) -> None:
        """Connect to the peers. All ranks call it."""
        self.connect_peers(exchange(self.peer_info()))

    def peer_info(self) -> bytes:
        """Return the information about this rank for :meth:`connect_peers` of all ranks."""
        return bytes(self._communicator.peer_info())

    def connect_peers(self, infos: Sequence[bytes]) -> None:
        """Connect to the peers, given the :meth:`peer_info` of all ranks in order."""
        self._communicator.connect(list(infos))

    def register_memory(self, tensor: torch.Tensor, exchange: Exchange) -> None:
        """Let peers read and write the tensor's memory directly. All ranks call it; the conditions
        are those of connect_memory() in csrc/nvlink/engine.h.
        """
        self.connect_memory(tensor, exchange(self.memory_handle(tensor)))

    def memory_handle(self, tensor: torch.Tensor) -> bytes:
        """Return the handle of the tensor's memory for :meth:`connect_memory` of all ranks."""
        return bytes(self._communicator.memory_handle(tensor.data_ptr(), tensor.nbytes))

    def connect_memory(self, tensor: torch.Tensor, handles: Sequence[bytes]) -> None:
        """Map the registered memory of the peers, given the handles of all ranks in order."""
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
        """Enqueue a collective on the current stream.

        Args:
            collective: all_reduce, reduce_scatter, all_gather, all_to_all or broadcast.
            source: contiguous input; one equal part per rank for reduce_scatter and all_to_all.
            out: contiguous output; one equal part per rank for all_gather and all_to_all. May be
                ``source``, or contain it, for an operation in place.
            op: reduction: sum, avg, product, min, max, band, bor, bxor or premul_sum.
            factor: the factor of premul_sum.
            root: the root of broadcast.
            shape: kernel to use instead of the one that the tuning table selects.

        Returns:
            False if by the tuning table another library is faster, or if ``shape`` does not support
            the operation; then nothing was enqueued.

        Raises:
            RuntimeError: the group has failed, or an argument is invalid.
        """
        sized_tensor = out if collective != "all_gather" else source
        part_count = self.size if collective == "all_to_all" else 1
        return bool(
            self._communicator.run(
                collective,
                source.data_ptr(),
                out.data_ptr(),
                sized_tensor.nbytes // part_count,
                DTYPE_NAMES[source.dtype],
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
        """Return the error after which no operation can run, or None. Results since are invalid."""
        error: str | None = self._communicator.failure()
        return error

    def abort(self) -> None:
        """Make kernels of this rank stop waiting for peers, now and later."""
        self._communicator.abort()
