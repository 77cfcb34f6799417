"""Reading text corpora: which documents are in which bytes of which files.

A corpus is a list of files. Each is cut into :class:`Piece` ranges of bytes that worker processes
read on their own, so one huge file keeps all of them busy. Every error names file and line.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flagscale.errors import DataError

Format = Literal["jsonl", "text", "lines"]
"""``jsonl``: a JSON object a line; ``text``: a file is a document (a huge file several, of
``TEXT_BYTES`` each); ``lines``: a line is a document."""

PIECE_BYTES = 4 << 20
TEXT_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}


@dataclass(frozen=True)
class Piece:
    """Bytes ``[begin, end)`` of a file: whole lines. With format ``text`` it is one document."""

    path: Path
    begin: int
    end: int
    format: Format


class BadRecordError(Exception):
    """A document cannot be read. Knows the byte; the line is counted only when it is reported."""

    def __init__(self, path: Path, offset: int, message: str) -> None:
        super().__init__(path, offset, message)
        self.path = path
        self.offset = offset
        self.message = message

    def located(self) -> DataError:
        """The error for the user: ``file:line: message``."""
        line = 1
        with self.path.open("rb") as file:
            left = self.offset
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                line += block.count(b"\n")
                left -= len(block)
        return DataError(f"{self.path}:{line}: {self.message}")


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that paths, directories and globs name; each once, in the order given and, within a
    glob or a directory, sorted by name.

    Raises:
        DataError: a pattern matches no file.
    """
    found: dict[Path, None] = {}
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
        found.update(dict.fromkeys(matches))
    return list(found)


def format_of(path: Path) -> Format:
    """The format a file's name tells: ``.jsonl``, ``.ndjson`` and ``.json`` hold JSON lines."""
    return "jsonl" if path.suffix.lower() in _JSON_SUFFIXES else "text"


def cut(path: Path, kind: Format, piece_bytes: int | None = None) -> Iterator[Piece]:
    """The pieces of a file, in order; each ends after a newline or at the end of the file."""
    step = piece_bytes or (TEXT_BYTES if kind == "text" else PIECE_BYTES)
    size = path.stat().st_size
    begin = 0
    with path.open("rb") as file:
        while begin < size:
            file.seek(min(begin + step, size))
            file.readline()
            end = min(file.tell(), size)
            yield Piece(path, begin, end, kind)
            begin = end


def read(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The documents of a piece: one text for each of ``keys`` (text formats have one).

    Raises:
        BadRecordError: bytes that are no UTF-8, no JSON, no object, or lack a key.
    """
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        if piece.format == "text":
            data = file.read(piece.end - piece.begin)
            body = data.removeprefix(_BOM) if piece.begin == 0 else data
            yield (_decode(body, piece.path, piece.begin),)
            return
        offset = piece.begin
        while offset < piece.end:
            line = file.readline()
            body = line.removeprefix(_BOM) if offset == 0 else line
            if body.strip():
                text = _decode(body, piece.path, offset)
                if piece.format == "lines":
                    yield (text.rstrip("\r\n"),)
                else:
                    yield _fields(text, keys, piece.path, offset)
            offset += len(line)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = offset + error.start
        hint = "; the file looks gzip-compressed" if data[:2] == b"\x1f\x8b" else ""
        raise BadRecordError(
            path, where, f"not UTF-8: byte 0x{data[error.start]:02x} at offset {where}{hint}"
        ) from None


def _fields(text: str, keys: Sequence[str], path: Path, offset: int) -> tuple[str, ...]:
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
        values.append(_without_lone_surrogates(value))
    return tuple(values)


def _without_lone_surrogates(text: str) -> str:
    """JSON can spell half of a character (``\\ud83d``, from texts cut at a number of UTF-16
    units), which no tokenizer takes. It becomes U+FFFD, as a decoder would have made it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def slices(text: str, limit: int = 1 << 20) -> Iterator[str]:
    """A text in slices of about ``limit`` characters, cut after newlines where it has any, so
    that a tokenizer's memory stays bounded on a document of gigabytes."""
    begin = 0
    while len(text) - begin > limit:
        end = text.rfind("\n", begin, begin + limit) + 1
        end = end if end > begin else begin + limit
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]
