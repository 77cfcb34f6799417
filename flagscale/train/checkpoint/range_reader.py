"""Loading of a checkpoint's tensors by ranges, from a disk or from object storage.

Each rank reads the byte ranges of the chunks that overlap its shards. Several threads read and
verify checksums. The bytes of a chunk that fills a tensor in host memory are read directly into it;
those of others are copied from a buffer by another thread meanwhile.

Of a checkpoint in object storage, the small files are copied to a temporary directory, which then
stands for the checkpoint. If the staging directory of the host has a copy of its tensors from the
same save, it is read instead of the storage.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol

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
from flagscale.train.checkpoint.scattered_bytes import ScatteredBytes
from flagscale.train.checkpoint.tensor_archive import find_data, open_tensor
from flagscale.train.checkpoint.tensor_memory import view_bytes
from flagscale.train.checkpoint.uploads import find_staged_copy

AnyCheckpoint = LatestCheckpoint[Path] | LatestCheckpoint[StorageAddress]
_MAX_GAP_BYTES = 1 << 20
"""Bytes between two chunks that are read together, which takes less time than another request."""
_DAMAGE_HINT = "remove this checkpoint to continue from the previous one"
_DISK_STREAMS = 2
"""Files of a disk that are read at the same time, each sequentially: a disk, and what the kernel
reads ahead, are faster in order."""
_MAX_OPEN_FILES = 16
"""Files of a disk that stay open. A rank may need more than a process may open."""
_MAX_PENDING_SPANS = 32
"""Spans that are read ahead at most, as each has a buffer."""
_VERIFIERS = 2
"""Threads that verify checksums of what was read."""
_MAX_PIECES = 1024
"""Pieces of memory that one system call fills (IOV_MAX)."""
_MIN_DIRECT_BYTES = 64 << 10
"""Minimum size of tensors whose bytes are read directly into the destination tensor."""
_MAX_ENVELOPE_BYTES = 16 << 10
"""Maximum size of an archive's envelope: its bytes without those of the tensor."""


class CheckpointFiles(Protocol):
    """Files of a checkpoint."""

    @property
    def stream_count(self) -> int:
        """Number of files to read at the same time."""
        ...

    @property
    def stream_readers(self) -> int:
        """Number of parts of one file to read at the same time."""
        ...

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with the bytes of a file from ``begin`` on.

        Any thread may call it, for one file as many at the same time as :attr:`stream_readers`.

        Raises:
            CheckpointError: they cannot be read, or the file ends before.
            OSError: they cannot be read.
        """
        ...


class DiskFiles:
    """Files of a checkpoint on a disk. The latest ones stay open, since the kernel reads ahead of
    where the same open file was read before.
    """

    stream_count, stream_readers = _DISK_STREAMS, 1

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._open_files: dict[str, BinaryIO] = {}

    def close(self) -> None:
        """Close all files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()

    def _open(self, name: str) -> BinaryIO:
        with self._lock:
            if name not in self._open_files:
                if len(self._open_files) == _MAX_OPEN_FILES:
                    # The first one in the dictionary was opened first. It has been read.
                    self._open_files.pop(next(iter(self._open_files))).close()
                self._open_files[name] = (self._directory / name).open("rb", buffering=0)
            return self._open_files[name]

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers; see :class:`CheckpointFiles`."""
        if Path(name).name != name:
            raise CheckpointError(f"{self._directory}: {name!r} is not a file next to its metadata")
        path, memory = self._directory / name, ScatteredBytes(buffers)
        filled, size = 0, len(memory)
        descriptor = self._open(name).fileno()
        while filled < size:
            pieces = memory.pieces(filled, size)[:_MAX_PIECES]
            count = os.preadv(descriptor, pieces, begin + filled)
            if not count:
                raise CheckpointError(
                    f"{path} is not as it was written: it ends within the {size} bytes from "
                    f"{begin} on",
                    hint=_DAMAGE_HINT,
                )
            filled += count


class StoredFiles:
    """Files of a checkpoint in object storage, or their staged copies on this host."""

    stream_count, stream_readers = 1, CONCURRENT_PARTS

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

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers; see :class:`CheckpointFiles`."""
        content = memoryview(self.read(name, begin, begin + sum(map(len, buffers))))
        for buffer in buffers:
            buffer[:], content = content[: len(buffer)], content[len(buffer) :]

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
        verify: compare the checksums of tensors as they are read.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    if isinstance(checkpoint.path, Path):
        with (
            closing(DiskFiles(checkpoint.path)) as disk_files,
            _read_by_ranges(checkpoint.path, disk_files, verify=verify),
        ):
            yield checkpoint.path
        return
    files = StoredFiles(checkpoint.path, staging)
    with tempfile.TemporaryDirectory(prefix="flagscale-load-") as name:
        directory = Path(name, checkpoint.path.name)
        directory.mkdir()
        files.copy_small_files(directory)
        with _read_by_ranges(directory, files, verify=verify):
            yield directory


