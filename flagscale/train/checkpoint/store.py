"""Checkpoints as directories: their names, which of them are whole, which may go.

No torch and no process group: one rank works on the directory for all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.paths import CHECKPOINT_NAME
from flagscale.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
_NAME = re.compile(CHECKPOINT_NAME)
_REMAINS = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)")
_REQUIRED = ("metadata.json", ".metadata", "common.pt")
_MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Found:
    """The checkpoint to load, what its manifest says beside sizes, and what was passed over."""

    path: Path
    iteration: int
    content: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def partial(self, iteration: int) -> Path:
        """Where a checkpoint is written until it is whole."""
        return self.root / f".iter_{iteration:07d}.partial"

    def iterations(self) -> list[int]:
        """Iterations with a checkpoint directory, whole or not, newest first."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(item.name) for item in self.root.iterdir() if item.is_dir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    # --- finding -------------------------------------------------------------------------

    def find(self) -> Found | None:
        """The newest whole checkpoint, none newer than the tracker file names.

        Whoever writes an older iteration into the tracker file goes back to it. None when there
        is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole.
        """
        tracked, remark = self._tracked()
        skipped = [remark] if remark else []
        for iteration in self.iterations():
            path = self.path(iteration)
            if tracked is not None and iteration > tracked:
                skipped.append(f"{path.name}: newer than {TRACKER} says ({tracked})")
                continue
            try:
                content = check_whole(path)
            except CheckpointError as error:
                skipped.append(f"{path.name}: {error.message}")
                continue
            if tracked is not None and iteration < tracked and not self.path(tracked).exists():
                skipped.append(f"{self.path(tracked).name}: missing, although {TRACKER} names it")
            return Found(path, iteration, content, tuple(skipped))
        if not skipped:
            return None
        listed = "\n  ".join(skipped)
        raise CheckpointError(
            f"{self.root}: holds no whole checkpoint:\n  {listed}",
            hint="remove the damaged directories to start from step 0, or load from elsewhere",
        )

    def _tracked(self) -> tuple[int | None, str | None]:
        """The iteration that the tracker file names, and a remark when it is no number."""
        try:
            text = (self.root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        if text.isdecimal():
            return int(text), None
        return None, f"{TRACKER}: holds {text[:40]!r}, expected an iteration; not followed"

    # --- writing -------------------------------------------------------------------------

    def begin(self, iteration: int) -> Path:
        """An empty directory to write the checkpoint of an iteration into."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._clear_remains()
        partial = self.partial(iteration)
        partial.mkdir()
        return partial

    def abandon(self, iteration: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(iteration), ignore_errors=True)

    def publish(self, iteration: int, content: Mapping[str, Any]) -> Path:
        """Make a fully written checkpoint visible: manifest, rename, tracker file."""
        partial, final = self.partial(iteration), self.path(iteration)
        write_manifest(partial, {"iteration": iteration, **content})
        _sync_directory(partial)
        replaced = self.root / f".{final.name}.replaced"
        # Prepared before and renamed after: a disk that fills up in between cannot hurt.
        tracker = _write_synced(self.root / f".{TRACKER}.new", f"{iteration}\n")
        if final.exists():  # training went back and came to this iteration again
            final.rename(replaced)
        partial.rename(final)
        tracker.replace(self.root / TRACKER)
        _sync_directory(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def superseded(self, newest: int, keep: int) -> list[Path]:
        """Checkpoints that may go once ``newest`` is whole: older ones, all but the ``keep - 1``
        newest whole ones. Those newer than ``newest`` (training went back) are not touched."""
        kept = 1
        gone = []
        for iteration in self.iterations():
            if iteration >= newest:
                continue
            path = self.path(iteration)
            if kept < keep and _is_whole(path):
                kept += 1
            elif kept >= keep:
                gone.append(path)
        return gone

    def remove(self, paths: Iterable[Path]) -> None:
        """Delete checkpoints; each loses its name first, so that none is seen half deleted."""
        for path in paths:
            doomed = self.root / f".{path.name}.removed"
            try:
                path.rename(doomed)
            except OSError:
                continue  # somebody else removed it
            shutil.rmtree(doomed, ignore_errors=True)

    def _clear_remains(self) -> None:
        """Remove what a run that was killed left half written or half deleted."""
        for item in list(self.root.iterdir()):
            match = _REMAINS.fullmatch(item.name)
            if match is None:
                continue
            if match[2] == "replaced" and not (self.root / match[1]).exists():
                item.rename(self.root / match[1])  # killed between the two renames
            else:
                shutil.rmtree(item, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        check_whole(path)
    except CheckpointError:
        return False
    return True


def check_whole(path: Path) -> dict[str, Any]:
    """Check that every file is there with its size; returns what else the manifest says.

    A checkpoint without a manifest, from Megatron-LM itself, is checked for the files that every
    checkpoint has and for the length that its metadata implies.

    Raises:
        CheckpointError: the first file that is missing or has another size.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in manifest["files"].items()}
    except FileNotFoundError:
        _check_foreign(path)
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    for name, size in sizes.items():
        _check_size(path, name, size, exact=True)
    del manifest["files"]
    return dict(manifest)


def _check_foreign(path: Path) -> None:
    for name in _REQUIRED:
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing, and there is no {MANIFEST}")
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        stored = FileSystemReader(path).read_metadata().storage_data or {}
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f".metadata cannot be read: {error}") from error
    needed: dict[str, int] = {}
    for item in stored.values():
        end = item.offset + item.length
        needed[item.relative_path] = max(end, needed.get(item.relative_path, 0))
    for name, size in needed.items():
        _check_size(path, name, size, exact=False)


def _check_size(path: Path, name: str, size: int, *, exact: bool) -> None:
    try:
        found = (path / name).stat().st_size
    except OSError:
        raise CheckpointError(f"{name} is missing") from None
    if found < size or (exact and found != size):
        raise CheckpointError(f"{name} has {found} bytes, expected {size}")


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a directory: what is said of it, and the size of each file."""
    files = {
        item.relative_to(path).as_posix(): item.stat().st_size
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }
    manifest = {"version": _MANIFEST_VERSION, **content, "files": files}
    _write_synced(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _write_synced(path: Path, text: str) -> Path:
    """Write a small file that survives a power cut."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
