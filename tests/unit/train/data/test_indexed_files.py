"""Truncated, mixed up or missing datasets are reported before anything maps them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flagscale.errors import DataError
from flagscale.train.data.indexed_dataset import (
    MAGIC,
    fingerprint_datasets,
    strip_dataset_suffix,
    validate_dataset,
)


def write_dataset(prefix: Path, documents: list[list[int]], code: int = 8) -> str:
    """Write a dataset in the documented format, with one sequence per document."""
    dtype = {8: np.uint16, 4: np.int32, 7: np.float32}[code]
    lengths = np.array([len(d) for d in documents], np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    index = struct.pack("<9sQBQQ", MAGIC, 1, code, len(documents), len(documents) + 1)
    index += lengths.tobytes() + offsets.tobytes()
    index += np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    flat = np.array([t for d in documents for t in d], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat.tobytes())
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "corp us", [[1, 2, 3], [4], [500, 6]])


def test_a_complete_dataset_is_accepted(prefix: str) -> None:
    dataset = validate_dataset(prefix)
    assert (dataset.sequence_count, dataset.document_count, dataset.dtype) == (
        3,
        3,
        np.dtype(np.uint16),
    )
    assert dataset.map_lengths().tolist() == [3, 1, 2]
    assert dataset.find_token_range()[1] == 500
    assert (
        strip_dataset_suffix(str(dataset.bin)) == strip_dataset_suffix(str(dataset.idx)) == prefix
    )


def test_an_empty_dataset_is_accepted(tmp_path: Path) -> None:
    dataset = validate_dataset(write_dataset(tmp_path / "none", []))
    assert (dataset.sequence_count, dataset.find_token_range()) == (0, (0, -1))


def truncate(suffix: str, size: int) -> Callable[[str], None]:
    def damage(prefix: str) -> None:
        path = Path(prefix + suffix)
        data = path.read_bytes()
        path.write_bytes(data[:size] if size < len(data) else data + b"\0" * (size - len(data)))

    return damage


def overwrite(offset: int, data: bytes) -> Callable[[str], None]:
    def damage(prefix: str) -> None:
        path = Path(prefix + ".idx")
        content = bytearray(path.read_bytes())
        content[offset : offset + len(data)] = data
        path.write_bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncate(".idx", 0), ".idx: truncated: 0 bytes", id="empty-idx"),
        pytest.param(truncate(".idx", 33), "begins with 34 of header", id="cut-header"),
        pytest.param(
            truncate(".idx", 60),
            "truncated: 60 bytes, but 3 sequences in 3 documents take 102",
            id="cut-idx",
        ),
        pytest.param(truncate(".idx", 101), "truncated: 101 bytes", id="one-byte-less"),
        pytest.param(truncate(".idx", 200), "too long: 200 bytes", id="long-idx"),
        pytest.param(
            truncate(".bin", 11),
            ".bin: truncated: 11 bytes, but corp us.idx promises 12",
            id="cut-bin",
        ),
        pytest.param(truncate(".bin", 0), ".bin: truncated: 0 bytes", id="empty-bin"),
        pytest.param(truncate(".bin", 14), ".bin: too long: 14 bytes", id="long-bin"),
        pytest.param(
            overwrite(0, b"PK\x03\x04"), "not a Megatron index: begins with b'PK", id="zip"
        ),
        pytest.param(overwrite(9, b"\x02"), "index version 2, expected 1", id="version"),
        pytest.param(overwrite(17, b"\x63"), "unknown token type code 99", id="code"),
        pytest.param(overwrite(94, b"\x02"), "documents end at sequence 2, expected 3", id="ends"),
        # Header of 34 bytes, 3 lengths of 4 bytes, 3 pointers of 8 bytes, 4 boundaries of 8 bytes.
        pytest.param(overwrite(34, b"\x07"), "damaged: sequence 1 begins", id="length"),
        pytest.param(overwrite(54, b"\0" * 8), "damaged: sequence 1 begins at byte 0", id="zero"),
        pytest.param(overwrite(54, b"\xff" * 4), "damaged: sequence 1 begins", id="far"),
        pytest.param(overwrite(78, b"\x09"), "boundaries are not in order", id="boundaries"),
        pytest.param(
            lambda p: Path(p + ".bin").unlink(),
            "corp us.bin: missing, although corp us.idx next to it exists",
            id="no-bin",
        ),
        pytest.param(lambda p: Path(p + ".idx").unlink(), "corp us.idx: missing", id="no-idx"),
    ],
)
def test_damage_is_reported(prefix: str, damage: Callable[[str], None], message: str) -> None:
    damage(prefix)
    with pytest.raises(DataError) as caught:
        validate_dataset(prefix)
    assert message in str(caught.value)


def test_a_missing_name_gets_a_suggestion(prefix: str) -> None:
    with pytest.raises(DataError, match="there is corp us"):
        validate_dataset(prefix + "_text_document")
    with pytest.raises(DataError, match=r"the directory .* does not exist"):
        validate_dataset("/no/such/place")


def test_fingerprint_changes_with_the_content_alone(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "other").mkdir()
    same = write_dataset(tmp_path / "other" / "name", [[1, 2, 3], [4], [500, 6]])
    shorter = write_dataset(tmp_path / "shorter", [[1, 2], [3, 4], [500, 6]])
    digests = [fingerprint_datasets([validate_dataset(item)]) for item in (prefix, same, shorter)]
    assert digests[0] == digests[1] != digests[2]
    assert fingerprint_datasets([]) != digests[0]
