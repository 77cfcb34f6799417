"""Memory of tensors as bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, writable unless it is empty.

    The result keeps the tensor alive. Its storage stays resizable, which weights in shards need and
    ``Tensor.numpy`` would end.

    Raises:
        ValueError: the tensor is not contiguous or not on the host.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous or not on the host")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")
