"""Record of an adapted tree, and detection of later edits.

:mod:`.unpatch` writes the record into the tree.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from flagscale.errors import BackendSourceError
from flagscale.patching.spec import STATE_DIRECTORY

FORMAT_VERSION = 1
IGNORED_DIRECTORIES = frozenset(
    {STATE_DIRECTORY, ".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Directories that are never part of a tree: ours, version control's, and tools' caches."""
IGNORED_FILES = ("*.pyc", "*.pyo", "*.orig", "*.rej", "*~", ".*.sw?", ".DS_Store")


def scan_tree(tree: Path, *, exclude: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the digest of every file of ``tree`` by its relative path, sorted.

    A digest covers content and executable bit; for a symbolic link, its target. Files in
    ``exclude`` are left out.
    """
    return {path: file_digest(tree / path) for path in sorted(_walk(tree)) if path not in exclude}


def _walk(tree: Path) -> Iterator[str]:
    for directory, subdirectories, files in os.walk(tree):
        relative_directory = Path(directory).relative_to(tree)
        links = [d for d in subdirectories if (Path(directory) / d).is_symlink()]
        subdirectories[:] = [
            d for d in subdirectories if d not in IGNORED_DIRECTORIES and d not in links
        ]
        for name in (*files, *links):
            if not any(fnmatchcase(name, pattern) for pattern in IGNORED_FILES):
                yield (relative_directory / name).as_posix()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the content, prefixed by ``x:`` if the file is executable; for a
    symbolic link, ``link:`` and its target.
    """
    if path.is_symlink():
        return f"link:{path.readlink()}"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"x:{sha256}" if path.stat().st_mode & 0o100 else sha256


@dataclass(frozen=True)
class Edits:
    """Difference between two states of a tree, with sorted paths."""

    modified: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modified or self.added or self.deleted)

    def format_lines(self) -> list[str]:
        """Return one line per file: ``modified: path``."""
        paths_by_kind = (
            ("modified", self.modified),
            ("new", self.added),
            ("deleted", self.deleted),
        )
        return [f"{kind}: {path}" for kind, paths in paths_by_kind for path in paths]

    def paths(self) -> list[str]:
        """Return all paths, sorted."""
        return sorted((*self.modified, *self.added, *self.deleted))


def compare_scans(before: Mapping[str, str], after: Mapping[str, str]) -> Edits:
    """Return the difference between two scans."""
    return Edits(
        modified=tuple(p for p in sorted(before) if p in after and before[p] != after[p]),
        added=tuple(p for p in sorted(after) if p not in before),
        deleted=tuple(p for p in sorted(before) if p not in after),
    )


@dataclass(frozen=True)
class Manifest:
    """Record of an adaptation, stored in its tree."""

    backend: str
    version: str
    source: str
    """Description, such as ``megatron-core 0.16.1 from the package registry (sha256 8652…)``."""
    identity: str
    """Identity of the exact content."""
    choice: Mapping[str, str]
    """Source options of the command; options that were not set are left out."""
    fingerprint: str
    """Digest of everything the tree was made from; equal fingerprints mean there is nothing to do.
    """
    made_at: str
    codemods: Mapping[str, int]
    """Number of changes per codemod."""
    rewritten_files: int
    patches: Mapping[str, str]
    """Digest of each applied patch, by path relative to the patch directory."""
    files: Mapping[str, str]
    """Digest of every file of the finished tree."""
    generated: tuple[str, ...] = ()
    """Files made for this machine (compiled modules), which are not edits."""
    native: str = ""
    """Description of how the compiled module was provided."""
    warnings: tuple[str, ...] = field(default=())

    def edits(self, tree: Path) -> Edits:
        """Return the edits made in ``tree`` since this record was written."""
        return compare_scans(self.files, scan_tree(tree, exclude=frozenset(self.generated)))

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)


def read_manifest(path: Path) -> Manifest | None:
    """Read the record at ``path``; return None if there is none.

    Raises:
        BackendSourceError: it cannot be read, or another version of this tool wrote it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackendSourceError(
            f"{path}: the record of the adapted tree cannot be read: {error}",
            hint="move the tree aside, or run unpatch.py with --force, which keeps a backup",
        ) from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT_VERSION:
        raise BackendSourceError(
            f"{path}: written by another version of this tool",
            hint="run unpatch.py with --force, which keeps a backup and makes the tree anew",
        )
    for name in ("generated", "warnings"):
        data[name] = tuple(data[name])
    return Manifest(**data)
