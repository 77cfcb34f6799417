"""Verification of a checkpoint's records against their checksums."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch

FILE = "__0_0.distcp"


def checkpoint(path: Path) -> list[tuple[Any, Any]]:
    """Write three records into one file, with their locations as in a checkpoint's metadata."""
    import torch

    storage = []
    with (path / FILE).open("wb") as file:
        for number in range(3):
            begin = file.tell()
            torch.save(torch.arange(1000) + number, file)
            place = SimpleNamespace(relative_path=FILE, offset=begin, length=file.tell() - begin)
            storage.append((SimpleNamespace(fqn=f"weight_{number}"), place))
    return storage


def damage(path: Path, place: Any) -> None:
    """Change one bit in the middle of a record."""
    with (path / FILE).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_undamaged_records_pass(tmp_path: Path, parts: int) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage = checkpoint(tmp_path)
    for part in range(parts):
        verify_checksums(tmp_path, storage, part, parts)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_detected_in_its_share(tmp_path: Path, number: int) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage = checkpoint(tmp_path)
    damage(tmp_path, storage[number][1])
    detected = []
    for part in range(3):
        try:
            verify_checksums(tmp_path, storage, part, 3)
        except CheckpointError as error:
            detected.append(error.message)
    assert len(detected) == 1
    assert detected[0].startswith(f"{tmp_path / FILE}: weight_{number} is not as it was written")


def test_a_truncated_or_missing_file(tmp_path: Path) -> None:
    from flagscale.train.checkpoint.checksums import verify_checksums

    storage = checkpoint(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="weight_2"):
        verify_checksums(tmp_path, storage, 0, 1)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify_checksums(tmp_path, storage, 0, 1)


def test_records_without_checksums_pass(tmp_path: Path) -> None:
    """The first versions of ``flagscale convert`` wrote none."""
    from torch.serialization import set_crc32_options

    from flagscale.train.checkpoint.checksums import verify_checksums

    set_crc32_options(False)
    try:
        storage = checkpoint(tmp_path)
    finally:
        set_crc32_options(True)
    verify_checksums(tmp_path, storage, 0, 1)
