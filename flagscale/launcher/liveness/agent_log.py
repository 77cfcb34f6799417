"""Output of an agent: lines in the host's output, and records in the run's directory.

A full disk may end the job, but must not end the agent, so write errors are reported and ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.files import write_json
from flagscale.output_streams import escape_controls


def log_line(text: str) -> None:
    """Print a line to the host's output, or to that of the launcher; errors are ignored."""
    if sys.stderr is None:
        return
    with suppress(OSError):
        # A single write, because other threads print lines as well.
        sys.stderr.write(escape_controls(f"flagscale: {text}\n"))
        sys.stderr.flush()


def write_record(
    path: Path, record: Mapping[str, Any], *, expendable_path: Path | None = None
) -> bool:
    """Write a record, and return True if it could be written.

    ``expendable_path`` is a less important file that is removed to make room on a full disk.
    """
    try:
        write_json(path, record)
    except OSError as error:
        if expendable_path is not None:
            with suppress(OSError):
                expendable_path.unlink()
            return write_record(path, record)
        log_line(f"cannot write {path}: {error.strerror}")
        return False
    return True
