"""Files that a command line names, where each host may have a disk of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from flagscale.errors import ConfigError


class UnreadableFileError(ConfigError):
    """A file of the command line cannot be read on this host. Others may have it, so the rank that
    lacks it says so, whichever it is."""


def read_text(path: Path, name: str) -> str:
    """The text of a file that messages call ``name``.

    Raises:
        UnreadableFileError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFileError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{name}: cannot be read: it is not UTF-8 text") from error


def read_object(path: Path, name: str, expected: str) -> dict[str, Any]:
    """The object in a JSON file that a command has kept.

    Args:
        path: the file.
        name: what messages call it.
        expected: what it should be, in words.

    Raises:
        ConfigError: it cannot be read, or has no object.
    """
    try:
        content = json.loads(read_text(path, name))
    except ValueError as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected {expected}")
    return content


def require_writable(path: Path, flag: str) -> None:
    """Refuse a file that ``flag`` names and that could not be written, before anything is measured.

    Raises:
        ConfigError: its directory is absent or closed to this user, or it is itself one.
    """
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigError(f"{flag} {path}: its directory does not exist")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a directory; expected a file")
    try:
        # The file is replaced by a new one, made beside it. Permissions do not tell of every disk.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from error
