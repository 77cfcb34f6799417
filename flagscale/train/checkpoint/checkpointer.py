"""Checkpointer: saves training state in the foreground or background, and loads it.

The trainer calls it. :mod:`.writing` writes the tensors, :mod:`.store` manages the directory of
checkpoints, :mod:`.uploads` uploads to object storage, and :mod:`.loading` loads.
"""

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

from flagscale.config.arguments.spec.paths import staging_directory
from flagscale.errors import CheckpointError
from flagscale.object_storage import Location, parse_location
from flagscale.train.best_evaluation import VALIDATION_LOSS
from flagscale.train.checkpoint import loading, sharded_state
from flagscale.train.checkpoint.chat_template import MANIFEST_KEY, read_chat_template
from flagscale.train.checkpoint.collective_errors import (
    raise_on_all_ranks,
    run_on_rank_0,
    true_on_all_ranks,
)
from flagscale.train.checkpoint.exporter import CheckpointExporter
from flagscale.train.checkpoint.loading import LoadReport
from flagscale.train.checkpoint.sharded_weights import copy_weights_to_owners
from flagscale.train.checkpoint.store import (
    BEST_METRIC_KEY,
    BEST_VALUE_KEY,
    EXTRA_BEST_KEY,
    VALID_LOSS_KEY,
    CheckpointStore,
)
from flagscale.train.checkpoint.uploads import CheckpointUploads, StagedUpload
from flagscale.train.checkpoint.writing import CheckpointWrite
from flagscale.train.optim.hyperparameters import save_schedule
from flagscale.train.state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        iteration: iteration of the training state.
        path: directory or address of the checkpoint.
        save_seconds: time from the start of saving until the checkpoint was complete.
        best: its mark, if its evaluation is the best so far (``save_best``).
    """

    iteration: int
    path: Location
    save_seconds: float
    best: BestCheckpoint | None = None


@dataclass(frozen=True)
class BestCheckpoint:
    """Mark of a checkpoint whose evaluation is the best so far.

    Attributes:
        metric: name of the metric that was evaluated.
        value: its value.
        is_extra: the checkpoint is saved for this reason only, and deleted once there is a better
            one.
    """

    metric: str
    value: float
    is_extra: bool

    def record(self) -> dict[str, Any]:
        """Return metric and value for manifests and status events."""
        if self.metric == VALIDATION_LOSS:
            return {VALID_LOSS_KEY: self.value}
        return {BEST_METRIC_KEY: self.metric, BEST_VALUE_KEY: self.value}

    def manifest_entries(self) -> dict[str, Any]:
        return {**self.record(), EXTRA_BEST_KEY: self.is_extra}


@dataclass
class _PendingSave:
    """A save in progress.

    Attributes:
        iteration: iteration of the training state.
        manifest_entries: entries of the manifest about the run.
        write: the tensors being written.
        start_time: time of the start, of ``time.monotonic``.
        best: set if the validation loss is the lowest so far.
        upload: the upload to object storage, once the tensors are written.
    """

    iteration: int
    manifest_entries: dict[str, Any]
    write: CheckpointWrite
    start_time: float
    best: BestCheckpoint | None = None
    upload: StagedUpload | None = None


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
                checkpoints; or the chat template cannot be read.
        """
        if importlib.util.find_spec("psutil") is None:
            raise CheckpointError(
                "psutil is not installed; megatron.core cannot write checkpoints without it",
                hint="pip install psutil",
            )
        self._args = args
        # Read now, because the file may change during the run.
        self._chat_template = read_chat_template(args) if args.save else None
        self._warn = warn or _log_on_rank_0
        self._store, self._uploads = _open_store(args)
        self._pending_save: _PendingSave | None = None
        self._completed: list[SavedCheckpoint] = []
        self._save_error: CheckpointError | None = None
        self._has_earlier_checkpoint = False
        self._sharding_validated = False
        self._removal_pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-remover")
        self._removals: list[Future[None]] = []
        self._exporter: CheckpointExporter | None = None
        self._kept_for_export: list[Path] = []
        if args.save and args.export_each_checkpoint and dist.get_rank() == 0:
            self._exporter = CheckpointExporter(args)

    def load(self, state: TrainState) -> LoadReport | None:
        """Load the newest complete checkpoint below ``args.load`` into ``state``, in place.

        Returns:
            A report with the skipped checkpoints and the reasons, or None if there is no
            checkpoint.

        Raises:
            CheckpointError: on all ranks, if all checkpoints are damaged, or if the newest one
                belongs to another model or optimizer or cannot be read.
        """
        report = loading.load(self._args, state)
        if report is not None and self._args.load == self._args.save:
            self._has_earlier_checkpoint = True
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
        store, uploads = self._store, self._uploads
        try:
            if uploads is not None:
                is_new = uploads.check_usable()
                uploads.check_staging()
                return is_new
            is_new = run_on_rank_0(lambda: not store.root.exists())
            self._create_directory(0)
        except CheckpointError as error:
            hint = "set save to a directory that every host can write, or to null to save none"
            raise CheckpointError(
                f"save: no checkpoint can be written in {self._args.save}: {error.message}",
                hint=error.hint or hint,
            ) from error
        finally:
            if uploads is None and dist.get_rank() == 0:
                store.abandon(0)
        return is_new

    def save(
        self, state: TrainState, *, required: bool = False, best: BestCheckpoint | None = None
    ) -> None:
        """Save ``state``, after waiting for an earlier save that is still in progress.

        Call it while parameters are up to date
        (:func:`flagscale.train.step.gathered_parameters`). Weights in shards need not be whole.

        With ``args.async_save``, writing continues in the background and :meth:`poll` returns the
        checkpoint once it is complete.

        Args:
            state: the training state.
            required: wait for the end and raise on failure.
            best: marks the checkpoint as the best of the run, once it is complete.

        Raises:
            CheckpointError: on all ranks, if saving fails and ``required`` is set.
        """
        self._finish_pending_save()
        in_background = self._args.async_save and not required
        iteration, start_time = state.progress.iteration, time.monotonic()
        try:
            write = self._start_writing(iteration, state, in_background=in_background)
        except CheckpointError as error:
            self._record_failure(iteration, error)
        else:
            manifest_entries = sharded_state.describe_run(self._args, state)
            if self._chat_template is not None:
                manifest_entries[MANIFEST_KEY] = self._chat_template
            if best is not None:
                manifest_entries.update(best.manifest_entries())
            self._pending_save = _PendingSave(iteration, manifest_entries, write, start_time, best)
            if not in_background:
                self._finish_pending_save()
        if required and self._save_error is not None:
            save_error, self._save_error = self._save_error, None
            raise save_error

    def poll(self) -> list[SavedCheckpoint]:
        """Return the checkpoints completed since the last call. Called once per step."""
        pending = self._pending_save
        if pending is not None and true_on_all_ranks(self._is_stage_done(pending)):
            self._continue_pending_save(pending)
        completed, self._completed = self._completed, []
        return completed

    def pop_export_messages(self) -> list[str]:
        """Return what has happened to exports since the last call; empty except on rank 0."""
        return [] if self._exporter is None else self._exporter.pop_messages()

    def close(self, *, finish_exports: bool = True) -> None:
        """Wait for background saves and deletions, and for exports unless they are to be ended.

        Raises:
            CheckpointError: on all ranks, if the last save failed.
        """
        self._finish_pending_save()
        for removal in self._removals:
            removal.result()
        self._removal_pool.shutdown()
        if self._uploads is not None:
            self._uploads.close()
        if self._exporter is not None:
            self._exporter.close(finish=finish_exports)
            self._remove(self._kept_for_export)
        if self._save_error is not None:
            save_error, self._save_error = self._save_error, None
            raise save_error

    def _start_writing(
        self, iteration: int, state: TrainState, *, in_background: bool
    ) -> CheckpointWrite:
        """Create the directory of a checkpoint, and write it or start to write it. Collective."""
        args = self._args
        # Fully parallel saving distributes replicated tensors, so some rank must have replicas. All
        # ranks must decide the same.
        replica_count = args.data_parallel_size * args.context_parallel_size
        write = CheckpointWrite(
            self._create_directory(iteration),
            self._build_state_dict(state),
            fully_parallel=args.ckpt_fully_parallel_save
            and (replica_count > 1 or args.meshes is not None),
            in_background=in_background,
            validate_sharding=not self._sharding_validated,
            is_staged=self._uploads is not None,
        )
        self._sharding_validated = True
        if self._uploads is not None:
            self._uploads.begin(iteration)
        return write

    def _create_directory(self, iteration: int) -> Path:
        """Create the temporary directory of a checkpoint; check that every rank can write to it."""
        store = self._require_store()
        if self._uploads is not None:
            return self._uploads.create_directory(iteration)
        directory = run_on_rank_0(lambda: store.begin(iteration))
        is_writable = os.access(directory, os.W_OK | os.X_OK)
        raise_on_all_ranks(
            None if is_writable else f"{directory} is not visible on this host, or not writable"
        )
        return directory

    def _build_state_dict(self, state: TrainState) -> dict[str, Any]:
        """Return everything to save as a sharded state dict."""
        args = self._args
        metadata = sharded_state.sharding_metadata()
        group_metadata = sharded_state.add_data_parallel_group(metadata)
        model_state_dict = sharded_state.build_model_state_dict(args, state, group_metadata)
        state_dict = dict(model_state_dict)
        if not args.no_save_optim:
            state_dict["optimizer"] = sharded_state.build_optimizer_state_dict(
                state, model_state_dict, group_metadata, is_loading=False
            )
            state_dict["scheduler"] = save_schedule(state.scheduler)
        copy_weights_to_owners(state.chunks, model_state_dict)
        if not args.no_save_rng:
            state_dict.update(sharded_state.build_rng_state())
        state_dict["progress"] = state.progress.state_dict()
        if state.measured_shares is not None:
            state_dict["measured_shares"] = state.measured_shares.state_dict()
        state_dict["validation"] = state.validation.state_dict()
        state_dict[sharded_state.METADATA_KEY] = metadata
        return state_dict

    def _finish_pending_save(self) -> None:
        """Wait for the save in progress, if any; publish the checkpoint or record the failure."""
        while self._pending_save is not None:
            self._continue_pending_save(self._pending_save)

    def _is_stage_done(self, pending: _PendingSave) -> bool:
        """Return whether this rank has finished its part of the current stage of a save."""
        is_uploaded = self._uploads is None or self._uploads.is_done()
        return is_uploaded and pending.write.is_done()

    def _continue_pending_save(self, pending: _PendingSave) -> None:
        """Wait for the current stage of the save in progress, and start the next one, if any."""
        try:
            path = self._finish_stage(pending)
        except CheckpointError as error:
            self._pending_save = None
            self._record_failure(pending.iteration, error, pending.upload)
            return
        if path is None:
            return
        self._pending_save = None
        for warning in () if pending.upload is None else pending.upload.warnings:
            self._warn(warning)
        self._save_error, self._has_earlier_checkpoint = None, True
        seconds = time.monotonic() - pending.start_time
        self._completed.append(SavedCheckpoint(pending.iteration, path, seconds, pending.best))

    def _finish_stage(self, pending: _PendingSave) -> Location | None:
        """Finish a stage of a save; return the checkpoint if it was the last one."""
        if pending.upload is not None:
            return pending.upload.advance()
        pending.write.finish()
        if self._uploads is None:
            return run_on_rank_0(lambda: self._publish(pending))
        publication = {
            "is_best": pending.best is not None,
            "keep_count": self._keep_count,
            "retain_interval": self._args.save_retain_interval,
        }
        pending.upload = self._uploads.start(
            pending.iteration, pending.write, pending.manifest_entries, publication
        )
        return None

    @property
    def _keep_count(self) -> int | None:
        """Number of newest checkpoints to keep; None for all."""
        keep_last: int | None = self._args.keep_last
        return keep_last or (1 if self._args.save_retain_interval else None)

    def _publish(self, pending: _PendingSave) -> Path:
        """Publish a checkpoint, then delete superseded ones in the background (rank 0)."""
        store = self._require_store()
        path = store.publish(pending.iteration, pending.manifest_entries)
        superseded = list(self._kept_for_export)
        if pending.best is not None:
            try:
                superseded += store.mark_best(pending.iteration)
            except OSError as error:
                reason = error.strerror or str(error)
                self._warn(f"{path.name} is the best checkpoint, but cannot be marked: {reason}")
        if keep_count := self._keep_count:
            superseded += store.list_superseded(
                pending.iteration, keep_count, self._args.save_retain_interval
            )
        if self._exporter is not None:
            # One that is still being exported is deleted later.
            source = self._exporter.source
            self._kept_for_export = [source] if source is not None and source in superseded else []
            superseded = [item for item in dict.fromkeys(superseded) if item != source]
            self._exporter.start(pending.iteration)
        if superseded:
            self._removals = [item for item in self._removals if not item.done()]
            self._removals.append(self._removal_pool.submit(self._remove, superseded))
        return path

    def _remove(self, paths: list[Path]) -> None:
        """Delete checkpoints and their exports."""
        self._require_store().remove(paths)
        if self._exporter is not None:
            self._exporter.remove(paths)

    def _record_failure(
        self, iteration: int, error: CheckpointError, upload: StagedUpload | None = None
    ) -> None:
        """Delete the incomplete checkpoint, keep the error for later, and warn the user.

        A checkpoint that was written and not uploaded stays in the staging directory.
        """
        store = self._require_store()
        if self._uploads is not None:
            self._uploads.abandon(iteration)
        elif dist.get_rank() == 0:
            store.abandon(iteration)
        if upload is not None:
            error = CheckpointError(
                f"{error.message}; its files stay in {store.path(iteration)} of each host until "
                "the next save",
                hint=error.hint,
            )
        fallback_hint = (
            "the checkpoints saved before it are in place" if self._has_earlier_checkpoint else None
        )
        self._save_error = CheckpointError(
            f"the checkpoint of iteration {iteration} was not saved: {error.message}",
            hint=error.hint or fallback_hint,
        )
        self._warn(self._save_error.message)

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise CheckpointError("save is not set: there is no directory for checkpoints")
        return self._store


def _open_store(
    args: argparse.Namespace,
) -> tuple[CheckpointStore | None, CheckpointUploads | None]:
    """Return the local directory of checkpoints, and the uploads from it to an address."""
    if not args.save:
        return None, None
    location = parse_location(args.save)
    if isinstance(location, Path):
        return CheckpointStore(location), None
    staging = CheckpointStore(staging_directory(vars(args)))
    return staging, CheckpointUploads(location, staging)


def _log_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        _log.warning(message)
