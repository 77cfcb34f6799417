"""The checksums of what a distributed checkpoint holds.

``torch.save`` writes each tensor as a zip archive, with the CRC-32 of every record; torch's reader
does not look at them.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.window import Window

_PIECE = 1 << 20


def verify(path: Path, storage: Any, part: int, parts: int) -> None:
    """Read one of ``parts`` equal parts of a checkpoint's records and compare their checksums.

    Args:
        path: the checkpoint.
        storage: what its ``.metadata`` calls ``storage_data``.

    Raises:
        CheckpointError: a record is not as it was written.
    """
    places = {(place.relative_path, place.offset, place.length): key for key, place in storage}
    for name, offset, length in sorted(places)[part::parts]:
        said = getattr(places[name, offset, length], "fqn", "")
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {said}: {name!r} is no file beside its metadata")
        try:
            with (path / name).open("rb") as file:
                _compare(_Window(file, offset, length))
        except (OSError, zipfile.BadZipFile) as error:
            message = f"{path / name}: {said} is not as it was written: {error}"
            raise CheckpointError(
                message, hint="remove this checkpoint to go on from the one before it"
            ) from error


def _compare(window: _Window) -> None:
    with zipfile.ZipFile(io.BufferedReader(window, _PIECE)) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # flagscale convert wrote none in its first versions
                continue
            with archive.open(record) as content:
                while content.read(_PIECE):
                    pass


class _Window(Window):
    """A part of a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__(length)
        self._file, self._offset = file, offset

    def _copy(self, at: int, part: memoryview) -> int:
        self._file.seek(self._offset + at)
        return int(self._file.readinto(part))  # type: ignore[attr-defined]
