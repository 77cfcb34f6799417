"""Validation of Megatron's indexed datasets, pairs of ``.bin`` and ``.idx`` files.

megatron.core memory-maps both files; if one is truncated, it fails in an assertion, a numpy error
or a bus error. This module reads the header of the index first and reports the error.

``.bin`` holds the tokens of all sequences. Layout of ``.idx``, little-endian:

- header: 9 bytes magic, u64 version 1, u8 dtype code, u64 number of sequences, u64 number of
  document boundaries (one more than documents)
- per sequence, its length in tokens (i32)
- per sequence, its byte offset in ``.bin`` (i64)
- the document boundaries: the number of each document's first sequence, then the number of
  sequences (i64)
- in multimodal datasets, a mode per sequence (i8)
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
_INDEX_BLOCK = 1 << 20
"""Number of sequences whose entries are checked at a time."""
_SAMPLES, _SAMPLE_TOKENS = 256, 4096
"""Number and size of the samples in which token ids are checked."""
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
    """A validated pair of ``.bin`` and ``.idx`` files.

    Attributes:
        prefix: path of both without suffix.
        dtype: type of the stored tokens.
        sequence_count: number of sequences.
        document_count: number of documents.
    """

    prefix: str
    dtype: np.dtype[Any]
    sequence_count: int
    document_count: int

    @property
    def bin(self) -> Path:
        return Path(self.prefix + ".bin")

    @property
    def idx(self) -> Path:
        return Path(self.prefix + ".idx")

    def map_lengths(self) -> NDArray[np.int32]:
        """Memory-map the number of tokens of each sequence: int32, ``[sequence_count]``."""
        return _map_array(self.idx, np.int32, _HEADER.size, self.sequence_count)

    def find_token_range(self, tokens_per_end: int = 1 << 20) -> tuple[int, int]:
        """Return the smallest and the largest token id of a part of the tokens; (0, -1) without
        tokens.

        The part consists of ``tokens_per_end`` tokens at both ends and of small samples between
        them. It is enough to notice another tokenizer without reading the whole file; samples are
        checked again when they are read
        (:class:`flagscale.train.data.document_datasets.TextDataset`).
        """
        if not self.sequence_count or not self.bin.stat().st_size:
            return 0, -1
        tokens = np.memmap(self.bin, mode="r", dtype=self.dtype)
        begins = np.linspace(0, max(0, len(tokens) - _SAMPLE_TOKENS), _SAMPLES).astype(np.int64)
        parts = [tokens[:tokens_per_end], tokens[-tokens_per_end:]]
        parts += [tokens[begin : begin + _SAMPLE_TOKENS] for begin in begins.tolist()]
        return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def strip_dataset_suffix(path: str) -> str:
    """Return the prefix of a path: removes a suffix ``.bin`` or ``.idx``."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def validate_dataset(prefix: str) -> IndexedFiles:
    """Validate that an indexed dataset exists and is complete. Reads the index, not the tokens.

    Raises:
        DataError: a file is missing, is not an index, does not have the size that the index
            implies, or the index contradicts itself.
    """
    index_path, tokens_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    _require_files(prefix, index_path, tokens_path)
    index_bytes = index_path.stat().st_size
    if index_bytes < _HEADER.size:
        raise DataError(
            f"{index_path}: truncated: {index_bytes} bytes, but an index begins with "
            f"{_HEADER.size} of header"
        )
    with index_path.open("rb") as file:
        magic, version, dtype_code, sequence_count, boundary_count = _HEADER.unpack(
            file.read(_HEADER.size)
        )
    if magic != MAGIC:
        raise DataError(
            f"{index_path}: not a Megatron index: begins with {magic!r}, expected {MAGIC!r}"
        )
    if version != 1:
        raise DataError(f"{index_path}: index version {version}, expected 1")
    if dtype_code not in _DTYPES:
        raise DataError(f"{index_path}: unknown token type code {dtype_code}, expected one of 1-8")
    expected_bytes = _HEADER.size + 12 * sequence_count + 8 * boundary_count
    if index_bytes not in (expected_bytes, expected_bytes + sequence_count):
        problem = "truncated" if index_bytes < expected_bytes else "too long"
        raise DataError(
            f"{index_path}: {problem}: {index_bytes} bytes, but {sequence_count} sequences in "
            f"{max(boundary_count - 1, 0)} documents take {expected_bytes}",
            hint="write the data set again with tools/data/preprocess.py",
        )
    files = IndexedFiles(
        prefix, np.dtype(_DTYPES[dtype_code]), sequence_count, max(boundary_count - 1, 0)
    )
    _check_bin(files, boundary_count)
    return files


