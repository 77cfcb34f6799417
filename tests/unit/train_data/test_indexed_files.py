"""A data set that is cut, mixed up or missing is told in words, before anything maps it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flagscale.errors import DataError
from flagscale.train.data.indexed import MAGIC, fingerprint, inspect, prefix_of


def write(prefix: Path, documents: list[list[int]], code: int = 8) -> str:
    """A data set by the format's own words, one sequence a document."""
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
    return write(tmp_path / "corp us", [[1, 2, 3], [4], [500, 6]])


def test_a_whole_data_set(prefix: str) -> None:
    found = inspect(prefix)
    assert (found.sequences, found.documents, found.dtype) == (3, 3, np.dtype(np.uint16))
    assert found.lengths().tolist() == [3, 1, 2]
    assert found.largest_token() == 500
    assert prefix_of(str(found.bin)) == prefix_of(str(found.idx)) == prefix


def test_an_empty_data_set(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "none", []))
    assert (found.sequences, found.largest_token()) == (0, -1)


def cut(suffix: str, size: int) -> Callable[[str], None]:
    def damage(prefix: str) -> None:
        path = Path(prefix + suffix)
        data = path.read_bytes()
        path.write_bytes(data[:size] if size < len(data) else data + b"\0" * (size - len(data)))

    return damage


def patch(offset: int, data: bytes) -> Callable[[str], None]:
    def damage(prefix: str) -> None:
        path = Path(prefix + ".idx")
        whole = bytearray(path.read_bytes())
        whole[offset : offset + len(data)] = data
        path.write_bytes(whole)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(cut(".idx", 0), ".idx: truncated: 0 bytes", id="empty-idx"),
        pytest.param(cut(".idx", 33), "begins with 34 of header", id="cut-header"),
        pytest.param(
            cut(".idx", 60),
            "truncated: 60 bytes, but 3 sequences in 3 documents take 102",
            id="cut-idx",
        ),
        pytest.param(cut(".idx", 101), "truncated: 101 bytes", id="one-byte-less"),
        pytest.param(cut(".idx", 200), "too long: 200 bytes", id="long-idx"),
        pytest.param(
            cut(".bin", 11), ".bin: truncated: 11 bytes, but corp us.idx promises 12", id="cut-bin"
        ),
        pytest.param(cut(".bin", 0), ".bin: truncated: 0 bytes", id="empty-bin"),
        pytest.param(cut(".bin", 14), ".bin: too long: 14 bytes", id="long-bin"),
        pytest.param(patch(0, b"PK\x03\x04"), "not a Megatron index: begins with b'PK", id="zip"),
        pytest.param(patch(9, b"\x02"), "index version 2, expected 1", id="version"),
        pytest.param(patch(17, b"\x63"), "unknown token type code 99", id="code"),
        pytest.param(patch(94, b"\x02"), "documents end at sequence 2, expected 3", id="ends"),
        pytest.param(
            lambda p: Path(p + ".bin").unlink(),
            "corp us.bin: missing, although corp us.idx beside it exists",
            id="no-bin",
        ),
        pytest.param(lambda p: Path(p + ".idx").unlink(), "corp us.idx: missing", id="no-idx"),
    ],
)
def test_damage(prefix: str, damage: Callable[[str], None], message: str) -> None:
    damage(prefix)
    with pytest.raises(DataError) as caught:
        inspect(prefix)
    assert message in str(caught.value)


def test_a_name_that_is_not_there_gets_the_nearest(prefix: str) -> None:
    with pytest.raises(DataError, match="there is corp us"):
        inspect(prefix + "_text_document")
    with pytest.raises(DataError, match=r"the directory .* does not exist"):
        inspect("/no/such/place")


def test_fingerprint_changes_with_the_content_alone(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "other").mkdir()
    same = write(tmp_path / "other" / "name", [[1, 2, 3], [4], [500, 6]])
    shorter = write(tmp_path / "shorter", [[1, 2], [3, 4], [500, 6]])
    digests = [fingerprint([inspect(item)]) for item in (prefix, same, shorter)]
    assert digests[0] == digests[1] != digests[2]
    assert fingerprint([]) != digests[0]
