"""Files that a command line names, where each host may have a disk of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flagscale.errors import ConfigError


class UnreadableFileError(ConfigError):
    """A file of the command line cannot be read on this host. Others may have it, so the rank that
    lacks it says so, whichever it is."""


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected {expected}")
    return content