def _require_files(prefix: str, index_path: Path, tokens_path: Path) -> None:
    """Check that both files exist; otherwise suggest datasets with similar names."""
    missing = [path for path in (index_path, tokens_path) if not path.is_file()]
    if not missing:
        return
    if len(missing) == 1:
        existing_path = tokens_path if missing[0] == index_path else index_path
        raise DataError(f"{missing[0]}: missing, although {existing_path.name} next to it exists")
    folder = index_path.parent
    if not folder.is_dir():
        raise DataError(f"{prefix}: no such data set: the directory {folder} does not exist")
    existing_names = [path.stem for path in sorted(folder.glob("*.idx"))]
    similar_names = (
        get_close_matches(Path(prefix).name, existing_names, n=3, cutoff=0.3) or existing_names[:3]
    )
    raise DataError(
        f"{prefix}: no such data set: expected {index_path.name} and {tokens_path.name} in "
        f"{folder}",
        hint=f"there is {', '.join(similar_names)}"
        if similar_names
        else "tools/data/preprocess.py writes them",
    )


def _check_bin(files: IndexedFiles, boundary_count: int) -> None:
    """Check that the index matches the size of ``.bin`` and that its last document is complete."""
    actual_bytes = files.bin.stat().st_size
    expected_bytes = 0
    if files.sequence_count:
        offsets_begin = _HEADER.size + 4 * files.sequence_count
        last_offset = _map_array(files.idx, np.int64, offsets_begin, files.sequence_count)[-1]
        expected_bytes = int(last_offset) + int(files.map_lengths()[-1]) * files.dtype.itemsize
    if actual_bytes != expected_bytes:
        problem = "truncated" if actual_bytes < expected_bytes else "too long"
        raise DataError(
            f"{files.bin}: {problem}: {actual_bytes} bytes, but {files.idx.name} promises "
            f"{expected_bytes}",
            hint="the two files are not of one run; write the data set again",
        )
    boundaries = _map_array(
        files.idx, np.int64, _HEADER.size + 12 * files.sequence_count, boundary_count
    )
    if boundary_count == 0 or int(boundaries[-1]) != files.sequence_count:
        last_boundary = int(boundaries[-1]) if boundary_count else "nothing"
        raise DataError(
            f"{files.idx}: damaged: documents end at sequence {last_boundary}, expected "
            f"{files.sequence_count}"
        )
    _check_index(files, boundaries)


def _check_index(files: IndexedFiles, boundaries: NDArray[np.int64]) -> None:
    """Check that sequences lie one after the other in ``.bin``, and documents in order."""
    lengths, count = files.map_lengths(), files.sequence_count
    offsets = _map_array(files.idx, np.int64, _HEADER.size + 4 * count, count)
    expected_begin = 0
    for begin in range(0, count, _INDEX_BLOCK):
        block = lengths[begin : begin + _INDEX_BLOCK].astype(np.int64)
        ends = expected_begin + np.cumsum(block * files.dtype.itemsize)
        expected = np.concatenate(([expected_begin], ends[:-1]))
        wrong = np.flatnonzero((offsets[begin : begin + _INDEX_BLOCK] != expected) | (block < 0))
        if len(wrong):
            sequence = begin + int(wrong[0])
            raise DataError(
                f"{files.idx}: damaged: sequence {sequence} begins at byte "
                f"{int(offsets[sequence])} and has {int(lengths[sequence])} tokens, but by the "
                f"lengths before it begins at byte {int(expected[wrong[0]])}",
                hint="write the data set again with tools/data/preprocess.py",
            )
        expected_begin = int(ends[-1])
    for begin in range(0, max(len(boundaries) - 1, 0), _INDEX_BLOCK):
        if (np.diff(boundaries[begin : begin + _INDEX_BLOCK + 1]) < 0).any() or boundaries[0] != 0:
            raise DataError(
                f"{files.idx}: damaged: the document boundaries are not in order",
                hint="write the data set again with tools/data/preprocess.py",
            )


def _map_array(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    """Memory-map ``count`` values of an index at a byte offset."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    # The header's length is odd, so the arrays are unaligned: map bytes and view them.
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def fingerprint_datasets(datasets: Iterable[IndexedFiles]) -> str:
    """Fingerprint datasets by the sizes of their files and by both ends of each index.

    The result changes when a dataset is rewritten and is equal on all hosts: it depends neither on
    times nor on inode numbers.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for files in datasets:
        index_bytes = files.idx.stat().st_size
        digest.update(struct.pack("<QQ", index_bytes, files.bin.stat().st_size))
        with files.idx.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, index_bytes - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()[:16]
