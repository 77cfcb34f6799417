"""The tensors of a distributed checkpoint, as its ``.metadata`` places them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from flagscale.checkpoint_metadata import METADATA, read_metadata
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.saved_tensor import view
from flagscale.train.checkpoint.formats.tensors import Region, Shape

_RECENT = 2


@dataclass(frozen=True)
class _Chunk:
    offsets: Shape
    sizes: Shape
    get: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Chunked:
    """A tensor that lies in chunks."""

    path: Path
    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]

    def read(self, region: Region) -> torch.Tensor:
        """
        Raises:
            CheckpointError: the chunks do not cover it.
        """
        sizes = [end - begin for begin, end in region]
        found: torch.Tensor | None = None
        left = torch.Size(sizes).numel()
        for chunk in self.chunks:
            shared = [
                (max(begin, offset), min(end, offset + size))
                for (begin, end), offset, size in zip(
                    region, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if any(low >= high for low, high in shared):
                continue
            there = tuple(
                slice(low - offset, high - offset)
                for (low, high), offset in zip(shared, chunk.offsets, strict=True)
            )
            part = chunk.get()[there]
            left -= part.numel()
            if list(part.shape) == sizes:
                return part
            if found is None:
                found = torch.empty(sizes, dtype=self.dtype)
            here = tuple(
                slice(low - begin, high - begin)
                for (low, high), (begin, _) in zip(shared, region, strict=True)
            )
            found[here] = part
        if found is None or left:
            if 0 in sizes:
                return torch.empty(sizes, dtype=self.dtype)
            raise CheckpointError(f"{self.path}: {self.name}: a part of it is missing")
        return found


def tensors_of(path: Path, *, trusted: bool = False) -> dict[str, Chunked]:
    """Every tensor of the checkpoint in a directory, by name. Checksums are compared when a chunk
    is first read, unless it is ``trusted``.

    Raises:
        CheckpointError: as :func:`read_metadata`, or a file is missing, cut, or not beside it.
    """
    said = read_metadata(path)
    places = {(index.fqn, tuple(index.offset or ())): item for index, item in _items(said)}
    files: dict[str, torch.Tensor] = {}
    found, recent = {}, _Recent(path, trusted=trusted)
    for name, entry in said.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            continue
        chunks = []
        for chunk in entry.chunks:
            place = places.get((name, tuple(chunk.offsets)))
            if place is None:
                raise CheckpointError(f"{path / METADATA}: {name}: a chunk of it lies nowhere")
            raw = _bytes(path, name, place, files)
            get = recent.getter(name, raw, chunk)
            chunks.append(_Chunk(tuple(chunk.offsets), tuple(chunk.sizes), get))
        dtype = entry.properties.dtype
        found[name] = Chunked(path, name, tuple(entry.size), dtype, tuple(chunks))
    return found


def _items(said: metadata.Metadata) -> Any:
    stored: Mapping[Any, Any] = said.storage_data
    return stored.items()


def _bytes(path: Path, name: str, place: Any, files: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a chunk, mapped."""
    file = str(place.relative_path)
    if not re.fullmatch(r"\w[\w.-]*", file):
        raise CheckpointError(f"{path / METADATA}: {name}: {file!r} is no file beside it")
    if file not in files:
        try:
            size = (path / file).stat().st_size
            files[file] = torch.from_file(
                str(path / file), shared=False, size=size, dtype=torch.uint8
            )
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path / file} cannot be read: {error}") from error
    end = place.offset + place.length
    if place.offset < 0 or place.length < 0 or end > len(files[file]):
        raise CheckpointError(f"{path / file} is cut: {name} ends at byte {end:,}")
    return files[file][place.offset : end]


class _Recent:
    """The chunks that were asked for last: several parts of one are asked for in turn, and one that
    is not aligned in its file is copied to be seen."""

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self._path, self._trusts_all = path, trusted
        self._trusted = set[tuple[str, Shape]]()
        self._seen: dict[tuple[str, Shape], torch.Tensor] = {}

    def getter(
        self, name: str, raw: torch.Tensor, chunk: metadata.ChunkStorageMetadata
    ) -> Callable[[], torch.Tensor]:
        key, sizes = (name, tuple(chunk.offsets)), tuple(chunk.sizes)

        def get() -> torch.Tensor:
            if key not in self._seen:
                while len(self._seen) >= _RECENT:
                    del self._seen[next(iter(self._seen))]
                trusted = self._trusts_all or key in self._trusted
                self._seen[key] = self._view(name, raw, sizes, trusted=trusted)
                self._trusted.add(key)
            return self._seen[key]

        return get

    def _view(self, name: str, raw: torch.Tensor, sizes: Shape, *, trusted: bool) -> torch.Tensor:
        try:
            found = view(raw, trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {name}: {error.message}") from error
        if tuple(found.shape) != sizes:
            raise CheckpointError(
                f"{self._path}: {name}: a chunk has shape {list(found.shape)}, "
                f"expected {list(sizes)}"
            )
        return found
