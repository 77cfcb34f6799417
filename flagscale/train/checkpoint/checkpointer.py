"""Checkpointer: saves training state in the foreground or background, and loads it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import loading, sharded_state
from flagscale.train.checkpoint.collective_errors import (
    raise_on_all_ranks,
    run_on_rank_0,
    true_on_all_ranks,
)
from flagscale.train.checkpoint.loading import LoadReport
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.checkpoint.writing import CheckpointWrite
from flagscale.train.state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk. ``seconds`` is the time since saving began."""

    iteration: int
    path: Path
    seconds: float


@dataclass
class _PendingSave:
    iteration: int
    description: dict[str, Any]
    writing: CheckpointWrite
    started: float


class Checkpointer:
    """Saves and loads the checkpoints of a run. All ranks call all methods at the same points.

    If a checkpoint cannot be saved in the middle of training (for example, because the disk is
    full), ``warn`` gets a message and training continues; earlier checkpoints remain. If the last
    save of a run fails, :meth:`close` raises, so that the end of the run is not lost silently.
    """

    def __init__(
        self, args: argparse.Namespace, *, warn: Callable[[str], None] | None = None
    ) -> None:
        """Open the save directory of ``args``; nothing is written yet.

        Args:
            args: the resolved training arguments.
            warn: called with a message on every rank; by default, rank 0 logs it.

        Raises:
            CheckpointError: psutil is not installed, which megatron.core needs to write
                checkpoints.
        """
        if importlib.util.find_spec("psutil") is None:
            raise CheckpointError(
                "psutil is not installed; megatron.core cannot write checkpoints without it",
                hint="pip install psutil",
            )
        self._args = args
        self._warn = warn or _log_on_rank_0
        self._store = CheckpointStore(Path(args.save)) if args.save else None
        self._pending: _PendingSave | None = None
        self._saved: list[SavedCheckpoint] = []
        self._failure: CheckpointError | None = None
        self._has_earlier = False
        self._sharding_validated = False
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-remover")
        self._removals: list[Future[None]] = []

    def load(self, state: TrainState) -> LoadReport | None:
        """Load the newest complete checkpoint below ``args.load`` into ``state``, in place.

        Returns:
            A report with the skipped checkpoints and the reasons, or None if there is no
            checkpoint.

        Raises:
            CheckpointError: on all ranks, if all checkpoints are damaged, or the newest belongs to
                another model or optimizer or cannot be read.
        """
        report = loading.load(self._args, state)
        if report is not None and self._args.load == self._args.save:
            self._has_earlier = True
        return report

    def check_writable(self) -> bool:
        """Check, before training, that a checkpoint directory can be created, and delete it again.

        Returns:
            Whether ``args.save`` did not exist before.

        Raises:
            CheckpointError: on all ranks, if no checkpoint can be written there.
        """
        if self._store is None:
            return False
        store = self._store
        try:
            is_new = run_on_rank_0(lambda: not store.root.exists())
            self._create_directory(0)
        except CheckpointError as error:
            raise CheckpointError(
                f"save: no checkpoint can be written in {store.root}: {error.message}",
                hint="set save to a directory that every host can write, or to null to save none",
            ) from error
        finally:
            if dist.get_rank() == 0:
                store.abandon(0)
        return is_new

    def save(self, state: TrainState, *, required: bool = False) -> None:
        """Save ``state``, after waiting for an earlier save that is still in progress.

        With ``args.async_save``, writing continues in the background and :meth:`poll` returns the
        checkpoint once it is complete.

        Args:
            state: the training state.
            required: wait for the end and raise on failure.

        Raises:
            CheckpointError: on all ranks, if saving fails and ``required`` is set.
        """
        self._finish_pending()
        iteration, started = state.progress.iteration, time.monotonic()
        try:
            writing = self._start_writing(iteration, state)
        except CheckpointError as error:
            self._record_failure(iteration, error)
        else:
            description = sharded_state.describe_run(self._args, state)
            self._pending = _PendingSave(iteration, description, writing, started)
            if required or not self._args.async_save:
                self._finish_pending()
        if required and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def poll(self) -> list[SavedCheckpoint]:
        """Return the checkpoints completed since the last call. Called once per step."""
        if self._pending is not None and true_on_all_ranks(self._pending.writing.is_done()):
            self._finish_pending()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Wait for background saves and deletions.

        Raises:
            CheckpointError: on all ranks, if the last save failed.
        """
        self._finish_pending()
        for removal in self._removals:
            removal.result()
        self._remover.shutdown()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _start_writing(self, iteration: int, state: TrainState) -> CheckpointWrite:
        args = self._args
        # Fully parallel saving needs replicas on some rank. All ranks must decide the same.
        replicas = args.data_parallel_size * args.context_parallel_size
        writing = CheckpointWrite(
            self._create_directory(iteration),
            self._build_state_dict(state),
            fully_parallel=args.ckpt_fully_parallel_save
            and (replicas > 1 or args.meshes is not None),
            background=self._args.async_save,
            validate=not self._sharding_validated,
        )
        self._sharding_validated = True
        return writing

    def _create_directory(self, iteration: int) -> Path:
        """Create the temporary directory of a checkpoint; check that every rank can write to it."""
        store = self._require_store()
        directory = run_on_rank_0(lambda: store.begin(iteration))
        usable = os.access(directory, os.W_OK | os.X_OK)
        raise_on_all_ranks(
            None if usable else f"{directory} is not visible on this host, or not writable"
        )
        return directory

    def _build_state_dict(self, state: TrainState) -> dict[str, Any]:
        args = self._args
        metadata = sharded_state.sharding_metadata()
        with_group = sharded_state.add_data_parallel_group(metadata)
        content = sharded_state.build_model_state_dict(args, state, with_group)
        if not args.no_save_optim:
            model = dict(content)
            content["optimizer"] = sharded_state.build_optimizer_state_dict(
                state, model, with_group, is_loading=False
            )
            content["scheduler"] = state.scheduler.state_dict()
        if not args.no_save_rng:
            content.update(sharded_state.build_rng_state())
        content["progress"] = state.progress.state_dict()
        if state.measured_shares is not None:
            content["measured_shares"] = state.measured_shares.state_dict()
        content[sharded_state.METADATA_KEY] = metadata
        return content

    def _finish_pending(self) -> None:
        """Wait for the save in progress, if any; publish the checkpoint or record the failure."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.writing.finish()
            path = run_on_rank_0(lambda: self._publish(pending))
        except CheckpointError as error:
            self._record_failure(pending.iteration, error)
            return
        self._failure, self._has_earlier = None, True
        seconds = time.monotonic() - pending.started
        self._saved.append(SavedCheckpoint(pending.iteration, path, seconds))

    def _publish(self, pending: _PendingSave) -> Path:
        """Publish a checkpoint, then delete superseded ones in the background. Runs on rank 0."""
        store = self._require_store()
        path = store.publish(pending.iteration, pending.description)
        retained = self._args.save_retain_interval
        if keep := self._args.keep_last or (1 if retained else None):
            superseded = store.list_superseded(pending.iteration, keep, retained)
            self._removals = [item for item in self._removals if not item.done()]
            self._removals.append(self._remover.submit(store.remove, superseded))
        return path

    def _record_failure(self, iteration: int, error: CheckpointError) -> None:
        if dist.get_rank() == 0:
            self._require_store().abandon(iteration)
        fallback_hint = (
            "the checkpoints saved before it are in place" if self._has_earlier else None
        )
        self._failure = CheckpointError(
            f"the checkpoint of iteration {iteration} was not saved: {error.message}",
            hint=error.hint or fallback_hint,
        )
        self._warn(self._failure.message)

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise CheckpointError("save is not set: there is no directory for checkpoints")
        return self._store


def _log_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        _log.warning(message)
