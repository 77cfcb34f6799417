"""What was done to a tree, and what has been edited in it since."""

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

FORMAT = 1
#: Directories that are never part of a tree: ours, version control's, and tools' caches.
IGNORED_DIRECTORIES = frozenset(
    {STATE_DIRECTORY, ".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
IGNORED_FILES = ("*.pyc", "*.pyo", "*.orig", "*.rej", "*~", ".*.sw?", ".DS_Store")


def scan(tree: Path, *, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Digest of every file of ``tree`` by its path relative to it, sorted.

    The digest covers the content and the executable bit; for a symbolic link, its target.
    ``without`` names files that were generated and are nobody's edit.
    """
    return {path: digest(tree / path) for path in sorted(_walk(tree)) if path not in without}


def _walk(tree: Path) -> Iterator[str]:
    for directory, subdirectories, files in os.walk(tree):
        here = Path(directory).relative_to(tree)
        links = [d for d in subdirectories if (Path(directory) / d).is_symlink()]
        subdirectories[:] = [
            d for d in subdirectories if d not in IGNORED_DIRECTORIES and d not in links
        ]
        for name in (*files, *links):
            if not any(fnmatchcase(name, pattern) for pattern in IGNORED_FILES):
                yield (here / name).as_posix()


def digest(path: Path) -> str:
    """``sha256`` of the content, prefixed ``x:`` when executable; ``link:`` and a link's target."""
    if path.is_symlink():
        return f"link:{path.readlink()}"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"x:{found}" if path.stat().st_mode & 0o100 else found


@dataclass(frozen=True)
class Edits:
    """How one state of a tree differs from another; paths are sorted."""

    modified: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modified or self.added or self.deleted)

    def lines(self) -> list[str]:
        """One line a file: ``modified: path``."""
        named = (("modified", self.modified), ("new", self.added), ("deleted", self.deleted))
        return [f"{kind}: {path}" for kind, paths in named for path in paths]

    def paths(self) -> list[str]:
        """All paths, sorted."""
        return sorted((*self.modified, *self.added, *self.deleted))


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> Edits:
    """What changed between two scans."""
    return Edits(
        modified=tuple(p for p in sorted(before) if p in after and before[p] != after[p]),
        added=tuple(p for p in sorted(after) if p not in before),
        deleted=tuple(p for p in sorted(before) if p not in after),
    )


@dataclass(frozen=True)
class Manifest:
    """The record an adaptation leaves in its tree."""

    backend: str
    version: str
    #: In words: ``megatron-core 0.16.1 from the package registry (sha256 8652…)``.
    source: str
    #: Which content that is, to the last byte.
    identity: str
    #: The source options it was made with, by name; those not given are left out.
    choice: Mapping[str, str]
    #: Of everything the tree was made from; equal fingerprints mean there is nothing to do.
    fingerprint: str
    made_at: str
    #: How often each codemod changed something, and in how many files altogether.
    codemods: Mapping[str, int]
    rewritten_files: int
    #: Patches that were applied: path relative to the patch directory → sha256.
    patches: Mapping[str, str]
    #: Digest of every file of the tree as it was left.
    files: Mapping[str, str]
    #: Files made for this machine (compiled modules), which are nobody's edit.
    generated: tuple[str, ...] = ()
    #: How the compiled helper was provided, in words.
    native: str = ""
    warnings: tuple[str, ...] = field(default=())

    def edits(self, tree: Path) -> Edits:
        """What has been edited in ``tree`` since this record was written."""
        return compare(self.files, scan(tree, without=frozenset(self.generated)))

    def write(self, path: Path) -> None:
        """Write atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)


def read_manifest(path: Path) -> Manifest | None:
    """The record at ``path``, or ``None`` when there is none.

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
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise BackendSourceError(
            f"{path}: written by another version of this tool",
            hint="run unpatch.py with --force, which keeps a backup and makes the tree anew",
        )
    for name in ("generated", "warnings"):
        data[name] = tuple(data[name])
    return Manifest(**data)
