"""Record of the run at a metrics sink that a training continues.

The record is stored next to the checkpoints, because a run that continues from them is the same
training. A training that begins anew gets a new run.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flagscale.files import read_json, write_json


class RunRecord:
    """Id of a run at a metrics sink: in memory, and in a file for the next start."""

    def __init__(
        self, path: Path | None, location: Mapping[str, str | None], *, is_continued: bool
    ) -> None:
        """Create the record.

        Args:
            path: file of the record. None: the next start cannot continue the run, because training
                saves no checkpoints or only evaluates.
            location: place of the run at the sink. A run at another place is not continued.
            is_continued: whether this training continues from a checkpoint or was restarted.
        """
        self._path = path
        self._location = location
        self._id = self._read_file() if is_continued else None

    def read_id(self) -> str | None:
        """Return the id of the run to continue; None if a new run begins."""
        return self._id

    def read_or_create_id(self, size: int) -> str:
        """Return the id of the run to continue, or a new one of ``size`` random bytes, stored."""
        if self._id is None:
            self.write_id(secrets.token_hex(size))
        return str(self._id)

    def write_id(self, run_id: str) -> None:
        """Store the id. If the file cannot be written, the next start begins another run."""
        self._id = run_id
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"id": run_id, **self._location}, durable=False)

    def _read_file(self) -> str | None:
        if self._path is None:
            return None
        with suppress(OSError):
            record = read_json(self._path) or {}
            if isinstance(record.get("id"), str) and self._location.items() <= record.items():
                return str(record["id"])
        return None
