"""Writing below a directory of checkpoints: publishing, retention, cleanup of incomplete ones.

Needs neither torch nor a process group: one rank changes the directory on behalf of all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flagscale.checkpoints import (
    MANIFEST,
    REQUIRED,
    TRACKER,
    CheckpointDirectory,
    check_complete,
    compute_seal,
    hash_file,
)
from flagscale.errors import CheckpointError
from flagscale.files import fsync_path

_LEFTOVER = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)")
_MANIFEST_VERSION = 1


class CheckpointStore(CheckpointDirectory):
    """Directory of checkpoints that a run saves into."""

    def partial_directory(self, iteration: int) -> Path:
        """Return the temporary directory of an incomplete checkpoint."""
        return self.root / f".iter_{iteration:07d}.partial"

    def begin(self, iteration: int, *, resume: bool = False) -> Path:
        """Create the temporary directory for the checkpoint of an iteration.

        Args:
            resume: keep the files that an interrupted writer left in it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.partial_directory(iteration)
        self._remove_leftovers(keep=directory if resume else None)
        directory.mkdir(exist_ok=resume)
        return directory

    def abandon(self, iteration: int) -> None:
        """Delete the temporary directory of a checkpoint that failed."""
        shutil.rmtree(self.partial_directory(iteration), ignore_errors=True)

    def publish(self, iteration: int, content: Mapping[str, Any]) -> Path:
        """Publish a complete checkpoint: write its manifest, rename it, update the tracker file."""
        partial, final = self.partial_directory(iteration), self.path(iteration)
        write_manifest(partial, {"iteration": iteration, **content})
        fsync_path(partial)
        replaced = self.root / f".{final.name}.replaced"
        # Written before and renamed after, so that a disk that fills up in between does no harm.
        tracker = _write_synced(self.root / f".{TRACKER}.new", f"{iteration}\n")
        if final.exists():  # training went back and reached this iteration again
            final.rename(replaced)
        partial.rename(final)
        tracker.replace(self.root / TRACKER)
        fsync_path(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def list_superseded(self, newest: int, keep: int, retained: int | None = None) -> list[Path]:
        """List the checkpoints that may be deleted once ``newest`` is complete.

        Checkpoints newer than ``newest`` (after training went back) are never listed.

        Args:
            newest: iteration of the checkpoint that was just published.
            keep: number of newest complete checkpoints to keep, including ``newest``.
            retained: keep every checkpoint whose iteration is a multiple of this.
        """
        kept_count = 1
        removable = []
        for iteration in self.iterations():
            if iteration >= newest or (retained and iteration % retained == 0):
                continue
            path = self.path(iteration)
            if kept_count < keep and _is_complete(path):
                kept_count += 1
            elif kept_count >= keep:
                removable.append(path)
        return removable

    def remove(self, paths: Iterable[Path]) -> None:
        """Delete checkpoints. Each is renamed first, so that none is visible while half deleted."""
        for path in paths:
            hidden = self.root / f".{path.name}.removed"
            try:
                path.rename(hidden)
            except OSError:
                continue  # another process removed it
            shutil.rmtree(hidden, ignore_errors=True)

    def _remove_leftovers(self, keep: Path | None = None) -> None:
        """Delete half-written or half-deleted directories of a killed run, except ``keep``."""
        for item in list(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(item.name)
            if match is None or item == keep:
                continue
            if match[2] == "replaced" and not (self.root / match[1]).exists():
                item.rename(self.root / match[1])  # killed between the two renames
            else:
                shutil.rmtree(item, ignore_errors=True)


def _is_complete(path: Path) -> bool:
    try:
        check_complete(path)
    except CheckpointError:
        return False
    return True


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest: ``content``, the size of each file, and the SHA-256 of the small files.

    Tensors have CRC-32 checksums in their own files (:mod:`.checksums`). Hashing them here would
    take as long as reading them.
    """
    files = {
        item.relative_to(path).as_posix(): item.stat().st_size
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }
    digests = {name: hash_file(path / name) for name in REQUIRED if name in files}
    manifest = {"version": _MANIFEST_VERSION, **content, "files": files, "digests": digests}
    sealed = {**manifest, "seal": compute_seal(manifest)}
    _write_synced(path / MANIFEST, json.dumps(sealed, indent=1) + "\n")


def _write_synced(path: Path, text: str) -> Path:
    """Write a small file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path
