"""Megatron's indexed data sets on disk: what a pair of ``.bin`` and ``.idx`` promises.

megatron.core reads both through memory maps and ends in an assertion, a numpy error or a bus
error when one is cut short. This module reads the index's header first and says what is wrong.

Layout of ``.idx``, little-endian: 9 bytes magic, u64 version 1, u8 dtype code, u64 sequences,
u64 documents; then per sequence its length (i32) and byte offset in ``.bin`` (i64); then the
sequence numbers at which documents begin and end (i64); then, in multimodal sets, a mode (i8) per
sequence.
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
    """A checked pair of ``.bin`` and ``.idx``."""

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

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, memory-mapped. Shape ``[sequences]``."""
        return _array(self.idx, np.int32, _HEADER.size, self.sequences)

    def largest_token(self, sample: int = 1 << 20) -> int:
        """The largest id among the first and the last ``sample`` tokens; -1 without tokens."""
        if not self.sequences or not self.bin.stat().st_size:
            return -1
        tokens = np.memmap(self.bin, mode="r", dtype=self.dtype)
        return int(max(tokens[:sample].max(), tokens[-sample:].max()))


def prefix_of(path: str) -> str:
    """The prefix a path means: ``.bin`` or ``.idx`` at its end is taken off."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def inspect(prefix: str) -> IndexedFiles:
    """Check that an indexed data set is there and whole; costs a few small reads.

    Raises:
        DataError: a file is missing, is no index, or has another size than the index promises.
    """
    idx, binary = Path(prefix + ".idx"), Path(prefix + ".bin")
    _must_exist(prefix, idx, binary)
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
        what = "truncated" if size < expected else "too long"
        raise DataError(
            f"{idx}: {what}: {size} bytes, but {sequences} sequences in {max(entries - 1, 0)} "
            f"documents take {expected}",
            hint="write the data set again with tools/data/preprocess.py",
        )
    files = IndexedFiles(prefix, np.dtype(_DTYPES[code]), sequences, max(entries - 1, 0))
    _check_bin(files, entries)
    return files


def _must_exist(prefix: str, idx: Path, binary: Path) -> None:
    missing = [path for path in (idx, binary) if not path.is_file()]
    if not missing:
        return
    if len(missing) == 1:
        there = binary if missing[0] == idx else idx
        raise DataError(f"{missing[0]}: missing, although {there.name} beside it exists")
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
    found = files.bin.stat().st_size
    expected = 0
    if files.sequences:
        after_lengths = _HEADER.size + 4 * files.sequences
        offset = _array(files.idx, np.int64, after_lengths, files.sequences)[-1]
        expected = int(offset) + int(files.lengths()[-1]) * files.dtype.itemsize
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(
            f"{files.bin}: {what}: {found} bytes, but {files.idx.name} promises {expected}",
            hint="the two files are not of one run; write the data set again",
        )
    begins = _array(files.idx, np.int64, _HEADER.size + 12 * files.sequences, entries)
    if entries == 0 or int(begins[-1]) != files.sequences:
        last = int(begins[-1]) if entries else "nothing"
        raise DataError(
            f"{files.idx}: damaged: documents end at sequence {last}, expected {files.sequences}"
        )


def _array(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype=dtype)
    # The header's length is odd, so the arrays are unaligned: map bytes and view them.
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def fingerprint(data: Iterable[IndexedFiles]) -> str:
    """A short digest that changes when data sets are written anew, equal on every host: sizes
    and both ends of each index, never times or inode numbers."""
    total = hashlib.sha256()
    for files in data:
        size = files.idx.stat().st_size
        total.update(struct.pack("<QQ", size, files.bin.stat().st_size))
        with files.idx.open("rb") as file:
            total.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            total.update(file.read())
    return total.hexdigest()[:16]
