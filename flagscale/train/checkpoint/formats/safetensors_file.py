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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _TensorLocation:
    """Dtype, shape and byte range of a tensor; the range is relative to the end of the header."""

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, _TensorLocation], int]:
    """Read the header of a file.

    Returns:
        The location of each tensor, and the offset of the header's end in the file.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a safetensors file.
    """
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if file_size < 8 or header_size > min(_MAX_HEADER_BYTES, file_size - 8):
                raise CheckpointError(
                    f"{path} is truncated, or not a safetensors file: {file_size:,} bytes"
                )
            header = json.loads(file.read(header_size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is damaged: {format_value(header)}")
    header.pop("__metadata__", None)
    data_begin = 8 + header_size
    locations = {
        name: _parse_location(path, name, entry, file_size - data_begin)
        for name, entry in header.items()
    }
    _check_coverage(path, locations, file_size - data_begin)
    return locations, data_begin


def _check_coverage(path: Path, locations: Mapping[str, _TensorLocation], data_size: int) -> None:
    """Check that every byte of the data belongs to exactly one tensor, as safetensors demands."""
    previous_end = 0
    previous_name = "the header"
    for name, location in sorted(locations.items(), key=lambda item: (item[1].begin, item[1].end)):
        if location.begin < previous_end:
            raise CheckpointError(f"{path}: {previous_name} and {name} overlap")
        if location.begin > previous_end:
            count = location.begin - previous_end
            raise CheckpointError(
                f"{path}: {count:,} bytes between {previous_name} and {name} belong to no tensor"
            )
        previous_end = location.end
        previous_name = name
    if previous_end < data_size:
        raise CheckpointError(
            f"{path}: {data_size - previous_end:,} bytes behind the last tensor belong to no "
            "tensor: the file is damaged"
        )


def _parse_location(path: Path, name: str, entry: Any, data_size: int) -> _TensorLocation:
    """Validate a tensor's entry of the header."""
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
            f"{path} is truncated: {name} ends at byte {end:,} of the data, of which there are "
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
        locations, data_begin = read_header(path)
        size = path.stat().st_size
        # A private mapping, because torch wants writable memory; nothing writes to it.
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.tensors: Mapping[str, LazyTensor] = {
            name: self._map_tensor(location, data_begin) for name, location in locations.items()
        }

    def _map_tensor(self, location: _TensorLocation, data_begin: int) -> MappedTensor:
        def load() -> torch.Tensor:
            data = self._bytes[data_begin + location.begin : data_begin + location.end]
            return view_as_dtype(data, location.dtype).reshape(location.shape)

        return MappedTensor(location.shape, location.dtype, load)


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], report: Any) -> list[FileSpan]:
    """Write a file, a chunk of a tensor at a time.

    Args:
        path: the file.
        tensors: tensors by name.
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
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header_bytes = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        return [write_bytes(file, tensor, report) for tensor in tensors.values()]


def split_into_files(
    tensors: Mapping[str, LazyTensor], max_bytes: int
) -> Sequence[dict[str, LazyTensor]]:
    """Distribute tensors, in order, over files of at most ``max_bytes``.

    A larger tensor gets a file of its own.
    """
    files: list[dict[str, LazyTensor]] = [{}]
    bytes_left = max_bytes
    for name, tensor in tensors.items():
        size = count_bytes(tensor)
        if files[-1] and size > bytes_left:
            files.append({})
            bytes_left = max_bytes
        files[-1][name] = tensor
        bytes_left -= size
    return files
