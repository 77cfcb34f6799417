"""A directory that is written part by part, and goes on from the finished parts when it was cut.

A part is a file. When it is whole and on the disk, it is recorded with checksums of its spans
beside what the directory is made of. A later writer of the same goes on from the parts that still
are what was recorded; everything else in the directory goes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import CheckpointError
from flagscale.files import read_json, sync, write_json
from flagscale.train.checkpoint.formats.spans import Span, as_written, covering

RECORD = ".conversion.json"


@dataclass(frozen=True)
class Origin:
    """What a directory is made of, by names for people; whom to tell what becomes of an earlier
    one, and whether that is not wanted."""

    identity: Mapping[str, str]
    tell: Callable[[str], None]
    restart: bool = False


class Parts:
    """The finished parts of a directory."""

    def __init__(self, directory: Path, origin: Origin | None) -> None:
        self.directory = directory
        self._origin = origin
        self._finished: dict[str, dict[str, Any]] = {}

    @property
    def count(self) -> int:
        """Finished parts."""
        return len(self._finished)

    def take_over(self) -> None:
        """Find what an earlier writer has finished; remove what else it has left."""
        record = read_json(self.directory / RECORD) or {}
        found = record.get("parts")
        if self._origin is not None and isinstance(found, dict):
            sound = {name: entry for name, entry in found.items() if self._is_part(name, entry)}
            if sound:
                self._finished = self._usable(self._origin, record.get("identity"), sound)
        self.clear()

    def _is_part(self, name: str, entry: Any) -> bool:
        """Whether a record can be of a file in the directory."""
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        return inside and isinstance(entry, dict) and (self.directory / name).is_file()

    def _usable(self, origin: Origin, said: Any, found: dict[str, Any]) -> dict[str, Any]:
        said = said if isinstance(said, dict) else {}
        changed = [name for name, value in origin.identity.items() if said.get(name) != value]
        if origin.restart:
            return {}
        if changed:
            one = "is" if len(changed) == 1 else "are"
            origin.tell(
                f"{' and '.join(changed)} {one} not what an earlier conversion to this place began "
                "with: it begins anew"
            )
            return {}
        origin.tell(
            f"files that an earlier conversion has finished: {len(found)}; going on from them"
        )
        return found

    def clear(self) -> None:
        """Remove what is not finished."""
        kept = {self.directory / name for name in self._finished}
        for item in sorted(self.directory.rglob("*"), reverse=True):
            if item.is_dir() and not item.is_symlink():
                if not any(item in path.parents for path in kept):
                    item.rmdir()
            elif item not in kept and item.name != RECORD:
                item.unlink()
        if not self._finished:
            (self.directory / RECORD).unlink(missing_ok=True)

    def kept(self, name: str) -> Any:
        """What was told of a part that is finished, and still what was written; None where it is
        to be written."""
        entry = self._finished.get(name)
        if entry is None:
            return None
        path = self.directory / name
        if path.is_file() and as_written(path, entry.get("spans")):
            return entry.get("about")
        del self._finished[name]
        path.unlink(missing_ok=True)
        if self._origin is not None:
            self._origin.tell(f"{name} is not what was written: it is made again")
        return None

    def finish(self, name: str, about: Any = True, spans: Iterable[Span] = ()) -> None:
        """Record that a part is whole. ``about``: JSON, for whoever goes on. ``spans``: those of
        which the writer knows the checksum; the rest of the file is read for it."""
        path = self.directory / name
        sync(path)
        if self._origin is None:
            return
        self._finished[name] = {"spans": covering(path, spans), "about": about}
        record = {"identity": dict(self._origin.identity), "parts": self._finished}
        write_json(self.directory / RECORD, record)

    def forget(self) -> None:
        """Remove the record: the directory is whole."""
        (self.directory / RECORD).unlink(missing_ok=True)


@contextmanager
def resumable(directory: Path, origin: Origin | None) -> Iterator[Parts]:
    """A directory to write into, with the parts that an earlier writer has finished. Without an
    ``origin`` it is empty. Of a write that fails by the system or the user, finished parts stay;
    what fails otherwise leaves nothing.

    Raises:
        CheckpointError: another process writes there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        _lock(lock, directory)
        parts = Parts(directory, origin)
        parts.take_over()
        try:
            yield parts
        except (OSError, KeyboardInterrupt):
            _settle(parts, origin)
            raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        parts.forget()
    finally:
        os.close(lock)


def _settle(parts: Parts, origin: Origin | None) -> None:
    if origin is None or not parts.count:
        shutil.rmtree(parts.directory, ignore_errors=True)
        return
    parts.clear()
    origin.tell(f"files that are finished: {parts.count}; the same command goes on from them")


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise CheckpointError(f"{directory} is being written by another process") from error
        # A file system without locks is used without them.


def identity_of(paths: Iterable[Path]) -> str:
    """What tells whether files, or all files of directories, were changed: names, sizes and times
    of change. Their content is not read."""
    found = hashlib.sha256()
    for path in paths:
        for item in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if item.is_file() and not any(is_partial(parent) for parent in item.parents):
                stat = item.stat()
                line = [str(item), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
                found.update(json.dumps(line).encode() + b"\n")
    return found.hexdigest()


def partial_of(path: Path) -> Path:
    """Where the parts of what will be ``path`` are while it is not whole."""
    return path.with_name(f".{path.name}.partial")


def is_partial(path: Path) -> bool:
    """Whether a directory, by its name, is of one that is not whole."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def disk_used(directory: Path) -> int:
    """Bytes that a directory's files take on the disk."""
    files = directory.rglob("*") if directory.is_dir() else ()
    return sum(item.lstat().st_blocks * 512 for item in files)
