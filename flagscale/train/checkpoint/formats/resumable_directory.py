"""Directories written file by file, whose finished files survive an interrupted conversion.

When a file is complete and flushed to disk, it is recorded together with checksums of its spans and
the identity of the conversion. A later conversion with the same identity continues with the files
that still match their record, and deletes everything else in the directory.
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
from flagscale.files import fsync_path, read_json, write_json
from flagscale.train.checkpoint.formats.span_checksums import FileSpan, cover_file, matches_spans

RECORD_FILE = ".conversion.json"
"""File of a directory being written that lists the finished files."""


@dataclass(frozen=True)
class ResumeOptions:
    """Identity of a conversion, which decides whether an interrupted one can be resumed.

    Attributes:
        identity: fingerprints of everything that the output depends on. The keys are descriptions
            for messages, such as "its source".
        log: prints a message.
        restart: discard the files of an earlier conversion.
    """

    identity: Mapping[str, str]
    log: Callable[[str], None]
    restart: bool = False


class ResumableDirectory:
    """A directory being written, with its record of finished files."""

    def __init__(self, directory: Path, resume: ResumeOptions | None) -> None:
        self.directory = directory
        self._resume = resume
        self._finished_files: dict[str, dict[str, Any]] = {}

    @property
    def finished_count(self) -> int:
        """Number of finished files."""
        return len(self._finished_files)

    def load_record(self) -> None:
        """Load the record of an earlier writer, and delete the files that it does not list."""
        record = read_json(self.directory / RECORD_FILE) or {}
        entries = record.get("parts")
        if self._resume is not None and isinstance(entries, dict):
            valid_entries = {
                name: entry
                for name, entry in entries.items()
                if self._is_recorded_file(name, entry)
            }
            if valid_entries:
                self._finished_files = self._select_reusable(
                    self._resume, record.get("identity"), valid_entries
                )
        self.remove_unfinished()

    def _is_recorded_file(self, name: str, entry: Any) -> bool:
        """Return whether a record's entry can belong to a file in the directory."""
        is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        return is_inside and isinstance(entry, dict) and (self.directory / name).is_file()

    def _select_reusable(
        self, resume: ResumeOptions, recorded_identity: Any, entries: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the recorded files if they belong to the same conversion, otherwise none."""
        recorded_identity = recorded_identity if isinstance(recorded_identity, dict) else {}
        changed_names = [
            name for name, value in resume.identity.items() if recorded_identity.get(name) != value
        ]
        if resume.restart:
            return {}
        if changed_names:
            verb = "is" if len(changed_names) == 1 else "are"
            resume.log(
                f"{' and '.join(changed_names)} {verb} not what an earlier conversion to this "
                "place began with: it begins anew"
            )
            return {}
        resume.log(
            f"files that an earlier conversion has finished: {len(entries)}; going on from them"
        )
        return entries

    def remove_unfinished(self) -> None:
        """Delete everything in the directory that is not a finished file."""
        finished_paths = {self.directory / name for name in self._finished_files}
        for item in sorted(self.directory.rglob("*"), reverse=True):
            if item.is_dir() and not item.is_symlink():
                if not any(item in path.parents for path in finished_paths):
                    item.rmdir()
            elif item not in finished_paths and item.name != RECORD_FILE:
                item.unlink()
        if not self._finished_files:
            (self.directory / RECORD_FILE).unlink(missing_ok=True)

    def reuse_file(self, name: str) -> Any:
        """Return the recorded ``writer_data`` of a finished file that still matches its record.

        A file that does not match is deleted.

        Returns:
            None if the file has to be written.
        """
        entry = self._finished_files.get(name)
        if entry is None:
            return None
        path = self.directory / name
        if path.is_file() and matches_spans(path, entry.get("spans")):
            return entry.get("about")
        del self._finished_files[name]
        path.unlink(missing_ok=True)
        if self._resume is not None:
            self._resume.log(f"{name} is not what was written: it is made again")
        return None

    def record_file(
        self, name: str, writer_data: Any = True, spans: Iterable[FileSpan] = ()
    ) -> None:
        """Flush a complete file to disk and record it.

        Args:
            name: path relative to the directory.
            writer_data: JSON value that :meth:`reuse_file` returns to a later writer.
            spans: spans of the file whose checksum is known. The rest of the file is read to
                compute its checksums.
        """
        path = self.directory / name
        fsync_path(path)
        if self._resume is None:
            return
        self._finished_files[name] = {"spans": cover_file(path, spans), "about": writer_data}
        record = {"identity": dict(self._resume.identity), "parts": self._finished_files}
        write_json(self.directory / RECORD_FILE, record)

    def remove_record(self) -> None:
        """Delete the record, because the directory is complete."""
        (self.directory / RECORD_FILE).unlink(missing_ok=True)


@contextmanager
def open_resumable(directory: Path, resume: ResumeOptions | None) -> Iterator[ResumableDirectory]:
    """Context manager for writing into a directory, with the finished files of an earlier writer.

    Without ``resume`` the directory starts empty. After an OSError or a KeyboardInterrupt, finished
    files stay; after any other exception, the directory is deleted.

    Raises:
        CheckpointError: another process is writing to the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        _lock_directory(lock, directory)
        output = ResumableDirectory(directory, resume)
        output.load_record()
        try:
            yield output
        except (OSError, KeyboardInterrupt):
            _keep_finished_files(output, resume)
            raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        output.remove_record()
    finally:
        os.close(lock)


def _keep_finished_files(output: ResumableDirectory, resume: ResumeOptions | None) -> None:
    """Delete everything but the finished files after an interruption, and log their number."""
    if resume is None or not output.finished_count:
        shutil.rmtree(output.directory, ignore_errors=True)
        return
    output.remove_unfinished()
    resume.log(
        f"files that are finished: {output.finished_count}; the same command goes on from them"
    )


def _lock_directory(descriptor: int, directory: Path) -> None:
    """Lock a directory against other processes, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise CheckpointError(f"{directory} is being written by another process") from error
        # Some file systems do not support locks; the directory is then used without one.


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Fingerprint files and directories by name, size and times, without reading them."""
    digest = hashlib.sha256()
    for path in paths:
        for item in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if item.is_file() and not any(is_partial(parent) for parent in item.parents):
                stat = item.stat()
                line = [str(item), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
                digest.update(json.dumps(line).encode() + b"\n")
    return digest.hexdigest()


def partial_path(path: Path) -> Path:
    """Return the directory that is written to until ``path`` is complete."""
    return path.with_name(f".{path.name}.partial")


def is_partial(path: Path) -> bool:
    """Return whether a path has the name of an incomplete directory."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def measure_disk_usage(directory: Path) -> int:
    """Return the disk space that the files in a directory occupy, in bytes."""
    files = directory.rglob("*") if directory.is_dir() else ()
    return sum(item.lstat().st_blocks * 512 for item in files)
