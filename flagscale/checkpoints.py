"""The checkpoints in a directory: their names, which of them are whole, which one would be loaded.

Both ends ask: the training program when it loads, and the launcher before it starts anything. No
torch, but for a checkpoint without a manifest, which another program has written.

    python -m flagscale.checkpoints DIRECTORY

answers one line of JSON, what a preflight asks a host's Python: see :func:`answer`.
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

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM, and so this project, names the newest checkpoint."""
MANIFEST = "manifest.json"
NAME = r"iter_([0-9]{7,})"
"""A checkpoint's name in its directory, as a pattern for Python and for bash."""
REQUIRED = ("metadata.json", ".metadata", "common.pt")
"""What every checkpoint has beside its tensors. These files are small, and every rank reads them
whole."""


@dataclass(frozen=True)
class Found:
    """The checkpoint to load, what its manifest says beside files, and what was passed over."""

    path: Path
    iteration: int
    content: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def iterations(self) -> list[int]:
        """Iterations with a checkpoint directory, whole or not, newest first."""
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(NAME, item.name) for item in self.root.iterdir() if item.is_dir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def find(self, *, foreign: bool = True) -> Found | None:
        """The newest whole checkpoint, none newer than the tracker file names.

        Whoever writes an older iteration into the tracker file goes back to it. None when there
        is no checkpoint at all. ``foreign``: see :func:`check_whole`.

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
                content = check_whole(path, foreign=foreign)
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


def check_whole(path: Path, *, foreign: bool = True) -> dict[str, Any]:
    """Check that every file is there with its size, and that the small ones hold what was written;
    returns what else the manifest says.

    A checkpoint without a manifest, from Megatron-LM itself, is checked for the files that every
    checkpoint has and for the length that its metadata implies, unless ``foreign`` is false:
    that takes an import of torch.

    Raises:
        CheckpointError: the first file that is missing, has another size or was changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        seal = manifest.pop("seal", None)
        changed = seal not in (None, seal_of(manifest))
        digests = dict(manifest.pop("digests", {}))
        sizes = {str(name): int(size) for name, size in manifest.pop("files").items()}
    except FileNotFoundError:
        if foreign:
            _check_foreign(path)
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    if changed:
        raise CheckpointError(f"{MANIFEST} is not as it was written")
    for name, size in sizes.items():
        _check_size(path, name, size, exact=True)
    for name, written in digests.items():
        if digest(path / name) != written:
            raise CheckpointError(f"{name} is not as it was written: its SHA-256 differs")
    return dict(manifest)


def _check_foreign(path: Path) -> None:
    for name in REQUIRED:
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing, and there is no {MANIFEST}")
    from flagscale.checkpoint_metadata import read_metadata

    stored = read_metadata(path).storage_data
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


def digest(path: Path) -> str:
    """The SHA-256 of a small file. Raises :class:`CheckpointError` where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def seal_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest's values."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def answer(directory: str) -> dict[str, Any]:
    """What the ranks would do with a directory: the ``path``, ``iteration`` and ``content`` of the
    checkpoint that they would load and what they would have ``skipped``; ``refused`` and ``hint``
    where they would not go on; nothing where there is no checkpoint."""
    try:
        found = Checkpoints(Path(directory)).find()
    except CheckpointError as error:
        return {"refused": error.message, "hint": error.hint}
    except OSError as error:
        return {"refused": str(error)}
    return {} if found is None else {**vars(found), "path": str(found.path)}


def main(words: Sequence[str]) -> int:
    """Answer on standard output; the exit code."""
    print(json.dumps(answer(*words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
