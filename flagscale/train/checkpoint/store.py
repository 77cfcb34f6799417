"""Writing under a directory of checkpoints: what is half written, which may go.

No torch and no process group: one rank works on the directory for all.
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
    Checkpoints,
    check_whole,
    digest,
    seal_of,
)
from flagscale.errors import CheckpointError
from flagscale.files import sync

_REMAINS = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)")
_MANIFEST_VERSION = 1


class CheckpointStore(Checkpoints):
    """A directory of checkpoints that a run saves into."""

    def partial(self, iteration: int) -> Path:
        """Where a checkpoint is written until it is whole."""
        return self.root / f".iter_{iteration:07d}.partial"

    def begin(self, iteration: int, *, again: bool = False) -> Path:
        """An empty directory to write the checkpoint of an iteration into; ``again``: with what an
        earlier writer has left in it."""
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.partial(iteration)
        self._clear_remains(but=partial if again else None)
        partial.mkdir(exist_ok=again)
        return partial

    def abandon(self, iteration: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(iteration), ignore_errors=True)

    def publish(self, iteration: int, content: Mapping[str, Any]) -> Path:
        """Make a fully written checkpoint visible: manifest, rename, tracker file."""
        partial, final = self.partial(iteration), self.path(iteration)
        write_manifest(partial, {"iteration": iteration, **content})
        sync(partial)
        replaced = self.root / f".{final.name}.replaced"
        # Prepared before and renamed after: a disk that fills up in between cannot hurt.
        tracker = _write_synced(self.root / f".{TRACKER}.new", f"{iteration}\n")
        if final.exists():  # training went back and came to this iteration again
            final.rename(replaced)
        partial.rename(final)
        tracker.replace(self.root / TRACKER)
        sync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def superseded(self, newest: int, keep: int, retained: int | None = None) -> list[Path]:
        """Checkpoints that may go once ``newest`` is whole: older ones, all but the ``keep - 1``
        newest whole ones and those of every ``retained``-th step. Those newer than ``newest``
        (training went back) are not touched."""
        kept = 1
        gone = []
        for iteration in self.iterations():
            if iteration >= newest or (retained and iteration % retained == 0):
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

    def _clear_remains(self, but: Path | None = None) -> None:
        """Remove what a run that was killed left half written or half deleted."""
        for item in list(self.root.iterdir()):
            match = _REMAINS.fullmatch(item.name)
            if match is None or item == but:
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


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a directory: what is said of it, the size of each file, and SHA-256 of
    the small ones that every checkpoint has.

    Tensors have their CRC-32 in their own files (:mod:`.checksums`): a digest here would take as
    long as reading them.
    """
    files = {
        item.relative_to(path).as_posix(): item.stat().st_size
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }
    digests = {name: digest(path / name) for name in REQUIRED if name in files}
    manifest = {"version": _MANIFEST_VERSION, **content, "files": files, "digests": digests}
    sealed = {**manifest, "seal": seal_of(manifest)}
    _write_synced(path / MANIFEST, json.dumps(sealed, indent=1) + "\n")


def _write_synced(path: Path, text: str) -> Path:
    """Write a small file that survives a power cut."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path
