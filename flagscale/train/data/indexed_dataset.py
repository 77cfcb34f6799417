"""Validation of Megatron's indexed datasets, pairs of ``.bin`` and ``.idx`` files.

megatron.core memory-maps both files; if one is truncated, it fails in an assertion, a numpy error
or a bus error. This module reads the header of the index first and reports the error.

Layout of ``.idx``, little-endian: 9 bytes magic, u64 version 1, u8 dtype code, u64 sequences, u64
documents; then, per sequence, its length (i32) and its byte offset in ``.bin`` (i64); then the
sequence numbers at which documents begin and end (i64); then, in multimodal datasets, a mode (i8)
per sequence.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flagscale.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


@dataclass(frozen=True)
class IndexedFiles:
    """A validated pair of ``.bin`` and ``.idx`` files."""

    prefix: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def bin(self) -> Path:
        return Path(self.prefix + ".bin")

    @property
    def idx(self) -> Path:
        return Path(self.prefix + ".idx")

    def map_lengths(self) -> NDArray[np.int32]:
        """Memory-map the number of tokens of each sequence: int32, shape ``[sequences]``."""
        return _map_array(self.idx, np.int32, _HEADER.size, self.sequences)

    def find_largest_token(self, sample: int = 1 << 20) -> int:
        """Return the largest of the first and last ``sample`` token ids; -1 without tokens."""
        if not self.sequences or not self.bin.stat().st_size:
            return -1
        tokens = np.memmap(self.bin, mode="r", dtype=self.dtype)
        return int(max(tokens[:sample].max(), tokens[-sample:].max()))


def prefix_of(path: str) -> str:
    """Return the prefix of a path: removes a suffix ``.bin`` or ``.idx``."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def validate_dataset(prefix: str) -> IndexedFiles:
    """Validate that an indexed dataset exists and is complete, with a few small reads.

    Raises:
        DataError: a file is missing, is not an index, or does not have the size that the index
            implies.
    """
    idx, binary = Path(prefix + ".idx"), Path(prefix + ".bin")
    _require_files(prefix, idx, binary)
    size = idx.stat().st_size
    if size < _HEADER.size:
        raise DataError(
            f"{idx}: truncated: {size} bytes, but an index begins with {_HEADER.size} of header"
        )
    with idx.open("rb") as file:
        magic, version, code, sequences, entries = _HEADER.unpack(file.read(_HEADER.size))
    if magic != MAGIC:
        raise DataError(f"{idx}: not a Megatron index: begins with {magic!r}, expected {MAGIC!r}")
    if version != 1:
        raise DataError(f"{idx}: index version {version}, expected 1")
    if code not in _DTYPES:
        raise DataError(f"{idx}: unknown token type code {code}, expected one of 1-8")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):
        problem = "truncated" if size < expected else "too long"
        raise DataError(
            f"{idx}: {problem}: {size} bytes, but {sequences} sequences in {max(entries - 1, 0)} "
            f"documents take {expected}",
            hint="write the data set again with tools/data/preprocess.py",
        )
    files = IndexedFiles(prefix, np.dtype(_DTYPES[code]), sequences, max(entries - 1, 0))
    _check_bin(files, entries)
    return files


def _require_files(prefix: str, idx: Path, binary: Path) -> None:
    missing = [path for path in (idx, binary) if not path.is_file()]
    if not missing:
        return
    if len(missing) == 1:
        existing = binary if missing[0] == idx else idx
        raise DataError(f"{missing[0]}: missing, although {existing.name} beside it exists")
    folder = idx.parent
    if not folder.is_dir():
        raise DataError(f"{prefix}: no such data set: the directory {folder} does not exist")
    stems = [path.stem for path in sorted(folder.glob("*.idx"))]
    near = get_close_matches(Path(prefix).name, stems, n=3, cutoff=0.3) or stems[:3]
    raise DataError(
        f"{prefix}: no such data set: expected {idx.name} and {binary.name} in {folder}",
        hint=f"there is {', '.join(near)}" if near else "tools/data/preprocess.py writes them",
    )


def _check_bin(files: IndexedFiles, entries: int) -> None:
    actual = files.bin.stat().st_size
    expected = 0
    if files.sequences:
        after_lengths = _HEADER.size + 4 * files.sequences
        offset = _map_array(files.idx, np.int64, after_lengths, files.sequences)[-1]
        expected = int(offset) + int(files.map_lengths()[-1]) * files.dtype.itemsize
    if actual != expected:
        problem = "truncated" if actual < expected else "too long"
        raise DataError(
            f"{files.bin}: {problem}: {actual} bytes, but {files.idx.name} promises {expected}",
            hint="the two files are not of one run; write the data set again",
        )
    begins = _map_array(files.idx, np.int64, _HEADER.size + 12 * files.sequences, entries)
    if entries == 0 or int(begins[-1]) != files.sequences:
        last = int(begins[-1]) if entries else "nothing"
        raise DataError(
            f"{files.idx}: damaged: documents end at sequence {last}, expected {files.sequences}"
        )


def _map_array(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype=dtype)
    # The header's length is odd, so the arrays are unaligned: map bytes and view them.
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def fingerprint_datasets(data: Iterable[IndexedFiles]) -> str:
    """Fingerprint datasets by their sizes and both ends of each index.

    The result changes when a dataset is rewritten and is equal on all hosts: it depends neither on
    times nor on inode numbers.
    """
    digest = hashlib.sha256()
    for files in data:
        size = files.idx.stat().st_size
        digest.update(struct.pack("<QQ", size, files.bin.stat().st_size))
        with files.idx.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()[:16]
