"""Loading of a checkpoint from object storage: small files completely, tensors by ranges.

The small files of the checkpoint are copied to a temporary directory, which then stands for the
checkpoint. Tensors are read from the storage: each rank requests the byte ranges of the chunks that
overlap its shards. If the staging directory of the host has a copy from the same save, it is read
instead.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future as TorchFuture

from flagscale.checkpoints import (
    MANIFEST_FILE,
    REQUIRED_FILES,
    LatestCheckpoint,
    compare_digest,
    hash_content,
    parse_manifest,
)
from flagscale.errors import CheckpointError
from flagscale.object_storage import (
    CONCURRENT_PARTS,
    PART_BYTES,
    ObjectStore,
    StorageAddress,
    join_ranges,
)
from flagscale.train.checkpoint.checksums import verify_archive
from flagscale.train.checkpoint.uploads import find_staged_copy

AnyCheckpoint = LatestCheckpoint[Path] | LatestCheckpoint[StorageAddress]
_MAX_GAP_BYTES = 1 << 20
"""Bytes between two chunks that are read together, which takes less time than another request."""


class StoredFiles:
    """Files of a checkpoint in object storage, or their staged copies on this host."""

    def __init__(self, address: StorageAddress, staging: Path | None) -> None:
        """Open the files of a checkpoint.

        Args:
            address: the checkpoint.
            staging: the staging directory of this host, or None.

        Raises:
            CheckpointError: the storage cannot be used, or the manifest is missing or damaged.
        """
        self._address = address
        self._store = ObjectStore(address)
        try:
            manifest = self._store.read(address / MANIFEST_FILE)
        except FileNotFoundError:
            raise CheckpointError(f"{address / MANIFEST_FILE} is missing") from None
        self._manifest_bytes, self._manifest = manifest, parse_manifest(manifest)
        self.staged_copy = find_staged_copy(staging, address.name, manifest)

    def copy_small_files(self, directory: Path) -> None:
        """Write the small files to a directory.

        Raises:
            CheckpointError: one is not as it was written.
        """
        (directory / MANIFEST_FILE).write_bytes(self._manifest_bytes)
        for name in REQUIRED_FILES:
            content = self.read(name, 0, self._manifest.sizes[name])
            compare_digest(name, hash_content(content), self._manifest.digests[name])
            (directory / name).write_bytes(content)

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Read a range of a file; any thread may call it.

        Raises:
            CheckpointError: it cannot be read.
        """
        size = self._manifest.sizes.get(name)
        if size is None or not 0 <= begin <= end <= size:
            raise CheckpointError(f"{self._address / name} does not contain bytes {begin} to {end}")
        if self.staged_copy is not None:
            content = _read_copy(self.staged_copy / name, size, begin, end)
            if content is not None:
                return content
        try:
            return self._store.read(self._address / name, begin, end)
        except FileNotFoundError:
            raise CheckpointError(f"{self._address / name} is missing") from None


def _read_copy(path: Path, size: int, begin: int, end: int) -> bytes | None:
    """Read a range of a staged file; None if this host does not have all of the file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            file.seek(begin)
            return file.read(end - begin)
    except OSError:
        return None


@contextmanager
def open_checkpoint(
    checkpoint: AnyCheckpoint, staging: Path | None, *, verify: bool
) -> Iterator[Path]:
    """Return a local directory that megatron.core loads a checkpoint from, as long as it is open.

    It is the directory of a checkpoint on disk. For object storage, it is a temporary directory
    with the small files of the checkpoint, and tensors are read from the storage.

    Args:
        checkpoint: the checkpoint.
        staging: the staging directory of this host, or None.
        verify: compare the checksums of tensors as they are read from object storage.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    if isinstance(checkpoint.path, Path):
        yield checkpoint.path
        return
    files = StoredFiles(checkpoint.path, staging)
    with tempfile.TemporaryDirectory(prefix="flagscale-load-") as name:
        directory = Path(name, checkpoint.path.name)
        directory.mkdir()
        files.copy_small_files(directory)
        original = torch_strategies._get_filesystem_reader

        def create_reader(path: Any, cache_metadata: bool = False) -> Any:
            if Path(path) != directory:
                return original(path, cache_metadata)
            return RangeReader(directory, files, verify=verify)

        torch_strategies._get_filesystem_reader = create_reader
        try:
            yield directory
        finally:
            torch_strategies._get_filesystem_reader = original


