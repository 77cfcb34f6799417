"""Writing one checkpoint's tensors: planned together, written by each rank, in the foreground or
from a forked process.

megatron.core's own way starts a manager process a rank (seconds, and another copy of torch), and
an error on rank 0 between its collectives leaves the other ranks waiting. Here its planning and
its file format are kept, and the steps between run so that every failure is known to all ranks.
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
from flagscale.train.checkpoint.agreement import agree, describe, on_rank_0, quiet_failure

_BACKEND, _VERSION = "torch_dist", 1


@dataclass
class Written:
    """What a rank wrote: DCP's results, or the error that ended it."""

    results: list[Any] = field(default_factory=list)
    error: str | None = None


class Writing:
    """One checkpoint under way. Every method is called on all ranks alike.

    ``directory`` exists and is empty. Collectives run in the constructor and in :meth:`finish`;
    between them each rank writes on its own.
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
        """Plan, take a snapshot, and write it (``background``: begin to)."""
        self._directory = directory
        self._errors: list[str] = []
        sharded, common = save_preprocess(state, validate)
        with quiet_failure(self._errors):
            _write_common(common, directory)
        self._writer, self._metadata = _plan(sharded, directory, fully_parallel)
        buckets = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets, True)
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        self._background: _Background | None = None
        self._written = Written()
        if background:
            self._background = _Background(buckets, transforms)
        else:
            self._written = write(buckets, transforms)

    def done(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._background is None or self._background.done()

    def finish(self) -> None:
        """Wait for this rank's writing, then make the checkpoint readable, all together.

        Raises:
            CheckpointError: on all ranks, when any could not write all.
        """
        if self._background is not None:
            self._written = self._background.result()
            self._background = None
        own = self._errors[0] if self._errors else self._written.error
        agree(own)
        results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._written.results, results, dst=0)
        on_rank_0(lambda: self._complete(results or []))

    def _complete(self, results: list[list[Any]]) -> None:
        for name in {item.storage_data.relative_path for rank in results for item in rank}:
            if not (self._directory / name).is_file():
                raise CheckpointError(
                    f"{self._directory / name} was written on another host and is not here",
                    hint="the save directory must be on a file system that all hosts share",
                )
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self._directory))


def _write_common(common: Mapping[str, Any], directory: Path) -> None:
    """Rank 0 writes what is no tensor. Through a Python file: torch's own tells of a full disk
    only that a position is unexpected."""
    if dist.get_rank() != 0:
        return
    with (directory / COMMON_STATE_FNAME).open("wb") as file:
        torch.save(common, file)
        file.flush()
        os.fsync(file.fileno())


def write(buckets: list[Any], transforms: list[Any]) -> Written:
    """Write buckets of tensors, one file each, at once."""
    if not buckets:
        return Written()
    written = Written()
    with ThreadPoolExecutor(len(buckets)) as pool:
        for result in pool.map(partial(_write_one, transforms=transforms), count(), buckets):
            if isinstance(result, Exception):
                written.error = written.error or describe(result)
            else:
                written.results.extend(result)
    return written


def _write_one(index: int, bucket: Any, *, transforms: list[Any]) -> Any:
    # The queues are how this function of megatron.core reports from a process of its own.
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    counts: queue.Queue[int] = queue.Queue()
    counts.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, counts, True)
    return results.get_nowait()[1]


class _Background:
    """A forked process that writes; the snapshot is its copy of this process's memory."""

    def __init__(self, buckets: list[Any], transforms: list[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_write_and_tell, args=(theirs, buckets, transforms), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the process

    def done(self) -> bool:
        return self._connection.poll()  # also true when the process has ended

    def result(self) -> Written:
        """Wait for the end of the process."""
        try:
            written: Written = self._connection.recv()
        except EOFError:
            written = Written(error="the process that writes the checkpoint was killed")
        self._process.join()
        self._connection.close()
        return written


def _write_and_tell(connection: Connection, buckets: list[Any], transforms: list[Any]) -> None:
    gc.disable()  # collecting would free tensors that belong to the parent's device
    # A stop request is the trainer's to handle, and it waits for this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(write(buckets, transforms))
    connection.close()
    os._exit(0)  # nothing that this copy of the parent would clean up at its end is its own


class _PlanningStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Plans as megatron.core does and hands the plan back instead of a function to run."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        _, metadata, _ = save_state_dict_ret
        return writer, metadata


def _plan(sharded: Mapping[str, Any], directory: Path, fully_parallel: bool) -> tuple[Any, Any]:
    """Which rank writes what: the writer, and on rank 0 the metadata to complete."""
    strategy: Any = _PlanningStrategy(_BACKEND, _VERSION)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    with _without_manager_process():
        writer, metadata = strategy.async_save(sharded, str(directory))
    return writer, metadata


@contextmanager
def _without_manager_process() -> Iterator[None]:
    """Planning would start a process for a queue that is not used here."""
    original = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = lambda: None
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
