"""Reader of text corpora: cuts files into byte ranges and parses the documents in a range.

A corpus is a list of files. Worker processes read :class:`CorpusChunk` ranges independently, so
that one large file keeps all of them busy. Every error names file and line.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flagscale.errors import DataError

CorpusFormat = Literal["jsonl", "text", "lines"]
"""Format of a file: ``jsonl``, one JSON object per line; ``text``, one document per file (large
files: one per ``TEXT_BYTES``); ``lines``, one document per line.
"""

CHUNK_BYTES = 4 << 20
TEXT_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}


@dataclass(frozen=True)
class CorpusChunk:
    """Whole lines in bytes ``[begin, end)`` of a file; in format ``text``, one document."""

    path: Path
    begin: int
    end: int
    format: CorpusFormat


class BadRecordError(Exception):
    """A document that cannot be read, with its byte offset in the file.

    The line number is computed only when the error is reported.
    """

    def __init__(self, path: Path, offset: int, message: str) -> None:
        super().__init__(path, offset, message)
        self.path = path
        self.offset = offset
        self.message = message

    def to_data_error(self) -> DataError:
        """Return the error for the user: ``file:line: message``."""
        line = 1
        with self.path.open("rb") as file:
            remaining = self.offset
            while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
                line += block.count(b"\n")
                remaining -= len(block)
        return DataError(f"{self.path}:{line}: {self.message}")


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """List the files that paths, directories and globs match, each once.

    Patterns keep their order; the matches of a directory or a glob are sorted by name.

    Raises:
        DataError: a pattern matches no file.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():  # a file's name may hold glob characters
            matches = [path]
        elif path.is_dir():
            matches = sorted(item for item in path.rglob("*") if item.is_file())
        else:
            matches = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
            matches = [item for item in matches if item.is_file()]
        if not matches:
            raise DataError(f"{pattern}: no such input file, and nothing matches it as a glob")
        files.update(dict.fromkeys(matches))
    return list(files)


def guess_format(path: Path) -> CorpusFormat:
    """Guess a file's format from its name: ``.jsonl``, ``.ndjson`` and ``.json`` are JSON lines."""
    return "jsonl" if path.suffix.lower() in _JSON_SUFFIXES else "text"


def split_file(
    path: Path, file_format: CorpusFormat, chunk_bytes: int | None = None
) -> Iterator[CorpusChunk]:
    """Yield the chunks of a file, in order. Each ends after a newline or at the end of the file.

    Args:
        chunk_bytes: approximate size of a chunk in bytes.
    """
    step = chunk_bytes or (TEXT_BYTES if file_format == "text" else CHUNK_BYTES)
    size = path.stat().st_size
    begin = 0
    with path.open("rb") as file:
        while begin < size:
            file.seek(min(begin + step, size))
            file.readline()
            end = min(file.tell(), size)
            yield CorpusChunk(path, begin, end, file_format)
            begin = end


def read_documents(chunk: CorpusChunk, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the documents of a chunk.

    Returns:
        For each document, one text for each of ``keys``. Text formats have one text.

    Raises:
        BadRecordError: a line is not UTF-8, not a JSON object, or lacks a key.
    """
    with chunk.path.open("rb") as file:
        file.seek(chunk.begin)
        if chunk.format == "text":
            data = file.read(chunk.end - chunk.begin)
            body = data.removeprefix(_BOM) if chunk.begin == 0 else data
            yield (_decode(body, chunk.path, chunk.begin),)
            return
        offset = chunk.begin
        while offset < chunk.end:
            line = file.readline()
            body = line.removeprefix(_BOM) if offset == 0 else line
            if body.strip():
                text = _decode(body, chunk.path, offset)
                if chunk.format == "lines":
                    yield (text.rstrip("\r\n"),)
                else:
                    yield _parse_fields(text, keys, chunk.path, offset)
            offset += len(line)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        position = offset + error.start
        hint = "; the file looks gzip-compressed" if data[:2] == b"\x1f\x8b" else ""
        raise BadRecordError(
            path, position, f"not UTF-8: byte 0x{data[error.start]:02x} at offset {position}{hint}"
        ) from None


def _parse_fields(text: str, keys: Sequence[str], path: Path, offset: int) -> tuple[str, ...]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise BadRecordError(path, offset, f"not JSON: {error}") from None
    except RecursionError:
        raise BadRecordError(path, offset, "not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise BadRecordError(path, offset, f"expected a JSON object a line, found {kind}")
    values = []
    for key in keys:
        if key not in record:
            has = ", ".join(repr(name) for name in list(record)[:8]) or "none"
            raise BadRecordError(path, offset, f"no key {key!r}; the object has {has}")
        value = record[key]
        if not isinstance(value, str):
            kind = type(value).__name__
            raise BadRecordError(path, offset, f"key {key!r} holds {kind}, expected a string")
        values.append(_replace_lone_surrogates(value))
    return tuple(values)


def _replace_lone_surrogates(text: str) -> str:
    r"""Replace lone surrogates by U+FFFD, as a decoder would.

    JSON can encode half of a surrogate pair (``\\ud83d``, from texts cut at a UTF-16 unit), which
    no tokenizer accepts.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def slice_text(text: str, limit: int = 1 << 20) -> Iterator[str]:
    """Yield a text in slices of about ``limit`` characters, cut after newlines where possible.

    This bounds a tokenizer's memory on documents of gigabytes.
    """
    begin = 0
    while len(text) - begin > limit:
        end = text.rfind("\n", begin, begin + limit) + 1
        end = end if end > begin else begin + limit
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]
