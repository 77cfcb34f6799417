"""What an agent writes: lines of the host's output, and records in the run's directory.

A disk may fill up while a job runs. That may end the job, but never the one who watches it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.files import write_json


def say(text: str) -> None:
    """A line in the host's output, if it can be written."""
    with suppress(OSError):
        # In one piece: other threads have lines of their own.
        sys.stderr.write(f"flagscale: {text}\n")
        sys.stderr.flush()


def keep(path: Path, record: Mapping[str, Any], *, instead_of: Path | None = None) -> bool:
    """Write a record, if it can be written; whether it could. ``instead_of`` is a file that the
    record is worth more than: it makes room on a full disk."""
    try:
        write_json(path, record)
    except OSError as error:
        if instead_of is not None:
            with suppress(OSError):
                instead_of.unlink()
            return keep(path, record)
        say(f"cannot write {path}: {error.strerror}")
        return False
    return True
