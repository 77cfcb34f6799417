"""Files to and from a host, over SFTP.

A file appears under its name only when it is whole: it is written beside it and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import secrets
import stat
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import paramiko

from flagscale.hosts.closing import Closing
from flagscale.hosts.errors import HostError, RemoteFileError
from flagscale.hosts.ssh.connection import Connection


class RemoteFiles(Closing):
    """The files of one host, for as long as the connection lives. A context manager.

    Paths are the host's, with ``/``. Every failure is a :class:`RemoteFileError` that names the
    host and the path, or the error of a lost connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sftp = connection.open_sftp()

    def close(self) -> None:
        self._sftp.close()

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make ``path`` contain ``data``; the directories above it are made."""
        self._put(BytesIO(data), path, mode)

    def put(self, local: Path, path: str, *, mode: int | None = None) -> None:
        """Copy a local file to ``path``, with its permissions unless ``mode`` is given."""
        with local.open("rb") as source:
            self._put(source, path, stat.S_IMODE(local.stat().st_mode) if mode is None else mode)

    def read(self, path: str, *, offset: int = 0, most: int | None = None) -> bytes:
        """The bytes of ``path`` from ``offset`` on, at most ``most`` of them."""
        with self._doing("read", path), self._sftp.open(path, "rb") as file:
            if offset:
                file.seek(offset)
            elif most is None:
                file.prefetch()
            return file.read(most)

    def get(self, path: str, local: Path) -> None:
        """Copy the host's ``path`` to a local file, whole or not at all."""
        part = local.with_name(f".{local.name}.{secrets.token_hex(4)}.part")
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file, self._doing("read", path):
                self._sftp.getfo(path, file)
            part.replace(local)
        finally:
            part.unlink(missing_ok=True)

    def size(self, path: str) -> int | None:
        """Bytes in ``path``; None where there is no such file."""
        with self._doing("look at", path):
            try:
                return self._sftp.stat(path).st_size
            except FileNotFoundError:
                return None

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty where there is none."""
        with self._doing("list", path):
            try:
                return sorted(self._sftp.listdir(path))
            except FileNotFoundError:
                return []

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        with self._doing("remove", path), contextlib.suppress(FileNotFoundError):
            self._sftp.remove(path)

    def make_directories(self, path: str) -> None:
        """Make ``path`` and the directories above it."""
        missing: list[str] = []
        with self._doing("make directory", path):
            while path not in ("", "/"):
                try:
                    self._sftp.stat(path)
                    break
                except FileNotFoundError:
                    missing.append(path)
                    path = posixpath.dirname(path)
            for directory in reversed(missing):
                try:
                    self._sftp.mkdir(directory)
                except OSError:
                    self._sftp.stat(directory)  # made by another in the meantime

    def _put(self, source: BinaryIO, path: str, mode: int) -> None:
        directory, name = posixpath.split(path)
        part = posixpath.join(directory, f".{name[:200]}.{secrets.token_hex(4)}.part")
        self.make_directories(directory)
        try:
            with self._doing("write", path):
                self._sftp.putfo(source, part)
                self._sftp.chmod(part, mode)
                self._sftp.posix_rename(part, path)
        except RemoteFileError:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException, paramiko.SFTPError):
                self._sftp.remove(part)
            raise

    @contextlib.contextmanager
    def _doing(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
            raise self._translate(what, path, error) from error

    def _translate(self, what: str, path: str, error: Exception) -> HostError:
        # A time-out of the file transfer's channel: is it the disk, or the host?
        if isinstance(error, TimeoutError):
            self._connection.check_alive()
        target = self._connection.target
        reason, hint = str(error) or type(error).__name__, None
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EACCES):
            reason = error.strerror or reason
        elif not self._connection.stands():
            return self._connection.lost()
        elif what == "write" or what.startswith("make"):
            free = self._free_space(posixpath.dirname(path) or "/")
            if free is not None:
                # SFTP has no word for a full disk; it says "Failure".
                reason = f"{reason}; {free // 1024} KiB are free on its file system"
                hint = "make room on it, or choose another directory" if free < 1 << 20 else None
        return RemoteFileError(
            target.name, f"cannot {what} {path} on {target.endpoint}: {reason}", hint=hint
        )

    def _free_space(self, directory: str) -> int | None:
        """Bytes that are free where ``directory`` is, if the host can say."""
        try:
            result = self._connection.run(["df", "-Pk", "--", directory], timeout=10)
            return int(result.text.splitlines()[-1].split()[3]) * 1024
        except (HostError, ValueError, IndexError):
            return None
