"""NCCL without torch: ctypes bindings of the calls that nccl-tests uses.

The library is the one that torch has loaded, so that baseline and benchmark run the same code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from flagscale.errors import ConfigError, JobError

LIBRARIES = ("libnccl.so.2", "libnccl.so")
DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "fp16": 6,
    "fp32": 7,
    "fp64": 8,
    "bf16": 9,
}
"""``ncclDataType_t`` by this project's names of the types."""
SUM = 0
"""Value of ``ncclRedOp_t``."""
UNIQUE_ID_BYTES = 128

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # Buffers, count, data type, further arguments of the operation, communicator and stream.
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommDestroy": (c_void_p,),
}


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, which the ranks of a communicator share."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class NcclLibrary:
    """The library, with every call checked.

    Raises:
        ConfigError: no library is found.
    """

    def __init__(self) -> None:
        self._library = _load_library()
        self._library.ncclGetErrorString.restype = c_char_p
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        initialise = self._library.ncclCommInitRank
        initialise.argtypes = (ctypes.POINTER(c_void_p), c_int, UniqueId, c_int)

    def checked_function(self, name: str) -> Callable[..., None]:
        """Return one of its functions, which raises :class:`JobError` on an NCCL error."""
        call: Callable[..., int] = getattr(self._library, name)

        def checked(*arguments: Any) -> None:
            if code := call(*arguments):
                text = self._library.ncclGetErrorString(code)
                raise JobError(f"{name}: {text.decode()}")

        return checked

    def version(self) -> str:
        version = c_int()
        self.checked_function("ncclGetVersion")(ctypes.byref(version))
        major, remainder = divmod(version.value, 10_000)
        return f"{major}.{remainder // 100}.{remainder % 100}"

    def create_unique_id(self) -> bytes:
        """Return the id of a new communicator, which rank 0 sends to the other ranks."""
        unique_id = UniqueId()
        self.checked_function("ncclGetUniqueId")(ctypes.byref(unique_id))
        return bytes(unique_id)

    def init_communicator(self, unique_id: bytes, ranks: int, rank: int) -> c_void_p:
        """Return the communicator of ``unique_id`` once all ranks have called this."""
        handle = c_void_p()
        unique_id_struct = UniqueId.from_buffer_copy(unique_id)
        self.checked_function("ncclCommInitRank")(
            ctypes.byref(handle), ranks, unique_id_struct, rank
        )
        return handle


def _load_library() -> ctypes.CDLL:
    for name in LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ConfigError(
        f"none of {', '.join(LIBRARIES)} can be loaded",
        hint="a CUDA build of torch brings NCCL along; import torch first",
    )
