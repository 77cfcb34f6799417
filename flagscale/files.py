"""Private files and atomic writes. Uses the standard library alone: the agent imports it."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

PRIVATE_DIRECTORY_MODE = 0o700
PRIVATE_FILE_MODE = 0o600


def cache_directory() -> Path:
    """Return the directory of this user's cached files, all of which can be recreated."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "flagscale"


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents with mode 0700.

    Existing directories keep their mode, because they may be shared on purpose.
    """
    missing_directories = []
    while not path.exists():
        missing_directories.append(path)
        path = path.parent
    for directory in reversed(missing_directories):
        directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, exist_ok=True)


def require_private(directory: Path) -> None:
    """Check that no other user can replace or redirect the files of a directory.

    Raises:
        PermissionError: The directory is a symbolic link, belongs to another user, or is writable
            by every user.
    """
    status = directory.lstat()
    # The owner of new files is not always this user: some file systems map root to another one.
    with tempfile.TemporaryFile(dir=directory) as file:
        own_uid = os.fstat(file.fileno()).st_uid
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid != own_uid:
        problem = f"belongs to another user ({_user_name(status.st_uid)})"
    elif status.st_mode & stat.S_IWOTH:
        problem = "is writable by every user"
    else:
        return
    raise PermissionError(errno.EPERM, problem, str(directory))


def require_fixed_names(directory: Path) -> None:
    """Check that not every user can rename what is in a directory.

    Raises:
        PermissionError: The directory is writable by every user and has no sticky bit.
    """
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        problem = "is writable by every user and has no sticky bit"
        raise PermissionError(errno.EPERM, problem, str(directory))


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def require_trusted_file(path: Path, directory: Path) -> None:
    """Check that a file was written by this user or by the owner of ``directory``.

    Raises:
        PermissionError: The file is a symbolic link, or belongs to a third user.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(errno.EPERM, "is a symbolic link", str(path))
    if status.st_uid not in (os.geteuid(), directory.stat().st_uid):
        problem = f"belongs to another user ({_user_name(status.st_uid)})"
        raise PermissionError(errno.EPERM, problem, str(path))


def write_atomic(
    path: Path, text: str, mode: int = PRIVATE_FILE_MODE, *, durable: bool = True
) -> None:
    """Replace a file's content atomically, so that readers see either the old or the new content.

    ``durable`` extends this to a loss of power, at the cost of an fsync.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            _copy_owner(file.fileno(), path)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # ENOSPC does not name the file
        raise


def _copy_owner(descriptor: int, path: Path) -> None:
    """Give a file the owner of the file that it replaces.

    If root ends or inspects a run of another user, that user must still be able to read its
    records.
    """
    if os.geteuid() == 0:
        with suppress(FileNotFoundError):
            status = path.lstat()
            os.fchown(descriptor, status.st_uid, status.st_gid)


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write an object as JSON, atomically; see :func:`write_atomic`."""
    write_atomic(path, format_json(record), durable=durable)


def format_json(record: Mapping[str, Any]) -> str:
    """Return an object as JSON with one line per key and, for lists, one line per item.

    Short lines are readable, and :mod:`json` is ten times as fast as with indentation of
    everything. A long list may be passed as an iterator, so that its items need not exist at the
    same time.
    """
    lines = []
    for key, value in record.items():
        if isinstance(value, list | Iterator):
            items = ",\n  ".join(map(_dump_json, value))
            text = f"[\n  {items}\n ]" if items else "[]"
        else:
            text = _dump_json(value)
        lines.append(f" {_dump_json(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"


def _dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON of plain data: NaN and infinities become null."""

    def replace_nonfinite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: replace_nonfinite(inner) for key, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return [replace_nonfinite(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(replace_nonfinite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def stored_as(key: str) -> dict[str, str]:
    """Return the metadata of a dataclass field whose key in JSON differs from its name.

    With it a field can be renamed while files and messages of other versions remain readable.
    """
    return {"stored_as": key}


@cache
def record_keys(record_type: type) -> dict[str, str]:
    """Return the key in JSON of each field of a dataclass, by name of the field."""
    return {
        field.name: field.metadata.get("stored_as", field.name) for field in fields(record_type)
    }


def to_plain(value: Any) -> Any:
    """Convert dataclasses, mappings and sequences to JSON types, and paths to text.

    Dataclasses become objects whose keys are the field names, or those of :func:`stored_as`.
    Inverse: :func:`flagscale.records.from_record`.
    """
    value_type: Any = type(value)
    if value_type is str or value is None or value_type is int:
        return value
    if is_dataclass(value):
        keys = record_keys(value_type)
        return {keys.get(name, name): to_plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or contains no object."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) else None
