"""Verification of a checkpoint's records against their checksums."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch

FILE_NAME = "__0_0.distcp"


def write_records(path: Path) -> list[tuple[Any, Any]]:
    """Write three records into one file, with their locations as in a checkpoint's metadata."""
    import torch

    storage_items = []
    with (path / FILE_NAME).open("wb") as file:
        for number in range(3):
            begin = file.tell()
            torch.save(torch.arange(1000) + number, file)
            location = SimpleNamespace(
                relative_path=FILE_NAME, offset=begin, length=file.tell() - begin
            )
            storage_items.append((SimpleNamespace(fqn=f"weight_{number}"), location))
    return storage_items


def flip_bit(path: Path, location: Any) -> None:
    """Change one bit in the middle of a record."""
    with (path / FILE_NAME).open("r+b") as file:
        file.seek(location.offset + location.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("partition_count", [1, 2, 5])
def test_undamaged_records_pass(tmp_path: Path, partition_count: int) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage_items = write_records(tmp_path)
    for partition in range(partition_count):
        verify_checksums(tmp_path, storage_items, partition, partition_count)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_detected_in_its_partition(tmp_path: Path, number: int) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage_items = write_records(tmp_path)
    flip_bit(tmp_path, storage_items[number][1])
    messages = []
    for partition in range(3):
        try:
            verify_checksums(tmp_path, storage_items, partition, 3)
        except CheckpointError as error:
            messages.append(error.message)
    assert len(messages) == 1
    assert messages[0].startswith(
        f"{tmp_path / FILE_NAME}: weight_{number} is not as it was written"
    )


def test_a_truncated_or_missing_file_is_reported(tmp_path: Path) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage_items = write_records(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="weight_2"):
        verify_checksums(tmp_path, storage_items, 0, 1)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify_checksums(tmp_path, storage_items, 0, 1)


def test_records_without_checksums_pass(tmp_path: Path) -> None:
    """The first versions of ``flagscale convert`` wrote none."""
    from torch.serialization import set_crc32_options

    from flagscale.train.checkpoint.checksums import verify_checksums

    set_crc32_options(False)
    try:
        storage_items = write_records(tmp_path)
    finally:
        set_crc32_options(True)
    verify_checksums(tmp_path, storage_items, 0, 1)
