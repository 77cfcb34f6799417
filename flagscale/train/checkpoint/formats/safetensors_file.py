"""Reader and writer of safetensors files: memory-mapped reading, streaming writing.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON: name to
dtype, shape and offsets after the header), and the tensors' bytes. The whole header is validated
before any of it is used. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    MappedTensor,
    Shape,
    count_bytes,
    view_as_dtype,
    write_bytes,
)
from flagscale.train.checkpoint.formats.span_checksums import FileSpan

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
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
class _TensorLocation:
    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, _TensorLocation], int]:
    """Read the header of a file.

    Returns:
        The location of each tensor relative to the end of the header, and the offset of that end.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is cut, or no safetensors file: {size:,} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is damaged: {format_value(header)}")
    header.pop("__metadata__", None)
    start = 8 + length
    places = {
        name: _parse_location(path, name, entry, size - start) for name, entry in header.items()
    }
    previous_end = 0
    previous = ""
    for name, place in sorted(places.items(), key=lambda item: item[1].begin):
        if place.begin < previous_end:
            raise CheckpointError(f"{path}: {previous} and {name} overlap")
        previous_end = place.end
        previous = name
    return places, start


def _parse_location(path: Path, name: str, entry: Any, data_size: int) -> _TensorLocation:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        is_valid = is_valid and end - begin == prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{path}: {name}: the header is damaged: {format_value(entry)}")
    if end > data_size:
        raise CheckpointError(
            f"{path} is cut: {name} ends at byte {end:,} of the data, of which there are "
            f"{data_size:,}"
        )
    return _TensorLocation(dtype, shape, begin, end)


class SafetensorsFile:
    """Memory-mapped tensors of one file."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            CheckpointError: see :func:`read_header`.
        """
        self.path = path
        places, start = read_header(path)
        size = path.stat().st_size
        # A private mapping, because torch wants writable memory; nothing writes to it.
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.tensors: Mapping[str, LazyTensor] = {
            name: self._map_tensor(place, start) for name, place in places.items()
        }

    def _map_tensor(self, place: _TensorLocation, start: int) -> MappedTensor:
        def load() -> torch.Tensor:
            data = self._bytes[start + place.begin : start + place.end]
            return view_as_dtype(data, place.dtype).reshape(place.shape)

        return MappedTensor(place.shape, place.dtype, load)


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], report: Any) -> list[FileSpan]:
    """Write a file, a chunk of a tensor at a time.

    Args:
        report: called with the number of bytes after each chunk.

    Returns:
        The span of each tensor.

    Raises:
        OSError: the file cannot be written.
    """
    header = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + count_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        return [write_bytes(file, tensor, report) for tensor in tensors.values()]


def split_into_shards(
    tensors: Mapping[str, LazyTensor], max_bytes: int
) -> Sequence[dict[str, LazyTensor]]:
    """Distribute tensors, in order, over files of at most ``max_bytes``.

    A larger tensor gets a file of its own.
    """
    files: list[dict[str, LazyTensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        size = count_bytes(tensor)
        if files[-1] and size > room:
            files.append({})
            room = max_bytes
        files[-1][name] = tensor
        room -= size
    return files