@contextmanager
def _read_by_ranges(directory: Path, files: CheckpointFiles, *, verify: bool) -> Iterator[None]:
    """Return a context manager in which megatron.core reads a directory by :class:`RangeReader`."""
    original, data_positions = torch_strategies._get_filesystem_reader, dict[int, int]()

    def create_reader(path: Any, cache_metadata: bool = False) -> Any:
        if Path(path) != directory:
            return original(path, cache_metadata)
        return RangeReader(directory, files, verify=verify, data_positions=data_positions)

    torch_strategies._get_filesystem_reader = create_reader
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = original


@dataclass(frozen=True)
class _Chunk:
    """A tensor or an object in a file, and what is loaded of it."""

    begin: int
    end: int
    items: tuple[ReadItem, ...]

    @property
    def is_object(self) -> bool:
        """True for an object, False for a tensor."""
        return bool(self.items[0].type == LoadItemType.BYTE_IO)

    def find_target(self, planner: LoadPlanner) -> torch.Tensor | None:
        """Return the tensor that the chunk fills; None if it cannot be read directly into it."""
        if self.is_object or len(self.items) > 1:
            return None
        target = planner.resolve_tensor(self.items[0]).detach()
        envelope_bytes = self.end - self.begin - target.numel() * target.element_size()
        if (
            target.device.type != "cpu"
            or not target.is_contiguous()
            or target.numel() * target.element_size() < _MIN_DIRECT_BYTES
            or not 0 < envelope_bytes <= _MAX_ENVELOPE_BYTES
        ):
            return None
        return target


@dataclass(frozen=True)
class _Span:
    """Range of a file that is read at once."""

    name: str
    begin: int
    end: int
    chunks: tuple[_Chunk, ...]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


