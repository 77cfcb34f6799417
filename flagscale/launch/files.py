"""Private files, written whole or not at all. Standard library alone: the agent uses it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents, readable by their owner alone. Directories that
    exist keep their mode: they may be shared on purpose."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)


def write_atomic(path: Path, text: str, mode: int = PRIVATE_FILE) -> None:
    """Replace a file's content in one step, so that no reader ever sees half of it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk says nothing of which file
        raise


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no such file or it holds none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) else None
