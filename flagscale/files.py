"""Private files, written whole or not at all. Standard library alone: the agent uses it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600


def cache_directory() -> Path:
    """Where this user's files lie that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "flagscale"


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents, readable by their owner alone. Directories that
    exist keep their mode: they may be shared on purpose."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE, *, durable: bool = True) -> None:
    """Replace a file's content in one step, so that no reader ever sees half of it. ``durable``:
    not even after a loss of power; that costs a write to the disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            _leave_to_owner(file.fileno(), path)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk says nothing of which file
        raise


def _leave_to_owner(descriptor: int, path: Path) -> None:
    """Give a file to whoever has the one that it replaces: where root ends or looks at a run of
    another user's, that user reads on what is written down about it."""
    if os.geteuid() == 0:
        with suppress(FileNotFoundError):
            found = path.lstat()
            os.fchown(descriptor, found.st_uid, found.st_gid)


def sync(path: Path) -> None:
    """Bring a file, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    write_atomic(path, json_text(record), durable=durable)


def json_text(record: Mapping[str, Any]) -> str:
    """An object as JSON, a line for each of its keys and, of its lists, for each item. Short lines
    read well enough, and :mod:`json` is ten times as fast as where it indents everything. A list
    of many items may be an iterator: then they need not exist all at once."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list | Iterator):
            items = ",\n  ".join(map(_json, value))
            text = f"[\n  {items}\n ]" if items else "[]"
        else:
            text = _json(value)
        lines.append(f" {_json(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes, of plain data: null for what is no number or infinite."""

    def finite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: finite(inner) for key, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return [finite(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as what JSON knows; paths as text."""
    kind = type(value)
    if kind is str or value is None or kind is int:
        return value
    if is_dataclass(value):
        return {name: plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no such file or it holds none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) else None
