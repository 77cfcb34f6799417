"""Writing of one checkpoint's tensors, in the foreground or from a forked process.

Ranks plan a checkpoint collectively, and each rank then writes on its own. megatron.core's own
asynchronous save starts a manager process per rank (seconds, and another copy of torch), and an
error on rank 0 between its collectives leaves the other ranks waiting. This module keeps
megatron.core's planning and file format, and runs the steps between so that every failure is
reported on all ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.collective_errors import (
    collect_errors,
    describe_error,
    raise_on_all_ranks,
    run_on_rank_0,
)

_BACKEND, _VERSION = "torch_dist", 1


@dataclass
class WriteResult:
    """Write results of PyTorch distributed checkpointing on one rank, or an error."""

    results: list[Any] = field(default_factory=list)
    error: str | None = None


class CheckpointWrite:
    """One checkpoint being written. All ranks call every method at the same points.

    ``directory`` exists and is empty. The constructor and :meth:`finish` run collectives; between
    them, each rank writes on its own.
    """

    def __init__(
        self,
        directory: Path,
        state: dict[str, Any],
        *,
        fully_parallel: bool,
        background: bool,
        validate: bool,
    ) -> None:
        """Plan the checkpoint, take a snapshot, and write it or start to write it.

        Args:
            directory: existing, empty directory on a file system shared by all hosts.
            state: sharded state dict.
            fully_parallel: distribute the replicated tensors over the data-parallel ranks.
            background: write from a forked process.
            validate: check the sharding of all ranks for consistency.
        """
        self._directory = directory
        self._errors: list[str] = []
        sharded, common = save_preprocess(state, validate)
        with collect_errors(self._errors):
            _write_common(common, directory)
        self._writer, self._metadata = _plan_writes(sharded, directory, fully_parallel)
        buckets = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets, True)
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        self._background: _BackgroundWriter | None = None
        self._result = WriteResult()
        if background:
            self._background = _BackgroundWriter(buckets, transforms)
        else:
            self._result = write_buckets(buckets, transforms)

    def is_done(self) -> bool:
        """Return whether this rank has finished writing."""
        return self._background is None or self._background.is_done()

    def finish(self) -> None:
        """Wait for this rank's writing, then write the checkpoint's metadata. Collective.

        Raises:
            CheckpointError: on all ranks, if any rank failed to write.
        """
        if self._background is not None:
            self._result = self._background.wait()
            self._background = None
        error = self._errors[0] if self._errors else self._result.error
        raise_on_all_ranks(error)
        results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._result.results, results, dst=0)
        run_on_rank_0(lambda: self._write_metadata(results or []))

    def _write_metadata(self, results: list[list[Any]]) -> None:
        for name in {item.storage_data.relative_path for rank in results for item in rank}:
            if not (self._directory / name).is_file():
                raise CheckpointError(
                    f"{self._directory / name} was written on another host and is not here",
                    hint="the save directory must be on a file system that all hosts share",
                )
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self._directory))


def _write_common(common: Mapping[str, Any], directory: Path) -> None:
    """Write the part of the state that is not sharded, on rank 0.

    It is written through a Python file, because torch's own file writer reports a full disk only as
    an unexpected position.
    """
    if dist.get_rank() != 0:
        return
    with (directory / COMMON_STATE_FNAME).open("wb") as file:
        torch.save(common, file)
        file.flush()
        os.fsync(file.fileno())


def write_buckets(buckets: list[Any], transforms: list[Any]) -> WriteResult:
    """Write buckets of tensors to one file each, in parallel threads."""
    if not buckets:
        return WriteResult()
    total = WriteResult()
    with ThreadPoolExecutor(len(buckets)) as pool:
        for result in pool.map(partial(_write_bucket, transforms=transforms), count(), buckets):
            if isinstance(result, Exception):
                total.error = total.error or describe_error(result)
            else:
                total.results.extend(result)
    return total


def _write_bucket(index: int, bucket: Any, *, transforms: list[Any]) -> Any:
    # megatron.core runs this function in a process of its own, which reports through queues.
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    counts: queue.Queue[int] = queue.Queue()
    counts.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, counts, True)
    return results.get_nowait()[1]


class _BackgroundWriter:
    """Forked process that writes. Its copy-on-write memory is the snapshot."""

    def __init__(self, buckets: list[Any], transforms: list[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_write_in_child, args=(theirs, buckets, transforms), daemon=True
        )
        self._process.start()
        theirs.close()  # then the pipe reaches its end when the process exits

    def is_done(self) -> bool:
        return self._connection.poll()  # also true when the process has ended

    def wait(self) -> WriteResult:
        """Wait for the end of the process and return its result."""
        try:
            written: WriteResult = self._connection.recv()
        except EOFError:
            written = WriteResult(error="the process that writes the checkpoint was killed")
        self._process.join()
        self._connection.close()
        return written


def _write_in_child(connection: Connection, buckets: list[Any], transforms: list[Any]) -> None:
    gc.disable()  # collecting would free device tensors that belong to the parent
    # The trainer handles a stop request, and waits for this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(write_buckets(buckets, transforms))
    connection.close()
    os._exit(0)  # skip cleanup of resources that belong to the parent


class _PlanningStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy that plans as megatron.core does and returns the plan instead of a callback."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        _, metadata, _ = save_state_dict_ret
        return writer, metadata


def _plan_writes(
    sharded: Mapping[str, Any], directory: Path, fully_parallel: bool
) -> tuple[Any, Any]:
    """Plan which rank writes which tensors.

    Returns:
        The writer and, on rank 0, the metadata to complete after writing.
    """
    strategy: Any = _PlanningStrategy(_BACKEND, _VERSION)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    with _without_manager_process():
        writer, metadata = strategy.async_save(sharded, str(directory))
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
