"""Uploads of a rank's checkpoints to object storage, behind training.

Each rank writes its part of a checkpoint to a staging directory of its host, in the format of a
checkpoint on disk. Then the checkpoint goes through stages, between which ranks train on:

1. Rank 0 marks the checkpoint as incomplete in the storage, while all ranks write their files.
2. Every rank uploads the files that it wrote.
3. Rank 0 compares the sizes of all objects with the manifest, and uploads the manifest.

A process per rank transfers (:mod:`.upload_worker`). The staged copy of the newest checkpoint stays
until the next save, for a restart on the same host.
"""

from __future__ import annotations

import json
import secrets
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flagscale.checkpoints import MANIFEST_FILE, REQUIRED_FILES, hash_file
from flagscale.errors import CheckpointError
from flagscale.files import make_private_directory, require_private, write_atomic
from flagscale.object_storage import StorageAddress
from flagscale.train.checkpoint.collective_errors import (
    describe_error,
    raise_on_all_ranks,
    run_on_rank_0,
)
from flagscale.train.checkpoint.store import CheckpointStore, format_manifest
from flagscale.train.checkpoint.writing import CheckpointWrite
from flagscale.train.distributed import RankIdentity, gather_from_ranks

_MODULE = "flagscale.train.checkpoint.upload_worker"
SAVE_ID_KEY = "save_id"
"""Key of the manifest: random name of the save, which a staged copy of it shares."""


class UploadProcess:
    """The process that transfers files of this rank. It is started when it is needed first, and
    again if it was killed.
    """

    def __init__(self, address: StorageAddress) -> None:
        self._address = address
        self._process: subprocess.Popen[str] | None = None
        self._is_waiting = False

    def send(self, op: str, **values: Any) -> None:
        """Send a request; :meth:`receive` returns its result."""
        assert not self._is_waiting, "a request is in progress"
        self._is_waiting = True
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed between two requests
        with suppress(OSError):  # a process that has ended is reported by receive
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(self._address)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"op": op, **values}) + "\n")
            self._process.stdin.flush()

    def is_done(self) -> bool:
        """Return whether no request is in progress, so that :meth:`receive` does not wait."""
        if not self._is_waiting or self._process is None:
            return True
        output = self._process.stdout
        return output is None or bool(select.select([output], [], [], 0)[0])

    def receive(self) -> Any:
        """Wait for the reply to the request in progress; None if there is none.

        Raises:
            CheckpointError: the request failed, or the process was killed.
        """
        if not self._is_waiting:
            return None
        self._is_waiting = False
        line = ""
        if self._process is not None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            self._end()
            raise CheckpointError(f"the process that uploads to {self._address} has ended")
        reply = json.loads(line)
        if "error" in reply:
            raise CheckpointError(reply["error"], hint=reply.get("hint"))
        return reply["result"]

    def close(self) -> None:
        """End the process."""
        if self._is_waiting:
            with suppress(CheckpointError):
                self.receive()
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # Processes that the rank has forked keep stdin open.
            with suppress(OSError, ValueError):
                process.communicate(json.dumps({"op": "end"}) + "\n")
            process.wait()


