"""Writing of one checkpoint's tensors, in the foreground or from a forked process.

Ranks plan a checkpoint collectively, and each rank then writes on its own. megatron.core's own
asynchronous save starts a manager process per rank (seconds, and another copy of torch), and an
error on rank 0 between its collectives leaves the other ranks waiting. This module keeps
megatron.core's planning and file format, and runs the steps in between so that every failure is
reported on all ranks.

megatron.core divides the tensors of a rank into buckets; each bucket becomes one file.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult as TensorResult

from flagscale.checkpoints import REQUIRED_FILES
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.collective_errors import (
    collect_errors,
    describe_error,
    raise_on_all_ranks,
    run_on_rank_0,
)
from flagscale.train.checkpoint.stored_archive import pad_to_alignment, write_all
from flagscale.train.checkpoint.tensor_archive_writer import has_archive, write_archive
from flagscale.train.checkpoint.tensor_memory import view_bytes

_FLUSHED_BYTES = 32 << 20
"""Bytes of tensors after which their writeback is started, instead of by the fsync at the end."""
_STORAGE_BACKEND, _STORAGE_VERSION = "torch_dist", 1


@dataclass
class WriteResult:
    """Result of writing on one rank.

    Attributes:
        tensor_results: write results of torch.distributed.checkpoint, one per tensor.
        error: description of the first error, or None.
    """

    tensor_results: list[Any] = field(default_factory=list)
    error: str | None = None


class CheckpointWrite:
    """One checkpoint being written. All ranks call every method at the same points.

    ``directory`` exists and is empty. The constructor and :meth:`finish` run collectives; between
    them, each rank writes on its own.
    """

    def __init__(
        self,
        directory: Path,
        state_dict: dict[str, Any],
        *,
        fully_parallel: bool,
        in_background: bool,
        validate_sharding: bool,
        is_staged: bool = False,
    ) -> None:
        """Plan the checkpoint, take a snapshot, and write it or start to write it.

        Args:
            directory: existing, empty directory on a file system shared by all hosts.
            state_dict: sharded state dict.
            fully_parallel: distribute the replicated tensors over the data-parallel ranks.
            in_background: write from a forked process.
            validate_sharding: check the sharding of all ranks for consistency.
            is_staged: the directory may be another one on each host, from which the files are
                uploaded.
        """
        self._directory = directory
        self._is_staged = is_staged
        self._errors: list[str] = []
        sharded_state, common_state = save_preprocess(state_dict, validate_sharding)
        separate_storages(sharded_state)
        with collect_errors(self._errors):
            _write_common_state(common_state, directory)
        self._writer, self._metadata = _plan_writes(sharded_state, directory, fully_parallel)
        buckets = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets, True)
        self._background_writer: _BackgroundWriter | None = None
        self._result = WriteResult()
        if in_background:
            self._background_writer = _BackgroundWriter(buckets)
        else:
            self._result = write_buckets(buckets)

    def is_done(self) -> bool:
        """Return whether this rank has finished writing."""
        return self._background_writer is None or self._background_writer.is_done()

    def finish(self) -> None:
        """Wait for this rank's writing, then write the checkpoint's metadata. Collective.

        Raises:
            CheckpointError: on all ranks, if any rank failed to write.
        """
        if self._background_writer is not None:
            self._result = self._background_writer.wait()
            self._background_writer = None
        error = self._errors[0] if self._errors else self._result.error
        raise_on_all_ranks(error)
        results_by_rank: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        dist.gather_object(self._result.tensor_results, results_by_rank, dst=0)
        run_on_rank_0(lambda: self._write_metadata(results_by_rank or []))

    def measure_files(self) -> dict[str, int]:
        """Return the sizes of the files that this rank has written, by name, after the end."""
        names = _list_files(self._result.tensor_results)
        if dist.get_rank() == 0:
            names.update(REQUIRED_FILES)
        return {name: (self._directory / name).stat().st_size for name in sorted(names)}

    def _write_metadata(self, results_by_rank: list[list[Any]]) -> None:
        """Check that this host sees the files of all ranks, and write the metadata."""
        names = _list_files(result for results in results_by_rank for result in results)
        for name in () if self._is_staged else names:
            if not (self._directory / name).is_file():
                raise CheckpointError(
                    f"{self._directory / name} was written on another host and is not visible on "
                    "this one",
                    hint="the save directory must be on a file system that all hosts share",
                )
        self._writer.finish(self._metadata, results_by_rank)
        save_config(CheckpointingConfig(_STORAGE_BACKEND, _STORAGE_VERSION), str(self._directory))


def separate_storages(sharded_state: Mapping[str, Any]) -> None:
    """Give each tensor in host memory a storage of its own size in the same memory.

    megatron.core would copy those that are a part of a larger storage, because torch writes whole
    storages.
    """
    for item in nested_values(sharded_state):
        data = getattr(item, "data", None)
        if isinstance(item, ShardedTensor) and data is not None and data.device.type == "cpu":
            item.data = _separate_storage(data.detach())


def _separate_storage(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.numel() * tensor.itemsize
    if not size or not tensor.is_contiguous() or tensor.untyped_storage().size() == size:
        return tensor
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _list_files(tensor_results: Iterable[Any]) -> set[str]:
    """Return the names of the files that hold tensors."""
    return {result.storage_data.relative_path for result in tensor_results}


def _write_common_state(common_state: Mapping[str, Any], directory: Path) -> None:
    """Write the part of the state that is not sharded, on rank 0.

    It is written through a Python file, because torch's own file writer reports a full disk only as
    an unexpected position.
    """
    if dist.get_rank() != 0:
        return
    with (directory / COMMON_STATE_FNAME).open("wb") as file:
        torch.save(common_state, file)
        file.flush()
        os.fsync(file.fileno())


def write_buckets(buckets: list[Any]) -> WriteResult:
    """Write buckets of tensors to one file each, in parallel threads.

    Args:
        buckets: megatron.core's write buckets, with the tensors in host memory.
    """
    if not buckets:
        return WriteResult()
    combined = WriteResult()
    with ThreadPoolExecutor(len(buckets)) as pool:
        for result in pool.map(_write_bucket, buckets):
            if isinstance(result, Exception):
                combined.error = combined.error or describe_error(result)
            else:
                combined.tensor_results.extend(result)
    return combined


def _write_bucket(bucket: Any) -> list[Any] | Exception:
    """Write one bucket; return its write results, or an exception."""
    path, name, (objects, tensors) = bucket
    results, flushed_end = [], 0
    try:
        # Without a buffer: tensors are written from their own memory.
        with Path(path).open("wb", buffering=0) as file:
            for item, content in (*objects, *tensors):
                begin = pad_to_alignment(file)
                if isinstance(content, torch.Tensor):
                    _write_tensor(file, content)
                else:
                    write_all(file, content.getbuffer())
                length = file.tell() - begin
                location = _StorageInfo(name, begin, length)
                results.append(TensorResult(item.index, length, location))
                if file.tell() - flushed_end >= _FLUSHED_BYTES:
                    # Linux begins to write the pages, and does not wait for them.
                    os.posix_fadvise(file.fileno(), flushed_end, 0, os.POSIX_FADV_DONTNEED)
                    flushed_end = file.tell()
            os.fsync(file.fileno())
    except Exception as error:  # noqa: BLE001 - it is reported by all ranks
        return error
    return results


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    if has_archive(tensor.dtype) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        content = [view_bytes(tensor.contiguous())]
        write_archive(file, tensor.dtype, tuple(tensor.shape), content)
        return
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    write_all(file, buffer.getbuffer())


class _BackgroundWriter:
    """Forked process that writes. Its copy-on-write memory is the snapshot of the tensors."""

    def __init__(self, buckets: list[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, child_connection = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_write_in_child, args=(child_connection, buckets), daemon=True
        )
        self._process.start()
        # The pipe reaches its end only if no other process has this connection open.
        child_connection.close()

    def is_done(self) -> bool:
        return self._connection.poll()  # also true when the process has ended

    def wait(self) -> WriteResult:
        """Wait for the end of the process and return its result."""
        try:
            result: WriteResult = self._connection.recv()
        except EOFError:
            result = WriteResult(error="the process that writes the checkpoint was killed")
        self._process.join()
        self._connection.close()
        return result


def _write_in_child(connection: Connection, buckets: list[Any]) -> None:
    """Entry point of the forked process."""
    gc.disable()  # collecting would free device tensors that belong to the parent
    # The trainer handles a stop request, and waits for this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(write_buckets(buckets))
    connection.close()
    os._exit(0)  # skip cleanup of resources that belong to the parent


class _PlanningStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy that plans as megatron.core does and returns the plan instead of a callback."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        _, metadata, _ = save_state_dict_ret
        return writer, metadata


def _plan_writes(
    sharded_state: Mapping[str, Any], directory: Path, fully_parallel: bool
) -> tuple[Any, Any]:
    """Plan which rank writes which tensors.

    Returns:
        The writer and, on rank 0, the metadata to complete after writing.
    """
    strategy: Any = _PlanningStrategy(_STORAGE_BACKEND, _STORAGE_VERSION)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    with _without_manager_process():
        writer, metadata = strategy.async_save(sharded_state, str(directory))
    return writer, metadata


@contextmanager
def _without_manager_process() -> Iterator[None]:
    """Keep megatron.core's planning from starting a process for a queue that is not used here."""
    original = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = lambda: None
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
