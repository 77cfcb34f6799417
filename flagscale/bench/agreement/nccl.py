"""NCCL without torch around it: the few calls that nccl-tests makes, by ctypes.

The library is the one that torch has loaded, so that both sides run the same code.
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
    **{"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5},
    **{"fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9},
}
"""``ncclDataType_t`` by our names of the types."""
SUM = 0
"""Of ``ncclRedOp_t``."""
UNIQUE_ID_BYTES = 128

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # Buffers, count, type, then what the operation needs, communicator and stream.
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
    """``ncclUniqueId``: what the ranks of a communicator share."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Nccl:
    """The library, with every call checked.

    Raises:
        ConfigError: no library is found.
    """

    def __init__(self) -> None:
        self._library = _load()
        self._library.ncclGetErrorString.restype = c_char_p
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        initialise = self._library.ncclCommInitRank
        initialise.argtypes = (ctypes.POINTER(c_void_p), c_int, UniqueId, c_int)

    def function(self, name: str) -> Callable[..., None]:
        """One of its functions, which raises :class:`JobError` where NCCL reports an error."""
        call: Callable[..., int] = getattr(self._library, name)

        def checked(*arguments: Any) -> None:
            if code := call(*arguments):
                text = self._library.ncclGetErrorString(code)
                raise JobError(f"{name}: {text.decode()}")

        return checked

    def version(self) -> str:
        found = c_int()
        self.function("ncclGetVersion")(ctypes.byref(found))
        major, rest = divmod(found.value, 10_000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def unique_id(self) -> bytes:
        """An identity for a new communicator; rank 0 tells it the others."""
        made = UniqueId()
        self.function("ncclGetUniqueId")(ctypes.byref(made))
        return bytes(made)

    def connect(self, identity: bytes, ranks: int, rank: int) -> c_void_p:
        """The communicator of ``identity``; returns when all ranks are here."""
        handle = c_void_p()
        shared = UniqueId.from_buffer_copy(identity)
        self.function("ncclCommInitRank")(ctypes.byref(handle), ranks, shared, rank)
        return handle


def _load() -> ctypes.CDLL:
    for name in LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ConfigError(
        f"none of {', '.join(LIBRARIES)} can be loaded",
        hint="a CUDA build of torch brings NCCL along; import torch first",
    )
