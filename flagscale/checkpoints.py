"""Checkpoint directories: their names, their manifests, and the checkpoint that a run would load.

Used by the ranks when they load and by the launcher before it starts anything. Torch is imported
only for a checkpoint without a manifest, that is, one written by another program.

    python -m flagscale.checkpoints DIRECTORY

prints one line of JSON for the preflight of a host: see :func:`describe_latest`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.errors import CheckpointError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Tracker file, as in Megatron-LM: contains the iteration of the newest checkpoint."""
MANIFEST_FILE = "manifest.json"
"""Manifest in a checkpoint's directory: sizes and checksums of its files, and a seal (a checksum of
the manifest itself).
"""
DIRECTORY_PATTERN = r"iter_([0-9]{7,})"
"""Name of a checkpoint's directory, as a regular expression that Python and bash both accept."""
BEST_LINK = "best"
"""Symbolic link to the checkpoint with the lowest validation loss (``save_best``)."""
_INDEX_FILE = ".metadata"
REQUIRED_FILES = ("metadata.json", _INDEX_FILE, "common.pt")
"""Small files that every checkpoint has in addition to its tensors. Every rank reads them
completely.
"""


@dataclass(frozen=True)
class LatestCheckpoint:
    """Checkpoint to load.

    ``content`` is its manifest, empty if it has none. ``skipped`` are the checkpoints that were
    skipped, with reasons.
    """

    path: Path
    iteration: int
    content: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


