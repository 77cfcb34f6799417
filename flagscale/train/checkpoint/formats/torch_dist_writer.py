"""Single-process writer of PyTorch distributed checkpoints: ``.distcp`` files and ``.metadata``.

A tensor is written in chunks, each a ``torch.save`` archive within a ``.distcp`` file.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePosixPath
from typing import Any

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

from flagscale.checkpoint_metadata import METADATA_FILE
from flagscale.train.checkpoint.formats.base import ByteProgress
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    Region,
    full_region,
    split_region,
)
from flagscale.train.checkpoint.formats.resumable_directory import ResumableDirectory
from flagscale.train.checkpoint.formats.span_checksums import FileSpan
from flagscale.train.checkpoint.formats.torch_archive import write_tensor
from flagscale.train.checkpoint.stored_archive import pad_to_alignment

_MAX_CHUNK_BYTES = 64 << 20
_MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class _TensorChunk:
    """A region of a tensor that is written as one archive."""

    name: str
    tensor: LazyTensor
    region: Region

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(begin for begin, _ in self.region)

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(end - begin for begin, end in self.region)

    @property
    def byte_count(self) -> int:
        return self.sizes.numel() * self.tensor.dtype.itemsize


def _plan_files(tensors: Mapping[str, LazyTensor]) -> list[list[_TensorChunk]]:
    """Distribute the chunks of all tensors over files."""
    files: list[list[_TensorChunk]] = []
    bytes_left = 0
    for name, tensor in tensors.items():
        for region in _iter_chunks(tensor):
            if bytes_left <= 0:
                files.append([])
                bytes_left = _MAX_FILE_BYTES
            files[-1].append(_TensorChunk(name, tensor, region))
            bytes_left -= files[-1][-1].byte_count
    return files


class DistributedCheckpointWriter:
    """Writes tensors into ``.distcp`` files, one after the other, and then their ``.metadata``."""

    def __init__(
        self, output: ResumableDirectory, report: ByteProgress, subdirectory: str = "."
    ) -> None:
        """Create a writer.

        Args:
            output: the directory being written.
            report: called with the number of bytes after each chunk.
            subdirectory: subdirectory that holds the checkpoint.
        """
        self._output = output
        self._subdirectory = PurePosixPath(subdirectory)
        self._report = report
        self._state_dict_metadata: dict[str, Any] = {}
        self._storage_data: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, tensors: Mapping[str, LazyTensor], extra_state_names: Sequence[str]) -> None:
        """Write tensors and empty objects.

        Args:
            tensors: tensors by name.
            extra_state_names: names of empty ``_extra_state`` objects, which megatron.core expects.
        """
        for number, chunks in enumerate(_plan_files(tensors)):
            self._write_or_reuse(
                f"__{number}_0.distcp", chunks, extra_state_names if number == 0 else []
            )
        with (self._output.directory / self._subdirectory / METADATA_FILE).open("wb") as file:
            pickle.dump(Metadata(self._state_dict_metadata, storage_data=self._storage_data), file)
            file.flush()
            os.fsync(file.fileno())

    def _write_or_reuse(
        self, name: str, chunks: Sequence[_TensorChunk], extra_state_names: Sequence[str]
    ) -> None:
        """Write a file of chunks, or reuse it. The first file also has the empty object."""
        path = str(self._subdirectory / name)
        locations = self._output.reuse_file(path)
        if locations is None or len(locations) != len(chunks) + bool(extra_state_names):
            locations, spans = self._write_file(
                path, chunks, with_empty_object=bool(extra_state_names)
            )
            self._output.record_file(path, locations, spans)
        else:
            self._report(sum(chunk.byte_count for chunk in chunks))
        infos = [_StorageInfo(name, begin, length) for begin, length in locations]
        for object_name in extra_state_names:
            self._state_dict_metadata[object_name] = BytesStorageMetadata()
            self._storage_data[MetadataIndex(object_name)] = infos[-1]
        for chunk, info in zip(chunks, infos, strict=False):
            self._add_chunk_metadata(chunk)
            self._storage_data[MetadataIndex(chunk.name, chunk.offsets)] = info

    def _add_chunk_metadata(self, chunk: _TensorChunk) -> None:
        """Add a chunk to the metadata of its tensor."""
        tensor = chunk.tensor
        if chunk.name not in self._state_dict_metadata:
            properties, size = TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
            self._state_dict_metadata[chunk.name] = TensorStorageMetadata(properties, size, [])
        chunk_metadata = ChunkStorageMetadata(chunk.offsets, chunk.sizes)
        self._state_dict_metadata[chunk.name].chunks.append(chunk_metadata)

    def _write_file(
        self, name: str, chunks: Sequence[_TensorChunk], *, with_empty_object: bool
    ) -> tuple[list[list[int]], list[FileSpan]]:
        """Write a file.

        Args:
            name: path relative to the directory being written.
            chunks: chunks to write.
            with_empty_object: append the empty object that all ``_extra_state`` names refer to.

        Returns:
            Offset and length of each chunk, and last those of the empty object; and the spans of
            the tensors.
        """
        locations, spans = [], []
        with (self._output.directory / name).open("wb") as file:
            for chunk in chunks:
                begin = pad_to_alignment(file)
                length, span = write_tensor(file, chunk.tensor, chunk.region, self._report)
                locations.append([begin, length])
                spans.append(span)
            if with_empty_object:
                begin = pad_to_alignment(file)
                locations.append([begin, file.write(_serialize_empty_object())])
        return locations, spans


def _iter_chunks(tensor: LazyTensor) -> Iterator[Region]:
    """Yield the regions to write separately: chunks of each matrix of a stacked tensor."""
    stack_shape, matrix_shape = tensor.shape[:-2], tensor.shape[-2:]
    for position in product(*map(range, stack_shape)):
        for region in split_region(
            full_region(matrix_shape), tensor.dtype.itemsize, _MAX_CHUNK_BYTES
        ):
            yield (*((index, index + 1) for index in position), *region)


def _serialize_empty_object() -> bytes:
    """Return a ``torch.save`` archive of an empty object."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()
