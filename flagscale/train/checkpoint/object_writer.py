"""Writing of checkpoints in object storage: uploads, publication, retention.

Object storage cannot rename, so a checkpoint is complete once its manifest is there, which is
written last, and no longer complete once its manifest is deleted, which happens first. A mark
(:data:`flagscale.checkpoints.PARTIAL_MARK`) exists in between, so that readers ignore what an
interrupted upload or deletion left, and the next one deletes it.

The module needs neither torch nor a process group. Processes of :mod:`.upload_worker` use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flagscale.checkpoints import (
    BEST_LINK,
    MANIFEST_FILE,
    PARTIAL_MARK,
    TRACKER_FILE,
    StoredCheckpoints,
    compare_size,
    match_iterations,
    parse_manifest,
)
from flagscale.object_storage import StorageAddress
from flagscale.train.checkpoint.store import find_replaced_best


class StoredCheckpointWriter(StoredCheckpoints):
    """Checkpoints in object storage that a run saves. All methods raise CheckpointError."""

    def begin(self, iteration: int) -> None:
        """Prepare the upload of a checkpoint: mark it as incomplete, and delete an earlier one.

        One rank calls it before any rank uploads.
        """
        self.refresh()
        path = self.path(iteration)
        self.store.write(path / PARTIAL_MARK, b"")
        # The run went back to an earlier checkpoint and reached this iteration again.
        self._delete_objects(path, self.files(path.name))
        self.remove(self.path(other) for other in self._partial_iterations() if other != iteration)

    def upload(self, iteration: int, directory: Path, names: Iterable[str]) -> None:
        """Upload files of a checkpoint from a local directory."""
        path = self.path(iteration)
        for name in names:
            self.store.upload(directory / name, path / name)

    def publish(self, iteration: int, manifest_text: str) -> StorageAddress:
        """Publish a checkpoint whose files are uploaded: write the tracker file and the manifest.

        Returns:
            The address of the checkpoint.
        """
        self.refresh()
        path = self.path(iteration)
        uploaded_sizes = self.files(path.name)
        for name, size in parse_manifest(manifest_text).sizes.items():
            compare_size(name, uploaded_sizes.get(name), size, exact=True)
        # In this order the newest complete checkpoint is loaded whenever this is interrupted.
        self.store.write(self.root / TRACKER_FILE, f"{iteration}\n".encode())
        self.store.write(path / MANIFEST_FILE, manifest_text.encode())
        self.store.delete([path / PARTIAL_MARK])
        self.refresh()
        return path

    def mark_best(self, iteration: int) -> list[StorageAddress]:
        """Mark a complete checkpoint as the best one.

        Returns:
            The checkpoint that was the best before, if it was saved for this reason only.
        """
        previous = self.best_iteration()
        self.store.write(self.root / BEST_LINK, f"{self.path(iteration).name}\n".encode())
        self.refresh()
        return find_replaced_best(
            previous, iteration, self.path, lambda path: self.read_manifest(path).entries
        )

    def remove(self, paths: Iterable[StorageAddress]) -> None:
        """Delete checkpoints. A half-deleted one is marked as incomplete."""
        for path in paths:
            names = self.files(path.name)
            self.store.write(path / PARTIAL_MARK, b"")
            self._delete_objects(path, names)
            self.store.delete([path / PARTIAL_MARK])
            self.store.delete_directory(path)
        self.refresh()

    def _delete_objects(self, path: StorageAddress, names: Iterable[str]) -> None:
        """Delete the objects of a marked checkpoint, the manifest first."""
        names = [name for name in names if name != PARTIAL_MARK]
        if MANIFEST_FILE in names:
            self.store.delete([path / MANIFEST_FILE])
        self.store.delete([path / name for name in names if name != MANIFEST_FILE])

    def _partial_iterations(self) -> Sequence[int]:
        """Return the iterations that an interrupted upload or deletion has left."""
        names = {key.partition("/")[0] for key in self.sizes if key.endswith(f"/{PARTIAL_MARK}")}
        return match_iterations(name for name in names if self.is_partial(name))