class CheckpointDirectory:
    """The checkpoints below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, iteration: int) -> Path:
        """Return the directory of an iteration's checkpoint, whether it exists or not."""
        return self.root / f"iter_{iteration:07d}"

    def iterations(self) -> list[int]:
        """Return the iterations that have a directory, complete or not, newest first."""
        if not self.root.is_dir():
            return []
        matches = (
            re.fullmatch(DIRECTORY_PATTERN, item.name)
            for item in self.root.iterdir()
            if item.is_dir()
        )
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def find_latest(self, *, verify_without_manifest: bool = True) -> LatestCheckpoint | None:
        """Return the newest complete checkpoint up to the iteration in the tracker file.

        Writing an older iteration into the tracker file makes a run go back to it. A directory that
        is a checkpoint itself, such as ``checkpoints/best`` or ``checkpoints/iter_0000100``, names
        this checkpoint.

        Args:
            verify_without_manifest: see :func:`check_complete`.

        Returns:
            None if the directory holds no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none is complete.
        """
        if (self.root / _INDEX_FILE).is_file():
            return _read_named(self.root, verify_without_manifest=verify_without_manifest)
        tracked_iteration, remark = self._read_tracker()
        skipped = [remark] if remark else []
        for iteration in self.iterations():
            path = self.path(iteration)
            if tracked_iteration is not None and iteration > tracked_iteration:
                skipped.append(f"{path.name}: newer than {TRACKER_FILE} says ({tracked_iteration})")
                continue
            try:
                content = check_complete(path, verify_without_manifest=verify_without_manifest)
            except CheckpointError as error:
                skipped.append(f"{path.name}: {error.message}")
                continue
            if (
                tracked_iteration is not None
                and iteration < tracked_iteration
                and not self.path(tracked_iteration).exists()
            ):
                skipped.append(
                    f"{self.path(tracked_iteration).name}: missing, although "
                    f"{TRACKER_FILE} names it"
                )
            return LatestCheckpoint(path, iteration, content, tuple(skipped))
        if not skipped:
            return None
        skipped_lines = "\n  ".join(skipped)
        raise CheckpointError(
            f"{self.root}: holds no whole checkpoint:\n  {skipped_lines}",
            hint="remove the damaged directories to start from step 0, or load from elsewhere",
        )

    def best_iteration(self) -> int | None:
        """Return the iteration that the link :data:`BEST_LINK` names; None without a link to an
        existing checkpoint.
        """
        try:
            match = re.fullmatch(DIRECTORY_PATTERN, (self.root / BEST_LINK).readlink().name)
        except OSError:
            return None
        return int(match[1]) if match and self.path(int(match[1])).is_dir() else None

    def _read_tracker(self) -> tuple[int | None, str | None]:
        """Return the iteration in the tracker file, and a remark if it holds something else."""
        try:
            text = (self.root / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        if text.isdecimal():
            return int(text), None
        return None, f"{TRACKER_FILE}: holds {text[:40]!r}, expected an iteration; not followed"


def _read_named(root: Path, *, verify_without_manifest: bool) -> LatestCheckpoint:
    """Return the checkpoint that a directory is."""
    path = root.resolve()
    content = check_complete(path, verify_without_manifest=verify_without_manifest)
    match = re.fullmatch(DIRECTORY_PATTERN, path.name)
    iteration = content.get("iteration", match and int(match[1]))
    if iteration is None:
        raise CheckpointError(
            f"{root}: neither its name nor a {MANIFEST_FILE} states its iteration",
            hint="rename the directory to iter_<7 digits>",
        )
    return LatestCheckpoint(path, int(iteration), content)


def check_complete(path: Path, *, verify_without_manifest: bool = True) -> dict[str, Any]:
    """Check the size of every file of a checkpoint and the SHA-256 of the small ones.

    A checkpoint without a manifest, written by Megatron-LM itself, is checked for the required
    files and for the file sizes that its ``.metadata`` implies. That imports torch, and is skipped
    if ``verify_without_manifest`` is false.

    Returns:
        The manifest without its file list, checksums and seal; empty if there is no manifest.

    Raises:
        CheckpointError: names the first file that is missing, has another size or was changed.
    """
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        seal = manifest.pop("seal", None)
        is_changed = seal not in (None, compute_seal(manifest))
        digests = dict(manifest.pop("digests", {}))
        sizes = {str(name): int(size) for name, size in manifest.pop("files").items()}
    except FileNotFoundError:
        if verify_without_manifest:
            _check_without_manifest(path)
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if is_changed:
        raise CheckpointError(f"{MANIFEST_FILE} is not as it was written")
    for name, size in sizes.items():
        _check_size(path, name, size, exact=True)
    for name, expected_digest in digests.items():
        if hash_file(path / name) != expected_digest:
            raise CheckpointError(f"{name} is not as it was written: its SHA-256 differs")
    return dict(manifest)


def _check_without_manifest(path: Path) -> None:
    for name in REQUIRED_FILES:
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing, and there is no {MANIFEST_FILE}")
    from flagscale.checkpoint_metadata import read_metadata

    storage = read_metadata(path).storage_data
    expected_sizes: dict[str, int] = {}
    for item in storage.values():
        end = item.offset + item.length
        expected_sizes[item.relative_path] = max(end, expected_sizes.get(item.relative_path, 0))
    for name, size in expected_sizes.items():
        _check_size(path, name, size, exact=False)


def _check_size(path: Path, name: str, size: int, *, exact: bool) -> None:
    try:
        actual = (path / name).stat().st_size
    except OSError:
        raise CheckpointError(f"{name} is missing") from None
    if actual < size or (exact and actual != size):
        raise CheckpointError(f"{name} has {actual} bytes, expected {size}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a small file, in hexadecimal.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def compute_seal(manifest: Mapping[str, Any]) -> str:
    """Return a manifest's seal: the SHA-256 of its values, in hexadecimal."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def describe_latest(directory: str) -> dict[str, Any]:
    """Describe the checkpoint that the ranks would load from a directory.

    Returns:
        ``path``, ``iteration``, ``content`` and ``skipped`` of the checkpoint; ``refused`` and
        ``hint`` if loading would fail; an empty dictionary if there is no checkpoint.
    """
    try:
        checkpoint = CheckpointDirectory(Path(directory)).find_latest()
    except CheckpointError as error:
        return {"refused": error.message, "hint": error.hint}
    except OSError as error:
        return {"refused": str(error)}
    return {} if checkpoint is None else {**vars(checkpoint), "path": str(checkpoint.path)}


def main(argv: Sequence[str]) -> int:
    """Print :func:`describe_latest` of the directory in ``argv`` as JSON; return the exit code."""
    print(json.dumps(describe_latest(*argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
