"""Writes tensors as a distributed checkpoint, by one process: ``.metadata`` and files of chunks."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from flagscale.checkpoint_metadata import METADATA
from flagscale.train.checkpoint.formats.archive import write_tensor
from flagscale.train.checkpoint.formats.base import Report
from flagscale.train.checkpoint.formats.parts import Parts
from flagscale.train.checkpoint.formats.spans import Span
from flagscale.train.checkpoint.formats.tensors import Region, Stored, pieces, whole

_CHUNK = 64 << 20
_FILE = 4 << 30
_ALIGNED = 64


@dataclass(frozen=True)
class _Chunk:
    """A region of a tensor that is written by itself."""

    name: str
    tensor: Stored
    region: Region

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(begin for begin, _ in self.region)

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(end - begin for begin, end in self.region)

    @property
    def bytes(self) -> int:
        return self.sizes.numel() * self.tensor.dtype.itemsize


def _planned(tensors: Mapping[str, Stored]) -> list[list[_Chunk]]:
    """Their chunks, file by file."""
    files: list[list[_Chunk]] = []
    room = 0
    for name, tensor in tensors.items():
        for region in _chunks(tensor):
            if room <= 0:
                files.append([])
                room = _FILE
            files[-1].append(_Chunk(name, tensor, region))
            room -= files[-1][-1].bytes
    return files


class Writer:
    """Writes tensors into files, one after the other, and what describes them."""

    def __init__(self, parts: Parts, report: Report, place: str = ".") -> None:
        """``place``: the directory of the parts' in which they are to be."""
        self._parts = parts
        self._place = PurePosixPath(place)
        self._report = report
        self._described: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, tensors: Mapping[str, Stored], empty: Sequence[str]) -> None:
        """Write tensors, and what else is there and is nothing, by name."""
        for number, chunks in enumerate(_planned(tensors)):
            self._file(f"__{number}_0.distcp", chunks, empty if number == 0 else [])
        with (self._parts.directory / self._place / METADATA).open("wb") as file:
            pickle.dump(Metadata(self._described, storage_data=self._places), file)
            file.flush()
            os.fsync(file.fileno())

    def _file(self, name: str, chunks: Sequence[_Chunk], empty: Sequence[str]) -> None:
        """A file of chunks; the first has what all that is ``empty`` share, too."""
        part = str(self._place / name)
        places = self._parts.kept(part)
        if places is None or len(places) != len(chunks) + bool(empty):
            places, spans = self._saved(part, chunks, shared=bool(empty))
            self._parts.finish(part, places, spans)
        else:
            self._report(sum(chunk.bytes for chunk in chunks))
        infos = [_StorageInfo(name, begin, length) for begin, length in places]
        for place in empty:
            self._described[place] = BytesStorageMetadata()
            self._places[MetadataIndex(place)] = infos[-1]
        for chunk, info in zip(chunks, infos, strict=False):
            self._describe(chunk)
            self._places[MetadataIndex(chunk.name, chunk.offsets)] = info

    def _describe(self, chunk: _Chunk) -> None:
        tensor = chunk.tensor
        if chunk.name not in self._described:
            properties, size = TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
            self._described[chunk.name] = TensorStorageMetadata(properties, size, [])
        place = ChunkStorageMetadata(chunk.offsets, chunk.sizes)
        self._described[chunk.name].chunks.append(place)

    def _saved(
        self, name: str, chunks: Sequence[_Chunk], *, shared: bool
    ) -> tuple[list[list[int]], list[Span]]:
        """Write a file: where each chunk begins in it and how long it is, and last what is
        ``shared``; and the spans of tensors."""
        places, spans = [], []
        with (self._parts.directory / name).open("wb") as file:
            for chunk in chunks:
                begin = _aligned(file)
                length, span = write_tensor(file, chunk.tensor, chunk.region, self._report)
                places.append([begin, length])
                spans.append(span)
            if shared:
                begin = _aligned(file)
                places.append([begin, file.write(_nothing())])
        return places, spans


def _aligned(file: BinaryIO) -> int:
    """Go on where a tensor may begin; where that is."""
    file.write(b"\0" * (-file.tell() % _ALIGNED))
    return file.tell()


def _chunks(tensor: Stored) -> Iterator[Region]:
    """Regions that are written one by one: of layers and of experts, each by itself."""
    ahead, matrix = tensor.shape[:-2], tensor.shape[-2:]
    for place in product(*map(range, ahead)):
        for region in pieces(whole(matrix), tensor.dtype.itemsize, _CHUNK):
            yield (*((index, index + 1) for index in place), *region)


def _nothing() -> bytes:
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()
