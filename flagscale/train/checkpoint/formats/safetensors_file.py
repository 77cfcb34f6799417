"""The safetensors file format: read by mapping, written a tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape
and offsets behind the header), and the tensors' bytes. Everything in a header is checked before any
of it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.values import shown
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.spans import Span
from flagscale.train.checkpoint.formats.tensors import (
    Mapped,
    Shape,
    Stored,
    size_of,
    typed,
    write,
)

_MOST_HEADER = 100 << 20  # as the library that defines the format
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, _Place], int]:
    """Where each tensor of a file lies behind its header, and where the header ends.

    Raises:
        CheckpointError: the file is cut, damaged, or no such file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MOST_HEADER, size - 8):
                raise CheckpointError(f"{path} is cut, or no safetensors file: {size:,} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is damaged: {shown(header)}")
    header.pop("__metadata__", None)
    start = 8 + length
    places = {name: _place(path, name, entry, size - start) for name, entry in header.items()}
    last, previous = 0, ""
    for name, place in sorted(places.items(), key=lambda item: item[1].begin):
        if place.begin < last:
            raise CheckpointError(f"{path}: {previous} and {name} overlap")
        last, previous = place.end, name
    return places, start


def _place(path: Path, name: str, entry: Any, room: int) -> _Place:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        sound = sound and end - begin == prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: {name}: the header is damaged: {shown(entry)}")
    if end > room:
        raise CheckpointError(
            f"{path} is cut: {name} ends at byte {end:,} of the data, of which there are {room:,}"
        )
    return _Place(dtype, shape, begin, end)


class SafetensorsFile:
    """The tensors of one file, mapped."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: as :func:`read_header`.
        """
        self.path = path
        places, start = read_header(path)
        size = path.stat().st_size
        # Private: nobody writes to it, and torch wants memory that may be written.
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.tensors: Mapping[str, Stored] = {
            name: self._mapped(place, start) for name, place in places.items()
        }

    def _mapped(self, place: _Place, start: int) -> Mapped:
        def get() -> torch.Tensor:
            data = self._bytes[start + place.begin : start + place.end]
            return typed(data, place.dtype).reshape(place.shape)

        return Mapped(place.shape, place.dtype, get)


def write_file(path: Path, tensors: Mapping[str, Stored], report: Any) -> list[Span]:
    """Write a file, a piece of a tensor at a time; ``report`` is called with the bytes written.
    Returns where each tensor lies.

    Raises:
        OSError: of the file.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + size_of(tensor)
        places = {"shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = {"dtype": _NAMES[tensor.dtype], **places}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        return [write(file, tensor, report) for tensor in tensors.values()]


def shards(tensors: Mapping[str, Stored], most: int) -> Sequence[dict[str, Stored]]:
    """Tensors in their order, shared out over files of at most ``most`` bytes unless a single
    tensor is larger."""
    found: list[dict[str, Stored]] = [{}]
    room = most
    for name, tensor in tensors.items():
        size = size_of(tensor)
        if found[-1] and size > room:
            found.append({})
            room = most
        found[-1][name] = tensor
        room -= size
    return found
