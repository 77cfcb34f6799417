"""Saves a training state now or in the background, and loads the latest one that is whole."""

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
from flagscale.train.checkpoint import content as contents
from flagscale.train.checkpoint import loading
from flagscale.train.checkpoint.agreement import agree, everywhere, on_rank_0
from flagscale.train.checkpoint.loading import LoadReport
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.checkpoint.writing import Writing
from flagscale.train.state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole on disk, ``seconds`` after its saving began."""

    iteration: int
    path: Path
    seconds: float


@dataclass
class _Pending:
    iteration: int
    description: dict[str, Any]
    writing: Writing
    begun: float


class Checkpointer:
    """All methods are called on all ranks at the same points.

    A checkpoint that cannot be saved in the middle of training (a full disk) is told to ``warn``
    and training goes on, with the checkpoints before it in place. When it is the last thing that
    was to be saved, :meth:`close` raises, for then the run's end would be lost in silence.
    """

    def __init__(
        self, args: argparse.Namespace, *, warn: Callable[[str], None] | None = None
    ) -> None:
        """``warn`` takes a message on every rank; without it rank 0 logs.

        Raises:
            CheckpointError: psutil is missing, without which writing checkpoints cannot work.
        """
        if importlib.util.find_spec("psutil") is None:
            raise CheckpointError(
                "psutil is not installed; megatron.core cannot write checkpoints without it",
                hint="pip install psutil",
            )
        self._args = args
        self._warn = warn or _log_on_rank_0
        self._store = CheckpointStore(Path(args.save)) if args.save else None
        self._pending: _Pending | None = None
        self._saved: list[SavedCheckpoint] = []
        self._failure: CheckpointError | None = None
        self._in_place = False
        self._validated = False
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-remover")
        self._removals: list[Future[None]] = []

    def load(self, state: TrainState) -> LoadReport | None:
        """Load the latest whole checkpoint of ``args.load`` into ``state``, in place; None when
        there is none. The report says what was skipped and why.

        Raises:
            CheckpointError: on all ranks: all checkpoints are damaged, or the latest is of
                another model, another optimizer or cannot be read.
        """
        report = loading.load(self._args, state)
        if report is not None and self._args.load == self._args.save:
            self._in_place = True
        return report

    def try_out(self) -> bool:
        """Begin a checkpoint and drop it, before training; whether ``args.save`` was made new.

        Raises:
            CheckpointError: on all ranks, when no checkpoint can be written there.
        """
        if self._store is None:
            return False
        store = self._store
        try:
            fresh = on_rank_0(lambda: not store.root.exists())
            self._open(0)
        except CheckpointError as error:
            raise CheckpointError(
                f"save: no checkpoint can be written in {store.root}: {error.message}",
                hint="set save to a directory that every host can write, or to null to save none",
            ) from error
        finally:
            if dist.get_rank() == 0:
                store.abandon(0)
        return fresh

    def save(self, state: TrainState, *, required: bool = False) -> None:
        """Save ``state``; with ``args.async_save`` writing goes on in the background and
        :meth:`poll` tells when it is done. An earlier save still under way is awaited.

        Raises:
            CheckpointError: on all ranks, when saving fails and ``required`` is set.
        """
        self._settle()
        iteration, begun = state.progress.iteration, time.monotonic()
        try:
            writing = self._begin(iteration, state)
        except CheckpointError as error:
            self._failed(iteration, error)
        else:
            description = contents.describe_run(self._args, state)
            self._pending = _Pending(iteration, description, writing, begun)
            if required or not self._args.async_save:
                self._settle()
        if required and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def poll(self) -> list[SavedCheckpoint]:
        """Checkpoints that became whole since the last call. Called once a step."""
        if self._pending is not None and everywhere(self._pending.writing.done()):
            self._settle()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Wait for what is under way.

        Raises:
            CheckpointError: on all ranks, when the last save failed.
        """
        self._settle()
        for removal in self._removals:
            removal.result()
        self._remover.shutdown()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _begin(self, iteration: int, state: TrainState) -> Writing:
        args = self._args
        # Whether anybody has what others have too, which all ranks must answer alike.
        replicas = args.data_parallel_size * args.context_parallel_size
        writing = Writing(
            self._open(iteration),
            self._content(state),
            fully_parallel=args.ckpt_fully_parallel_save
            and (replicas > 1 or args.meshes is not None),
            background=self._args.async_save,
            validate=not self._validated,
        )
        self._validated = True
        return writing

    def _open(self, iteration: int) -> Path:
        """An empty directory for a checkpoint, which every rank can write."""
        store = self._require_store()
        directory = on_rank_0(lambda: store.begin(iteration))
        usable = os.access(directory, os.W_OK | os.X_OK)
        agree(None if usable else f"{directory} is not visible on this host, or not writable")
        return directory

    def _content(self, state: TrainState) -> dict[str, Any]:
        args = self._args
        metadata = contents.sharding_metadata()
        with_group = contents.with_group(metadata)
        content = contents.model_state(args, state, with_group)
        if not args.no_save_optim:
            model = dict(content)
            content["optimizer"] = contents.optimizer_state(
                state, model, with_group, is_loading=False
            )
            content["scheduler"] = state.scheduler.state_dict()
        if not args.no_save_rng:
            content.update(contents.rng_object())
        content["progress"] = state.progress.state_dict()
        if state.measured_shares is not None:
            content["measured_shares"] = state.measured_shares.state_dict()
        content[contents.METADATA_KEY] = metadata
        return content

    def _settle(self) -> None:
        """Bring the save that is under way to its end, whichever."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.writing.finish()
            path = on_rank_0(lambda: self._publish(pending))
        except CheckpointError as error:
            self._failed(pending.iteration, error)
            return
        self._failure, self._in_place = None, True
        seconds = time.monotonic() - pending.begun
        self._saved.append(SavedCheckpoint(pending.iteration, path, seconds))

    def _publish(self, pending: _Pending) -> Path:
        """On rank 0: the new checkpoint appears, then old ones go, in the background."""
        store = self._require_store()
        path = store.publish(pending.iteration, pending.description)
        retained = self._args.save_retain_interval
        if keep := self._args.keep_last or (1 if retained else None):
            gone = store.superseded(pending.iteration, keep, retained)
            self._removals = [item for item in self._removals if not item.done()]
            self._removals.append(self._remover.submit(store.remove, gone))
        return path

    def _failed(self, iteration: int, error: CheckpointError) -> None:
        if dist.get_rank() == 0:
            self._require_store().abandon(iteration)
        earlier = "the checkpoints saved before it are in place" if self._in_place else None
        self._failure = CheckpointError(
            f"the checkpoint of iteration {iteration} was not saved: {error.message}",
            hint=error.hint or earlier,
        )
        self._warn(self._failure.message)

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise CheckpointError("save is not set: there is no directory for checkpoints")
        return self._store


def _log_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        _log.warning(message)
