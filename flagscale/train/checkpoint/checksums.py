"""CRC-32 verification of the tensors of a distributed checkpoint (``verify_checkpoint``).

``torch.save`` writes each tensor as a zip archive with the CRC-32 of every record. torch's reader
ignores these checksums.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.byte_range_file import ByteRangeFile

_BUFFER_BYTES = 1 << 20


def verify_checksums(path: Path, storage_items: Any, partition: int, partition_count: int) -> None:
    """Verify the checksums of one partition of a checkpoint's records.

    Args:
        path: directory of the checkpoint.
        storage_items: items of ``storage_data`` of its ``.metadata``.
        partition: index of the partition to read, from 0; usually the rank.
        partition_count: number of partitions of about the same size; usually the number of ranks.

    Raises:
        CheckpointError: a record cannot be read or its checksum differs.
    """
    tensor_names = {
        (location.relative_path, location.offset, location.length): key
        for key, location in storage_items
    }
    for name, offset, length in sorted(tensor_names)[partition::partition_count]:
        fqn = getattr(tensor_names[name, offset, length], "fqn", "")
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {fqn}: {name!r} is not a file next to its metadata")
        try:
            with (path / name).open("rb") as file:
                verify_archive(io.BufferedReader(_FileRange(file, offset, length), _BUFFER_BYTES))
        except (OSError, zipfile.BadZipFile) as error:
            message = f"{path / name}: {fqn} is not as it was written: {error}"
            raise CheckpointError(
                message, hint="remove this checkpoint to continue from the previous one"
            ) from error


def verify_archive(file: io.BufferedIOBase) -> None:
    """Verify the checksums of a zip archive, by reading all of its records.

    Raises:
        BadZipFile: a checksum differs.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # the first versions of flagscale convert wrote no checksums
                continue
            with archive.open(record) as content:
                while content.read(_BUFFER_BYTES):
                    pass


class _FileRange(ByteRangeFile):
    """A byte range of an open file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__(length)
        self._file, self._offset = file, offset

    def _read_at(self, position: int, buffer: memoryview) -> int:
        self._file.seek(self._offset + position)
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]