class _Buffers:
    """Memory that is used again and again: new memory takes about as long as reading into it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least ``size`` bytes."""
        for buffer in sorted(self._free, key=len):
            if len(buffer) >= size:
                self._free = [other for other in self._free if other is not buffer]
                return buffer
        if self._free:
            smallest = min(self._free, key=len)
            self._free = [other for other in self._free if other is not smallest]
        return torch.empty(max(size, PART_BYTES), dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let a buffer be used again."""
        self._free.append(buffer)


class _SpanReading:
    """A span that threads read, verify and open."""

    def __init__(
        self,
        span: _Span,
        memory: ScatteredBytes,
        files: CheckpointFiles,
        readers: ThreadPoolExecutor,
        verifiers: ThreadPoolExecutor,
        open_chunk: Callable[[_Chunk, ScatteredBytes], Any],
    ) -> None:
        """Start to read a span.

        Args:
            span: the span.
            memory: memory to read to.
            files: the files of the checkpoint.
            readers: threads that read.
            verifiers: threads that call ``open_chunk``.
            open_chunk: opens a chunk, which is in the memory given to it.
        """
        self.span = span
        self._memory, self._files, self._open_chunk = memory, files, open_chunk
        self._verifiers = verifiers
        # About equal parts: one of a few bytes would cost another request.
        count = max(round(span.size / PART_BYTES), 1)
        self._part_bytes = -(-span.size // count)
        begins = range(0, span.size, self._part_bytes)
        self._lock, self._unread_parts = threading.Lock(), len(begins)
        self._opened: Future[list[Any]] = Future()
        self._parts: list[Future[None]] = [
            readers.submit(self._read_part, begin) for begin in begins
        ]

    def wait(self) -> list[Any]:
        """Return what ``open_chunk`` returned, in the order of the chunks.

        Raises:
            CheckpointError: they cannot be read, or are not as they were written.
        """
        for part in self._parts:
            part.result()
        return self._opened.result()

    def _read_part(self, begin: int) -> None:
        """Read a part, and let the chunks be opened if it is the last one."""
        pieces = self._memory.pieces(begin, begin + self._part_bytes)
        self._files.read_into(self.span.name, self.span.begin + begin, pieces)
        with self._lock:
            self._unread_parts -= 1
            is_last = not self._unread_parts
        if is_last:
            self._opened = self._verifiers.submit(self._open_chunks)

    def _open_chunks(self) -> list[Any]:
        first = self.span.begin
        return [
            self._open_chunk(chunk, self._memory.slice(chunk.begin - first, chunk.end - first))
            for chunk in self.span.chunks
        ]


class RangeReader(CachedMetadataFileSystemReader):  # type: ignore[misc]
    """Reader of torch.distributed.checkpoint that reads tensors by ranges.

    Several ranges are read at the same time. Memory holds about ``CONCURRENT_PARTS * PART_BYTES``
    that are read ahead, or two spans if those are larger.
    """

    def __init__(
        self,
        directory: Path,
        files: CheckpointFiles,
        *,
        verify: bool,
        data_positions: dict[int, int] | None = None,
    ) -> None:
        """Create a reader.

        Args:
            directory: directory with the metadata of the checkpoint.
            files: files with the tensors.
            verify: compare checksums.
            data_positions: positions of the bytes of a tensor in its archive, by the size of its
                envelope, which the reader completes. Readers of one checkpoint may share them.
        """
        super().__init__(directory)
        self._files, self._verify = files, verify
        self._data_positions = {} if data_positions is None else data_positions

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read the items of a plan; see the base class."""
        spans = list(_plan_spans(self.storage_data, plan))
        with ExitStack() as stack:
            verifiers = stack.enter_context(ThreadPoolExecutor(_VERIFIERS, "checkpoint-verifier"))
            streams = [
                stack.enter_context(
                    ThreadPoolExecutor(self._files.stream_readers, "checkpoint-reader")
                )
                for _ in range(self._files.stream_count)
            ]
            for reading in self._read_ahead(spans, streams, verifiers, planner):
                for chunk, content in zip(reading.span.chunks, reading.wait(), strict=True):
                    _load_items(chunk, content, planner)
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _read_ahead(
        self,
        spans: list[_Span],
        streams: list[ThreadPoolExecutor],
        verifiers: ThreadPoolExecutor,
        planner: LoadPlanner,
    ) -> Iterator[_SpanReading]:
        """Yield spans in order of reading, and read the following ones meanwhile."""
        pending: deque[tuple[_SpanReading, torch.Tensor]] = deque()
        remaining, buffers = deque(_assign_streams(spans, len(streams))), _Buffers()
        addresses = set[int]()
        while pending or remaining:
            while remaining and (
                len(pending) < 2
                or (
                    len(pending) < _MAX_PENDING_SPANS
                    and sum(reading.span.size for reading, _ in pending)
                    < CONCURRENT_PARTS * PART_BYTES
                )
            ):
                stream, span = remaining.popleft()
                targets = self._find_targets(span, planner, addresses)
                views = {begin: view_bytes(target) for begin, target in targets.items()}
                buffer = buffers.take(span.size - sum(map(len, views.values())))
                memory = _insert_targets(views, buffer, span.size)
                open_chunk = partial(self._open, span.name)
                reading = _SpanReading(
                    span, memory, self._files, streams[stream], verifiers, open_chunk
                )
                pending.append((reading, buffer))
            reading, buffer = pending.popleft()
            yield reading
            buffers.give_back(buffer)

    def _find_targets(
        self, span: _Span, planner: LoadPlanner, addresses: set[int]
    ) -> dict[int, torch.Tensor]:
        """Return the tensors to read directly into, by the first of their bytes in the span.

        ``addresses`` are those of earlier tensors. Two chunks may belong to one tensor, and the
        later one has to come last.

        An archive tells only after it was read where the bytes of its tensor are in it. They are
        expected where they were in others with an envelope of the same size. If they are elsewhere,
        :func:`open_tensor` copies them.
        """
        targets = {}
        for chunk in span.chunks:
            target = chunk.find_target(planner)
            if target is not None and target.data_ptr() not in addresses:
                addresses.add(target.data_ptr())
                size = target.numel() * target.element_size()
                position = self._data_positions.get(chunk.end - chunk.begin - size)
                if position:
                    targets[chunk.begin - span.begin + position] = target
        return targets

    def _open(self, name: str, chunk: _Chunk, content: ScatteredBytes) -> Any:
        """Return the tensor of a chunk of a file, or the bytes of an object.

        Several threads call it.
        """
        if chunk.is_object:
            return content.join(0, len(content))
        try:
            tensor = open_tensor(content, verify=self._verify)
            envelope_bytes = len(content) - tensor.numel() * tensor.element_size()
            if envelope_bytes not in self._data_positions:
                self._data_positions[envelope_bytes] = find_data(content)
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{name}: {chunk.items[0].storage_index.fqn} is not as it was written: {error}",
                hint=_DAMAGE_HINT,
            ) from error
        return tensor