class CheckpointUploads:
    """Saves of a run in object storage. All ranks call all methods at the same points."""

    def __init__(self, address: StorageAddress, staging: CheckpointStore) -> None:
        """Prepare uploads; nothing is requested yet.

        Args:
            address: the address of the checkpoints (``save``).
            staging: the staging directory.
        """
        self.address = address
        self._staging = staging
        self._process = UploadProcess(address)
        self._is_host_leader = RankIdentity.from_environment().local_rank == 0

    def check_usable(self) -> bool:
        """Check on each host that the storage can be listed and written.

        Returns:
            Whether it contains no checkpoint yet.

        Raises:
            CheckpointError: on all ranks, if a host cannot use the storage.
        """
        if self._is_host_leader:
            self._process.send("check")
        reply = self._receive_on_all_ranks()
        return run_on_rank_0(lambda: bool(reply["is_new"]))

    def check_staging(self) -> None:
        """Check that each host can write the staging directory. A staged copy there remains.

        Raises:
            CheckpointError: on all ranks, if a host cannot.
        """
        raise_on_all_ranks(self._prepare_staging())

    def create_directory(self, iteration: int) -> Path:
        """Create the temporary directory of a checkpoint on each host.

        The staged copy of an earlier checkpoint is deleted.

        Raises:
            CheckpointError: on all ranks, if it cannot be created on a host.
        """
        directory = self._staging.partial_directory(iteration)
        error = self._prepare_staging()
        if error is None and self._is_host_leader:
            self._delete_copies()
        raise_on_all_ranks(error)
        try:
            directory.mkdir(exist_ok=True)
        except OSError as problem:
            error = describe_error(problem)
        raise_on_all_ranks(error)
        return directory

    def begin(self, iteration: int) -> None:
        """Mark a checkpoint as incomplete in the storage, in the background."""
        if dist.get_rank() == 0:
            self._process.send("begin", iteration=iteration)

    def abandon(self, iteration: int) -> None:
        """Delete the temporary directory of a checkpoint on each host."""
        with suppress(CheckpointError):
            self._process.receive()
        if self._is_host_leader:
            self._staging.abandon(iteration)

    def is_done(self) -> bool:
        """Return whether this rank's transfers of the current stage have ended."""
        return self._process.is_done()

    def start(
        self,
        iteration: int,
        write: CheckpointWrite,
        manifest_entries: dict[str, Any],
        publication: dict[str, Any],
    ) -> StagedUpload:
        """Start to upload the files of a checkpoint that all ranks have written.

        Args:
            iteration: iteration of the checkpoint.
            write: the files, after ``write.finish()``.
            manifest_entries: entries of the manifest about the run.
            publication: what :class:`.upload_worker.UploadWorker` does once it is complete:
                ``is_best``, ``keep_count`` and ``retain_interval``.

        Raises:
            CheckpointError: on all ranks, if the storage could not be prepared.
        """
        self._receive_on_all_ranks()
        files = write.measure_files()
        files_by_rank: list[dict[str, int]] = gather_from_ranks(files)
        partial = self._staging.partial_directory(iteration)

        def build_manifest() -> str:
            sizes = {name: size for files in files_by_rank for name, size in files.items()}
            entries = {
                "iteration": iteration,
                SAVE_ID_KEY: secrets.token_hex(16),
                **manifest_entries,
            }
            digests = {name: hash_file(partial / name) for name in REQUIRED_FILES}
            return format_manifest(entries, dict(sorted(sizes.items())), digests)

        manifest_text = run_on_rank_0(build_manifest)
        if self._is_host_leader:
            with suppress(OSError):  # hosts may share the directory, and one comes first
                write_atomic(partial / MANIFEST_FILE, manifest_text)
                partial.rename(self._staging.path(iteration))
        raise_on_all_ranks(None)  # the directory has its name on all ranks
        self._process.send(
            "upload",
            iteration=iteration,
            directory=str(self._staging.path(iteration)),
            names=list(files),
        )
        publication = {**publication, "iteration": iteration, "manifest": manifest_text}
        return StagedUpload(self._process, publication)

    def close(self) -> None:
        """End the process of this rank."""
        self._process.close()

    def _prepare_staging(self) -> str | None:
        """Create the staging directory; return the problem if other users could change it."""
        root = self._staging.root
        try:
            make_private_directory(root)
            require_private(root)
        except OSError as error:
            return f"save_staging_dir: {describe_error(error)}"
        return None

    def _delete_copies(self) -> None:
        self._staging.remove_leftovers()
        for iteration in self._staging.iterations():
            shutil.rmtree(self._staging.path(iteration), ignore_errors=True)

    def _receive_on_all_ranks(self) -> Any:
        return _receive_on_all_ranks(self._process)


class StagedUpload:
    """Upload of one checkpoint. All ranks call :meth:`advance` at the same points."""

    def __init__(self, process: UploadProcess, publication: dict[str, Any]) -> None:
        self._process = process
        self._publication: dict[str, Any] | None = publication
        self.warnings: list[str] = []
        """Problems that do not concern the checkpoint itself; on rank 0."""

    def advance(self) -> StorageAddress | None:
        """Wait for the current stage on all ranks and start the next one.

        Returns:
            The address of the checkpoint once it is complete, otherwise None.

        Raises:
            CheckpointError: on all ranks, if the stage failed on any rank.
        """
        reply = _receive_on_all_ranks(self._process)
        if self._publication is not None:
            publication, self._publication = self._publication, None
            if dist.get_rank() == 0:
                self._process.send("publish", **publication)
            return None
        if reply is not None:
            self.warnings = reply["warnings"]
        return StorageAddress(run_on_rank_0(lambda: str(reply["address"])))


def _receive_on_all_ranks(process: UploadProcess) -> Any:
    """Return the result of this rank's request; raise on all ranks if any rank's failed."""
    reply, error = None, None
    try:
        reply = process.receive()
    except CheckpointError as problem:
        error = problem.message + (f" ({problem.hint})" if problem.hint else "")
    raise_on_all_ranks(error)
    return reply


def find_staged_copy(staging: Path | None, name: str, manifest: bytes) -> Path | None:
    """Return the staged copy of a checkpoint on this host, if it is of the same save.

    Args:
        staging: the staging directory, or None.
        name: name of the checkpoint's directory.
        manifest: the manifest in object storage.
    """
    if staging is None:
        return None
    path = staging / name
    try:
        require_private(staging)
        is_same = (path / MANIFEST_FILE).read_bytes() == manifest
    except OSError:
        return None
    return path if is_same else None
