"""Checkpoint directories: their names, their manifests, and the checkpoint that a run would load.

A directory of checkpoints is on disk or in object storage; :func:`open_checkpoints` opens either.

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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from flagscale.errors import CheckpointError
from flagscale.object_storage import ObjectStore, StorageAddress, parse_location

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Tracker file, as in Megatron-LM: contains the iteration of the newest checkpoint."""
MANIFEST_FILE = "manifest.json"
"""Manifest in a checkpoint's directory: sizes and checksums of its files, and a seal (a checksum of
the manifest itself).
"""
DIRECTORY_PATTERN = r"iter_([0-9]{7,})"
"""Name of a checkpoint's directory, as a regular expression that Python and bash both accept."""
BEST_LINK = "best"
"""Symbolic link to the checkpoint with the lowest validation loss (``save_best``). In object
storage, an object that contains the name of that checkpoint.
"""
PARTIAL_MARK = ".partial"
"""Object of a checkpoint in object storage that is being uploaded or deleted."""
_INDEX_FILE = ".metadata"
REQUIRED_FILES = ("metadata.json", _INDEX_FILE, "common.pt")
"""Small files that every checkpoint has in addition to its tensors. Every rank reads them
completely.
"""


L = TypeVar("L", Path, StorageAddress)


@dataclass(frozen=True)
class LatestCheckpoint(Generic[L]):
    """Checkpoint to load.

    ``content`` is its manifest, empty if it has none. ``skipped`` are the checkpoints that were
    skipped, with reasons.
    """

    path: L
    iteration: int
    content: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


