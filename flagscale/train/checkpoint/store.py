"""Writing below a directory of checkpoints: publishing, retention, cleanup of incomplete ones.

The module needs neither torch nor a process group: one rank changes the directory on behalf of
all. Readers use :class:`flagscale.checkpoints.CheckpointDirectory`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flagscale.checkpoints import (
    BEST_LINK,
    MANIFEST_FILE,
    REQUIRED_FILES,
    TRACKER_FILE,
    CheckpointDirectory,
    check_complete,
    compute_seal,
    hash_file,
)
from flagscale.errors import CheckpointError
from flagscale.files import fsync_path

_LEFTOVER = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)")
_MANIFEST_VERSION = 1
VALID_LOSS_KEY = "valid_loss"
"""Key of the manifest: the validation loss of a checkpoint that was the best when it was saved."""
BEST_METRIC_KEY, BEST_VALUE_KEY = "best_metric", "best_value"
"""Keys of the manifest in its place: name and value of the metric, if it is not the validation
loss."""
EXTRA_BEST_KEY = "extra_best"
"""Key of the manifest: the checkpoint was saved only because it was the best."""

_Place = TypeVar("_Place")
"""Path or address of a checkpoint."""


def find_replaced_best(
    previous: int | None,
    iteration: int,
    locate: Callable[[int], _Place],
    read_entries: Callable[[_Place], Mapping[str, Any]],
) -> list[_Place]:
    """Return the checkpoint that was the best before another one, if it was saved for this reason
    only.

    Args:
        previous: iteration of the best checkpoint before, or None if there was none.
        iteration: iteration of the best one.
        locate: returns the place of a checkpoint.
        read_entries: returns the entries of a checkpoint's manifest, or raises CheckpointError.
    """
    if previous is None or previous >= iteration:
        return []
    path = locate(previous)
    try:
        return [path] if read_entries(path).get(EXTRA_BEST_KEY) else []
    except CheckpointError:
        return []


class CheckpointStore(CheckpointDirectory):
    """Directory of checkpoints that a run saves into."""

    def __init__(self, root: Path) -> None:
        """Create it; nothing is written."""
        super().__init__(root)
        self._removed_now: set[Path] = set()
        """Directories that another thread deletes at the moment, which may take seconds."""

    def partial_directory(self, iteration: int) -> Path:
        """Return the temporary directory of an incomplete checkpoint."""
        return self.root / f".iter_{iteration:07d}.partial"

    def begin(self, iteration: int, *, resume: bool = False) -> Path:
        """Create the temporary directory for the checkpoint of an iteration.

        Args:
            iteration: iteration of the checkpoint.
            resume: keep the files that an interrupted writer left in the directory.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.partial_directory(iteration)
        self.remove_leftovers(kept_directory=directory if resume else None)
        directory.mkdir(exist_ok=resume)
        return directory

    def abandon(self, iteration: int) -> None:
        """Delete the temporary directory of a checkpoint that failed."""
        shutil.rmtree(self.partial_directory(iteration), ignore_errors=True)

    def publish(self, iteration: int, manifest_entries: Mapping[str, Any]) -> Path:
        """Publish a complete checkpoint: write its manifest, rename it, update the tracker file.

        Args:
            iteration: iteration of the checkpoint.
            manifest_entries: entries of the manifest about the run.

        Returns:
            The final directory.
        """
        temporary_directory, final_directory = (
            self.partial_directory(iteration),
            self.path(iteration),
        )
        write_manifest(temporary_directory, {"iteration": iteration, **manifest_entries})
        fsync_path(temporary_directory)
        replaced_directory = self.root / f".{final_directory.name}.replaced"
        # The tracker is written before the rename and takes effect after it, so that a disk that
        # fills up in between does no harm.
        tracker = _write_synced(self.root / f".{TRACKER_FILE}.new", f"{iteration}\n")
        # The run went back to an earlier checkpoint and reached this iteration again.
        if final_directory.exists():
            final_directory.rename(replaced_directory)
        temporary_directory.rename(final_directory)
        tracker.replace(self.root / TRACKER_FILE)
        fsync_path(self.root)
        shutil.rmtree(replaced_directory, ignore_errors=True)
        return final_directory

    def mark_best(self, iteration: int) -> list[Path]:
        """Mark a complete checkpoint as the best one, by the symbolic link ``best``.

        Returns:
            The checkpoint that was the best before, if it was saved for this reason only.

        Raises:
            OSError: the link cannot be written.
        """
        previous = self.best_iteration()
        link = self.root / f".{BEST_LINK}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(iteration).name)
        link.replace(self.root / BEST_LINK)
        fsync_path(self.root)
        return find_replaced_best(
            previous,
            iteration,
            self.path,
            lambda path: check_complete(path, verify_without_manifest=False),
        )

    def remove(self, paths: Iterable[Path]) -> None:
        """Delete checkpoints. Each is renamed first, so that no half-deleted one is visible."""
        for path in paths:
            hidden = self.root / f".{path.name}.removed"
            self._removed_now.add(hidden)
            try:
                path.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)
            except OSError:
                pass  # another process removed the checkpoint
            finally:
                self._removed_now.remove(hidden)

    def remove_leftovers(self, kept_directory: Path | None = None) -> None:
        """Delete half-written or half-deleted directories of a killed run, except one.

        Those that :meth:`remove` deletes at the moment are left to it.
        """
        for item in list(self.root.iterdir()) if self.root.is_dir() else ():
            match = _LEFTOVER.fullmatch(item.name)
            if match is None or item == kept_directory or item in self._removed_now:
                continue
            if match[2] == "replaced" and not (self.root / match[1]).exists():
                # the run was killed between the two renames of publish
                item.rename(self.root / match[1])
            else:
                shutil.rmtree(item, ignore_errors=True)


def write_manifest(path: Path, manifest_entries: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint; see :func:`format_manifest`."""
    file_sizes = {
        item.relative_to(path).as_posix(): item.stat().st_size
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }
    digests = {name: hash_file(path / name) for name in REQUIRED_FILES if name in file_sizes}
    _write_synced(path / MANIFEST_FILE, format_manifest(manifest_entries, file_sizes, digests))


def format_manifest(
    manifest_entries: Mapping[str, Any], file_sizes: Mapping[str, int], digests: Mapping[str, str]
) -> str:
    """Return the text of a manifest.

    It holds ``manifest_entries``, the size of each file, the SHA-256 of the small files, and a seal
    (hash) of all that. Tensors have CRC-32 checksums in their own files (:mod:`.checksums`);
    hashing them here would take as long as reading them.
    """
    manifest = {
        "version": _MANIFEST_VERSION,
        **manifest_entries,
        "files": dict(file_sizes),
        "digests": dict(digests),
    }
    return json.dumps({**manifest, "seal": compute_seal(manifest)}, indent=1) + "\n"


def _write_synced(path: Path, text: str) -> Path:
    """Write a small file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path
