"""Lazy tensors of a PyTorch distributed checkpoint, located by its ``.metadata``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from flagscale.checkpoint_metadata import METADATA_FILE, read_metadata
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.lazy_tensors import Region, Shape
from flagscale.train.checkpoint.formats.saved_tensor import view_saved_tensor

_MAX_CACHED_CHUNKS = 2


@dataclass(frozen=True)
class _ChunkSource:
    """A stored chunk of a tensor: its region, and a function that reads it."""

    offsets: Shape
    sizes: Shape
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor that is stored in chunks, each of them a rectangular region."""

    path: Path
    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[_ChunkSource, ...]

    def read(self, region: Region) -> torch.Tensor:
        """Read a region.

        Raises:
            CheckpointError: the chunks do not cover the region.
        """
        sizes = [end - begin for begin, end in region]
        result: torch.Tensor | None = None
        missing_elements = torch.Size(sizes).numel()
        for chunk in self.chunks:
            overlap = [
                (max(begin, offset), min(end, offset + size))
                for (begin, end), offset, size in zip(
                    region, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if any(low >= high for low, high in overlap):
                continue
            chunk_slices = tuple(
                slice(low - offset, high - offset)
                for (low, high), offset in zip(overlap, chunk.offsets, strict=True)
            )
            values = chunk.load()[chunk_slices]
            missing_elements -= values.numel()
            if list(values.shape) == sizes:
                return values
            if result is None:
                result = torch.empty(sizes, dtype=self.dtype)
            region_slices = tuple(
                slice(low - begin, high - begin)
                for (low, high), (begin, _) in zip(overlap, region, strict=True)
            )
            result[region_slices] = values
        if result is None or missing_elements:
            if 0 in sizes:
                return torch.empty(sizes, dtype=self.dtype)
            raise CheckpointError(f"{self.path}: {self.name}: a part of it is missing")
        return result


def open_tensors(path: Path, *, trusted: bool = False) -> dict[str, ChunkedTensor]:
    """Return every tensor of the checkpoint in a directory, by name.

    Args:
        path: directory of the checkpoint.
        trusted: skip the checksums, which are otherwise compared when a chunk is first read.

    Raises:
        CheckpointError: as :func:`read_metadata`; or a file is missing, truncated, or outside the
            directory.
    """
    checkpoint_metadata = read_metadata(path)
    storage_data: Mapping[Any, Any] = checkpoint_metadata.storage_data
    locations = {
        (index.fqn, tuple(index.offset or ())): item for index, item in storage_data.items()
    }
    files: dict[str, torch.Tensor] = {}
    tensors = {}
    chunk_cache = _ChunkCache(path, trusted=trusted)
    for name, entry in checkpoint_metadata.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            continue
        chunks = []
        for chunk in entry.chunks:
            location = locations.get((name, tuple(chunk.offsets)))
            if location is None:
                raise CheckpointError(
                    f"{path / METADATA_FILE}: {name}: one of its chunks has no location"
                )
            chunk_bytes = _map_chunk(path, name, location, files)
            load = chunk_cache.make_loader(name, chunk_bytes, chunk)
            chunks.append(_ChunkSource(tuple(chunk.offsets), tuple(chunk.sizes), load))
        dtype = entry.properties.dtype
        tensors[name] = ChunkedTensor(path, name, tuple(entry.size), dtype, tuple(chunks))
    return tensors


def _map_chunk(
    path: Path, name: str, location: Any, mapped_files: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the bytes of a chunk as a view of a memory-mapped file.

    ``files`` maps the names of files that are mapped already to their bytes.
    """
    file_name = str(location.relative_path)
    if not re.fullmatch(r"\w[\w.-]*", file_name):
        raise CheckpointError(
            f"{path / METADATA_FILE}: {name}: {file_name!r} is not a file next to it"
        )
    if file_name not in mapped_files:
        try:
            size = (path / file_name).stat().st_size
            mapped_files[file_name] = torch.from_file(
                str(path / file_name), shared=False, size=size, dtype=torch.uint8
            )
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path / file_name} cannot be read: {error}") from error
    end = location.offset + location.length
    if location.offset < 0 or location.length < 0 or end > len(mapped_files[file_name]):
        raise CheckpointError(f"{path / file_name} is truncated: {name} ends at byte {end:,}")
    return mapped_files[file_name][location.offset : end]


class _ChunkCache:
    """Cache of the chunks that were read last.

    Regions of a chunk are usually read one after the other, and viewing a chunk that is not aligned
    in its file copies it.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self._path, self._trust_all = path, trusted
        self._verified = set[tuple[str, Shape]]()
        self._cache: dict[tuple[str, Shape], torch.Tensor] = {}

    def make_loader(
        self, name: str, chunk_bytes: torch.Tensor, chunk: metadata.ChunkStorageMetadata
    ) -> Callable[[], torch.Tensor]:
        """Return a function that reads a chunk through the cache."""
        key, sizes = (name, tuple(chunk.offsets)), tuple(chunk.sizes)

        def load() -> torch.Tensor:
            if key not in self._cache:
                while len(self._cache) >= _MAX_CACHED_CHUNKS:
                    del self._cache[next(iter(self._cache))]
                trusted = self._trust_all or key in self._verified
                self._cache[key] = self._view(name, chunk_bytes, sizes, trusted=trusted)
                self._verified.add(key)
            return self._cache[key]

        return load

    def _view(
        self, name: str, chunk_bytes: torch.Tensor, sizes: Shape, *, trusted: bool
    ) -> torch.Tensor:
        try:
            tensor = view_saved_tensor(chunk_bytes, is_trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {name}: {error.message}") from error
        if tuple(tensor.shape) != sizes:
            raise CheckpointError(
                f"{self._path}: {name}: a chunk has shape {list(tensor.shape)}, "
                f"expected {list(sizes)}"
            )
        return tensor