@dataclass(frozen=True)
class _Span:
    """Range of a file that is read at once. ``items`` are the parts of the load in it."""

    name: str
    begin: int
    end: int
    items: tuple[tuple[Any, tuple[ReadItem, ...]], ...]


class RangeReader(CachedMetadataFileSystemReader):  # type: ignore[misc]
    """Reader of torch.distributed.checkpoint that reads tensors by ranges.

    Several ranges are read at the same time. Memory holds about ``CONCURRENT_PARTS * PART_BYTES``
    that are read ahead, or a single chunk if that is larger, and the chunk that is being loaded.
    """

    def __init__(self, directory: Path, files: StoredFiles, *, verify: bool) -> None:
        super().__init__(directory)
        self._files, self._verify = files, verify

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read the items of a plan; see the base class."""
        with ThreadPoolExecutor(CONCURRENT_PARTS, thread_name_prefix="checkpoint-reader") as pool:
            for span, content in self._read_spans(pool, list(_plan_spans(self.storage_data, plan))):
                for location, items in span.items:
                    begin = location.offset - span.begin
                    self._load_items(content[begin : begin + location.length], items, planner)
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _read_spans(
        self, pool: ThreadPoolExecutor, spans: list[_Span]
    ) -> Iterator[tuple[_Span, memoryview]]:
        """Yield spans with their content, in order, and read the following ones meanwhile."""
        pending: deque[tuple[_Span, bytearray, list[Future[None]]]] = deque()
        remaining = deque(spans)

        def read_ahead() -> None:
            while remaining and (
                not pending
                or sum(len(buffer) for _, buffer, _ in pending) < CONCURRENT_PARTS * PART_BYTES
            ):
                span = remaining.popleft()
                pending.append((span, *self._start_reading(pool, span)))

        read_ahead()
        while pending:
            span, buffer, parts = pending.popleft()
            read_ahead()
            for part in parts:
                part.result()
            yield span, memoryview(buffer)

    def _start_reading(
        self, pool: ThreadPoolExecutor, span: _Span
    ) -> tuple[bytearray, list[Future[None]]]:
        """Start to read the parts of a span into a buffer."""
        buffer = bytearray(span.end - span.begin)

        def read_part(begin: int) -> None:
            end = min(begin + PART_BYTES, span.end)
            buffer[begin - span.begin : end - span.begin] = self._files.read(span.name, begin, end)

        begins = range(span.begin, span.end, PART_BYTES)
        return buffer, [pool.submit(read_part, begin) for begin in begins]

    def _load_items(
        self, content: memoryview, items: tuple[ReadItem, ...], planner: LoadPlanner
    ) -> None:
        """Load the items of one chunk into the tensors of the plan."""
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, io.BytesIO(content))
            return
        file = io.BytesIO(content)
        if self._verify:
            try:
                verify_archive(file)
            except zipfile.BadZipFile as error:
                raise CheckpointError(
                    f"{items[0].storage_index.fqn} is not as it was written: {error}",
                    hint="remove this checkpoint to continue from the previous one",
                ) from error
            file.seek(0)
        tensor = torch.load(file, map_location="cpu", weights_only=True)
        for item in items:
            part = tensor
            for dimension, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)


def _plan_spans(storage_data: Mapping[Any, Any], plan: LoadPlan) -> Iterator[_Span]:
    """Yield the ranges of files to read for a plan. Small chunks near each other are joined."""
    items_by_chunk: dict[tuple[str, int, int], list[ReadItem]] = {}
    locations: dict[tuple[str, int, int], Any] = {}
    for item in plan.items:
        location = storage_data[item.storage_index]
        key = (str(location.relative_path), location.offset, location.offset + location.length)
        locations[key] = location
        items_by_chunk.setdefault(key, []).append(item)
    for name in sorted({key[0] for key in locations}):
        keys = sorted(key for key in locations if key[0] == name)
        spans = join_ranges([key[1:] for key in keys], max_gap=_MAX_GAP_BYTES, max_bytes=PART_BYTES)
        for begin, end in spans:
            chunks = [key for key in keys if begin <= key[1] and key[2] <= end]
            yield _Span(
                name, begin, end, tuple((locations[k], tuple(items_by_chunk[k])) for k in chunks)
            )
