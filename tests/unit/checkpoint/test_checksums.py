"""Records of a checkpoint against their checksums."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch

FILE = "__0_0.distcp"


def written(path: Path) -> list[tuple[Any, Any]]:
    """Three records in one file, as a checkpoint's metadata places them."""
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
def test_what_is_whole_passes(tmp_path: Path, parts: int) -> None:
    from flagscale.train.checkpoint.checksums import verify

    storage = written(tmp_path)
    for part in range(parts):
        verify(tmp_path, storage, part, parts)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_bit_is_found_by_the_part_that_has_it(tmp_path: Path, number: int) -> None:
    from flagscale.train.checkpoint.checksums import verify

    storage = written(tmp_path)
    damage(tmp_path, storage[number][1])
    found = []
    for part in range(3):
        try:
            verify(tmp_path, storage, part, 3)
        except CheckpointError as error:
            found.append(error.message)
    assert len(found) == 1
    assert found[0].startswith(f"{tmp_path / FILE}: weight_{number} is not as it was written")


def test_a_file_that_is_cut_or_gone(tmp_path: Path) -> None:
    from flagscale.train.checkpoint.checksums import verify

    storage = written(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="weight_2"):
        verify(tmp_path, storage, 0, 1)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify(tmp_path, storage, 0, 1)


def test_what_has_no_checksums_passes(tmp_path: Path) -> None:
    """As the first versions of ``flagscale convert`` wrote it."""
    from torch.serialization import set_crc32_options

    from flagscale.train.checkpoint.checksums import verify

    set_crc32_options(False)
    try:
        storage = written(tmp_path)
    finally:
        set_crc32_options(True)
    verify(tmp_path, storage, 0, 1)
