"""Files that a benchmark's command line names. Hosts need not share a disk."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from flagscale.errors import ConfigError


class UnreadableFileError(ConfigError):
    """A file of the command line cannot be read on this host. Other hosts may have the file.
    Therefore not only rank 0 reports this error.
    """


def read_text(path: Path, name: str) -> str:
    """Read the text of a file. ``name`` is the description of the file in error messages.

    Raises:
        UnreadableFileError: the file cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFileError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{name}: cannot be read: it is not UTF-8 text") from error


def read_object(path: Path, name: str, expected: str) -> dict[str, Any]:
    """Read a JSON object that a command has written.

    Args:
        path: file to read.
        name: description of the file in error messages.
        expected: description of the expected content.

    Raises:
        ConfigError: the file cannot be read, or contains no object.
    """
    try:
        content = json.loads(read_text(path, name))
    except ValueError as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected {expected}")
    return content


def require_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before anything is measured.

    Raises:
        ConfigError: its directory is absent or not writable, or it is a directory itself.
    """
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigError(f"{flag} {path}: its directory does not exist")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a directory; expected a file")
    try:
        # Results are written to a new file that replaces the old one. Permissions alone do not show
        # whether every disk is writable.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from error