def _insert_targets(
    targets: Mapping[int, memoryview], buffer: torch.Tensor, size: int
) -> ScatteredBytes:
    """Return ``size`` bytes of memory that are those of the targets, and others of a buffer.

    Args:
        targets: memory by the position of its first byte.
        buffer: memory of all other bytes.
        size: number of all bytes.
    """
    free, pieces, position = view_bytes(buffer), list[memoryview](), 0
    for begin, target in sorted(targets.items()):
        pieces += [free[: begin - position], target]
        free, position = free[begin - position :], begin + len(target)
    return ScatteredBytes([*pieces, free[: size - position]])


def _load_items(chunk: _Chunk, content: Any, planner: LoadPlanner) -> None:
    """Load the items of one chunk into the tensors of the plan."""
    for item in chunk.items:
        if chunk.is_object:
            planner.load_bytes(item, io.BytesIO(content))
            continue
        part = content
        for dimension, (begin, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            part = part.narrow(dimension, begin, length)
        target = planner.resolve_tensor(item).detach()
        _copy(part, target)
        planner.commit_tensor(item, target)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor, which may have been read to the memory of the target."""
    offset = source.data_ptr() - target.data_ptr()
    if target.device.type == "cpu" and 0 <= offset < target.numel() * target.element_size():
        form, target_form = (source.dtype, source.stride()), (target.dtype, target.stride())
        if not offset and form == target_form:
            return
        source = source.clone()
    target.copy_(source)


def _plan_spans(storage_data: Mapping[Any, Any], plan: LoadPlan) -> Iterator[_Span]:
    """Yield the ranges of files to read for a plan. Small chunks near each other are joined."""
    items_by_range: defaultdict[str, defaultdict[tuple[int, int], list[ReadItem]]]
    items_by_range = defaultdict(lambda: defaultdict(list))
    for item in plan.items:
        location = storage_data[item.storage_index]
        limits = location.offset, location.offset + location.length
        items_by_range[str(location.relative_path)][limits].append(item)
    for name, items in sorted(items_by_range.items()):
        chunks = deque(_Chunk(*limits, tuple(items[limits])) for limits in sorted(items))
        for begin, end in join_ranges(sorted(items), max_gap=_MAX_GAP_BYTES, max_bytes=PART_BYTES):
            joined = []
            while chunks and chunks[0].end <= end:
                joined.append(chunks.popleft())
            yield _Span(name, begin, end, tuple(joined))


def _assign_streams(spans: list[_Span], stream_count: int) -> Iterator[tuple[int, _Span]]:
    """Yield spans in order of reading, each with the number of the stream that reads its file.

    As many files are read at the same time as there are streams.
    """
    files = [list(group) for _, group in groupby(spans, key=lambda span: span.name)]
    for first in range(0, len(files), stream_count):
        for row in zip_longest(*files[first : first + stream_count]):
            for stream, span in enumerate(row):
                if span is not None:
                    yield stream, span