class Checkpoints(ABC, Generic[L]):
    """The checkpoints below one directory, on disk or in object storage."""

    root: L

    def path(self, iteration: int) -> L:
        """Return the directory of an iteration's checkpoint, whether it exists or not."""
        return self.root / f"iter_{iteration:07d}"

    @abstractmethod
    def iterations(self) -> list[int]:
        """Return the iterations that have a directory, complete or not, newest first."""

    @abstractmethod
    def best_iteration(self) -> int | None:
        """Return the iteration that :data:`BEST_LINK` names; None without an existing one."""

    @abstractmethod
    def check_complete(self, path: L, *, verify_without_manifest: bool = True) -> dict[str, Any]:
        """Check the files of a checkpoint; see :func:`check_complete`."""

    @abstractmethod
    def _find_named(self, *, verify_without_manifest: bool) -> LatestCheckpoint[L] | None:
        """Return the checkpoint that the directory itself is; None if it is none."""

    @abstractmethod
    def _read_tracker_text(self) -> str | None:
        """Return the content of the tracker file; None if there is none."""

    def find_latest(self, *, verify_without_manifest: bool = True) -> LatestCheckpoint[L] | None:
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
        named = self._find_named(verify_without_manifest=verify_without_manifest)
        if named is not None:
            return named
        tracked_iteration, remark = self._read_tracker()
        skipped = [remark] if remark else []
        iterations = self.iterations()
        for iteration in iterations:
            path = self.path(iteration)
            if tracked_iteration is not None and iteration > tracked_iteration:
                skipped.append(f"{path.name}: newer than {TRACKER_FILE} says ({tracked_iteration})")
                continue
            try:
                content = self.check_complete(path, verify_without_manifest=verify_without_manifest)
            except CheckpointError as error:
                skipped.append(f"{path.name}: {error.message}")
                continue
            if (
                tracked_iteration is not None
                and iteration < tracked_iteration
                and tracked_iteration not in iterations
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

    def list_superseded(
        self, newest: int, keep_count: int, retain_interval: int | None = None
    ) -> list[L]:
        """List the checkpoints that may be deleted once ``newest`` is complete.

        Checkpoints newer than ``newest`` (after training went back) are never listed, nor is the
        best one.

        Args:
            newest: iteration of the checkpoint that was just published.
            keep_count: number of newest complete checkpoints to keep, including ``newest``.
            retain_interval: also keep every checkpoint whose iteration is a multiple of this.
        """
        kept_count = 1
        superseded = []
        best = self.best_iteration()
        for iteration in self.iterations():
            if iteration >= newest or (retain_interval and iteration % retain_interval == 0):
                continue
            if iteration == best and kept_count >= keep_count:
                continue
            path = self.path(iteration)
            if kept_count < keep_count and self._is_complete(path):
                kept_count += 1
            elif kept_count >= keep_count:
                superseded.append(path)
        return superseded

    def _is_complete(self, path: L) -> bool:
        try:
            self.check_complete(path)
        except CheckpointError:
            return False
        return True

    def _read_tracker(self) -> tuple[int | None, str | None]:
        """Return the iteration in the tracker file, and a remark if it holds something else."""
        text = self._read_tracker_text()
        if text is None:
            return None, None
        if text.isdecimal():
            return int(text), None
        return None, f"{TRACKER_FILE}: holds {text[:40]!r}, expected an iteration; not followed"


class CheckpointDirectory(Checkpoints[Path]):
    """The checkpoints below one directory on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def iterations(self) -> list[int]:
        if not self.root.is_dir():
            return []
        return match_iterations(item.name for item in self.root.iterdir() if item.is_dir())

    def best_iteration(self) -> int | None:
        try:
            match = re.fullmatch(DIRECTORY_PATTERN, (self.root / BEST_LINK).readlink().name)
        except OSError:
            return None
        return int(match[1]) if match and self.path(int(match[1])).is_dir() else None

    def check_complete(self, path: Path, *, verify_without_manifest: bool = True) -> dict[str, Any]:
        return check_complete(path, verify_without_manifest=verify_without_manifest)

    def _find_named(self, *, verify_without_manifest: bool) -> LatestCheckpoint[Path] | None:
        if not (self.root / _INDEX_FILE).is_file():
            return None
        path = self.root.resolve()
        content = check_complete(path, verify_without_manifest=verify_without_manifest)
        return _name_checkpoint(path, content)

    def _read_tracker_text(self) -> str | None:
        try:
            return (self.root / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None


class StoredCheckpoints(Checkpoints[StorageAddress]):
    """The checkpoints below an address of object storage.

    A checkpoint without a manifest is not complete. If it has a :data:`PARTIAL_MARK`, its upload or
    deletion was interrupted, and it is not listed.

    Objects are listed once, when they are needed first; :meth:`refresh` lists them again.
    """

    def __init__(self, root: StorageAddress, store: ObjectStore | None = None) -> None:
        """Open the checkpoints below ``root``, through ``store`` if there is a client already.

        Raises:
            CheckpointError: the package for this storage is not installed.
        """
        self.root = root
        self.store = ObjectStore(root) if store is None else store
        self._sizes: dict[str, int] | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of all objects below the address, by name."""
        if self._sizes is None:
            self._sizes = self.store.list_sizes(self.root)
        return self._sizes

    def refresh(self) -> None:
        """Forget the list of objects."""
        self._sizes = None

    def files(self, name: str) -> dict[str, int]:
        """Return the sizes of the objects of a checkpoint, by name in it."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): size
            for key, size in self.sizes.items()
            if key.startswith(prefix)
        }

    def iterations(self) -> list[int]:
        names = {key.partition("/")[0] for key in self.sizes if "/" in key}
        return match_iterations(name for name in names if not self.is_partial(name))

    def is_partial(self, name: str) -> bool:
        """Return whether a checkpoint was not uploaded or deleted completely."""
        return (
            f"{name}/{PARTIAL_MARK}" in self.sizes and f"{name}/{MANIFEST_FILE}" not in self.sizes
        )

    def best_iteration(self) -> int | None:
        if BEST_LINK not in self.sizes:
            return None
        match = re.fullmatch(DIRECTORY_PATTERN, self._read_text(self.root / BEST_LINK) or "")
        return int(match[1]) if match and int(match[1]) in self.iterations() else None

    def check_complete(
        self, path: StorageAddress, *, verify_without_manifest: bool = True
    ) -> dict[str, Any]:
        del verify_without_manifest
        return self._check(path, self.files(path.name))

    def read_manifest(self, path: StorageAddress) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: it is missing, or not as it was written.
        """
        try:
            return parse_manifest(self.store.read(path / MANIFEST_FILE))
        except FileNotFoundError:
            raise CheckpointError(
                f"{MANIFEST_FILE} is missing: it was not saved to object storage by flagscale, or "
                "not completely"
            ) from None

    def _check(self, path: StorageAddress, sizes: Mapping[str, int]) -> dict[str, Any]:
        manifest = self.read_manifest(path)
        for name, size in manifest.sizes.items():
            compare_size(name, sizes.get(name), size, exact=True)
        for name, expected_digest in manifest.digests.items():
            compare_digest(name, hash_content(self.store.read(path / name)), expected_digest)
        return manifest.entries

    def _find_named(
        self, *, verify_without_manifest: bool
    ) -> LatestCheckpoint[StorageAddress] | None:
        del verify_without_manifest
        path = self.root
        if self.root.name == BEST_LINK and (name := self._read_text(self.root)):
            path = self.root.parent / name
        elif MANIFEST_FILE not in self.sizes:
            return None
        return _name_checkpoint(path, self._check(path, self.store.list_sizes(path)))

    def _read_tracker_text(self) -> str | None:
        if TRACKER_FILE not in self.sizes:
            return None
        return self._read_text(self.root / TRACKER_FILE)

    def _read_text(self, address: StorageAddress) -> str | None:
        try:
            return self.store.read(address).decode("utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None


def open_checkpoints(location: str) -> CheckpointDirectory | StoredCheckpoints:
    """Return the checkpoints below a directory or an address.

    Raises:
        CheckpointError: the address is not usable on this host.
    """
    root = parse_location(location)
    return CheckpointDirectory(root) if isinstance(root, Path) else StoredCheckpoints(root)


def match_iterations(names: Iterable[str]) -> list[int]:
    """Return the iterations in the names of directories, newest first."""
    matches = (re.fullmatch(DIRECTORY_PATTERN, name) for name in names)
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _name_checkpoint(path: L, content: Mapping[str, Any]) -> LatestCheckpoint[L]:
    """Return the checkpoint in a directory, with the iteration that its manifest or name states."""
    match = re.fullmatch(DIRECTORY_PATTERN, path.name)
    iteration = content.get("iteration", match and int(match[1]))
    if iteration is None:
        raise CheckpointError(
            f"{path}: neither its name nor a {MANIFEST_FILE} states its iteration",
            hint="rename the directory to iter_<7 digits>",
        )
    return LatestCheckpoint(path, int(iteration), content)


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        entries: what it says about the run.
        sizes: size of each file in bytes.
        digests: SHA-256 of the small files, in hexadecimal.
        seal: checksum of the manifest; None in manifests of early versions.
    """

    entries: dict[str, Any]
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    seal: str | None


def parse_manifest(text: str | bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        content = json.loads(text)
        seal = content.pop("seal", None)
        is_changed = seal not in (None, compute_seal(content))
        digests = dict(content.pop("digests", {}))
        sizes = {str(name): int(size) for name, size in content.pop("files").items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if is_changed:
        raise CheckpointError(f"{MANIFEST_FILE} is not as it was written")
    return Manifest(dict(content), sizes, digests, seal)


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
        manifest = parse_manifest((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if verify_without_manifest:
            _check_without_manifest(path)
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    for name, size in manifest.sizes.items():
        _check_size(path, name, size, exact=True)
    for name, expected_digest in manifest.digests.items():
        compare_digest(name, hash_file(path / name), expected_digest)
    return manifest.entries


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
        actual: int | None = (path / name).stat().st_size
    except OSError:
        actual = None
    compare_size(name, actual, size, exact=exact)


def compare_size(name: str, actual: int | None, size: int, *, exact: bool) -> None:
    """Check the size of a file of a checkpoint; ``actual`` is None if the file does not exist.

    Raises:
        CheckpointError: the file is missing, too short or, with ``exact``, too long.
    """
    if actual is None:
        raise CheckpointError(f"{name} is missing")
    if actual < size or (exact and actual != size):
        raise CheckpointError(f"{name} has {actual} bytes, expected {size}")


def compare_digest(name: str, digest: str, expected_digest: str) -> None:
    """Check the SHA-256 of a small file, in hexadecimal.

    Raises:
        CheckpointError: it differs.
    """
    if digest != expected_digest:
        raise CheckpointError(f"{name} is not as it was written: its SHA-256 differs")


def hash_content(content: bytes) -> str:
    """Return the SHA-256 of the content of a small file, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a small file, in hexadecimal.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return hash_content(path.read_bytes())
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
        checkpoint = open_checkpoints(directory).find_latest()
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
