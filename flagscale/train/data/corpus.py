"""Reader of text corpora: cuts files into chunks and parses the documents of a chunk.

A corpus is a list of files, some of which may be compressed or Parquet, or standard input. Worker
processes parse :class:`CorpusChunk` objects independently, so that one large file keeps all of them
busy. Every error names file and line.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any, Literal, cast

from flagscale.errors import DataError

CorpusFormat = Literal["jsonl", "text", "lines", "parquet"]
"""Format of a file: ``jsonl``, one JSON object per line; ``text``, one document per file (large
files: one per ``TEXT_BYTES``); ``lines``, one document per line; ``parquet``, one document per row.
"""

STDIN = Path("-")
"""Standard input. It is JSON lines unless another format is given."""
CHUNK_BYTES = 4 << 20
TEXT_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"
_FORMATS_BY_SUFFIX: dict[str, CorpusFormat] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".jl"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_MAGIC_BY_COMPRESSION = {
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".xz": b"\xfd7zXZ\x00",
    ".bz2": b"BZh",
}

_SKIPPED_PATTERNS = {
    "editor or backup file": ("*~", "#*#", "*.swp", "*.swo", "*.bak", "*.orig", "*.tmp", "*.part"),
    "description of the data": (
        "README*",
        "LICENSE*",
        "LICENCE*",
        "CHANGELOG*",
        "dataset_info*.json",
        "state.json",
    ),
}
"""Patterns of file names that a search skips, by the reason. Hidden files and those in
``_TOOL_DIRECTORIES`` are skipped too."""
_LINES_HINT = "; `jq -c '.[]'` writes the items of a JSON list as lines"
_TOOL_DIRECTORIES = ("__pycache__", "CVS")


@dataclass(frozen=True)
class CorpusFiles:
    """Files that patterns match.

    Attributes:
        files: the files to read, each once.
        skipped: the reason of each file that was skipped.
    """

    files: tuple[Path, ...]
    skipped: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusChunk:
    """Part of a file that holds whole documents.

    Attributes:
        path: the file.
        begin: first byte, or first row group of a Parquet file.
        end: byte or row group behind the last one.
        format: format of the file.
        data: content, if a worker cannot read it from the file at ``begin`` (compressed files and
            standard input).
        first_line: number of the first line of ``data``, counted from 1.
        input_bytes: bytes of the input that the chunk accounts for in progress reports.
    """

    path: Path
    begin: int
    end: int
    format: CorpusFormat
    data: bytes | None = None
    first_line: int = 1
    input_bytes: int = 0


class BadRecordError(Exception):
    """A document that cannot be read, with its location.

    ``location`` is a byte offset in the file, of which the line number is computed only when the
    error is reported, or a text such as ``row 3``.
    """

    def __init__(self, path: Path, location: int | str, message: str) -> None:
        super().__init__(path, location, message)
        self.path = path
        self.location = location
        self.message = message

    def to_data_error(self) -> DataError:
        """Return the error for the user: ``file:line: message``."""
        if isinstance(self.location, str):
            return DataError(f"{self.path}:{self.location}: {self.message}")
        line = 1
        with self.path.open("rb") as file:
            remaining = self.location
            while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
                line += block.count(b"\n")
                remaining -= len(block)
        return DataError(f"{self.path}:{line}: {self.message}")


def find_inputs(patterns: Sequence[str]) -> CorpusFiles:
    """List the files that paths, directories and globs match, each once.

    Patterns keep their order; the matches of a directory or a glob are sorted by name. In a
    directory or a glob these files are skipped: hidden ones (version control, notebook
    checkpoints), backup files of editors, and descriptions such as README. A file that is named by
    itself is always read.

    Args:
        patterns: files, directories (searched recursively), globs, or ``-`` for standard input.

    Raises:
        DataError: a pattern matches no file.
    """
    files: dict[Path, None] = {}
    skipped: dict[Path, str] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path == STDIN or path.is_file():  # a file's name may hold glob characters
            files[path] = None
            continue
        if path.is_dir():
            root, matches = path, sorted(item for item in path.rglob("*") if item.is_file())
        else:
            root = Path()
            matches = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
            matches = [item for item in matches if item.is_file()]
        reasons = {item: _explain_skip(item, root) for item in matches}
        skipped.update({item: reason for item, reason in reasons.items() if reason})
        chosen = [item for item, reason in reasons.items() if not reason]
        if not chosen:
            message = f"{pattern}: no such input file, and nothing matches it as a glob"
            if matches:
                names = ", ".join(item.name for item in matches[:5])
                message = f"{pattern}: contains no data, only {names}"
            raise DataError(message, hint="name a file by itself to read it" if matches else None)
        files.update(dict.fromkeys(chosen))
    return CorpusFiles(tuple(files), {p: r for p, r in skipped.items() if p not in files})


def _explain_skip(path: Path, root: Path) -> str:
    """Return why a search below ``root`` skips a file; empty if it does not."""
    parts = path.relative_to(root).parts if root.parts else (path.name,)
    if any(part.startswith(".") for part in parts):
        return "hidden"
    if any(part in _TOOL_DIRECTORIES for part in parts[:-1]):
        return "file of a tool"
    for reason, patterns in _SKIPPED_PATTERNS.items():
        if any(fnmatch(path.name, pattern) for pattern in patterns):
            return reason
    return ""


def guess_format(path: Path) -> CorpusFormat:
    """Return a file's format by its suffix; the suffix of a compression is ignored.

    Raises:
        DataError: the suffix is unknown.
    """
    if path == STDIN:
        return "jsonl"
    name = Path(path.name.lower())
    suffix = Path(name.stem).suffix if name.suffix in _COMPRESSIONS else name.suffix
    file_format = _FORMATS_BY_SUFFIX.get(suffix)
    if file_format is None:
        unknown = f"the suffix {suffix} is unknown" if suffix else "it has no suffix"
        raise DataError(
            f"{path}: {unknown}, so its format cannot be detected",
            hint="--format jsonl, text, lines or parquet sets the format of all inputs; known "
            f"suffixes: {', '.join(_FORMATS_BY_SUFFIX)}, also with {', '.join(_COMPRESSIONS)}",
        )
    return file_format


def split_file(
    path: Path, file_format: CorpusFormat, chunk_bytes: int | None = None
) -> Iterator[CorpusChunk]:
    """Yield the chunks of a file, in order. Each ends after a newline or at the end of the file.

    Args:
        path: the file, or :data:`STDIN`.
        file_format: format of the file.
        chunk_bytes: approximate size of a chunk in bytes; by default, ``TEXT_BYTES`` for format
            ``text`` and ``CHUNK_BYTES`` for the others.

    Raises:
        DataError: the file is not of this format, or a library that reads it is missing.
    """
    if file_format == "parquet":
        yield from _split_parquet(path)
        return
    chunk_size = chunk_bytes or (TEXT_BYTES if file_format == "text" else CHUNK_BYTES)
    if path == STDIN:
        yield from _split_stream(sys.stdin.buffer, path, file_format, chunk_size, 0)
        return
    with path.open("rb") as file:
        start = file.read(max(map(len, _MAGIC_BY_COMPRESSION.values())))
    if start.startswith(_PARQUET_MAGIC):
        raise DataError(f"{path}: is a Parquet file", hint="read it with --format parquet")
    file_size = path.stat().st_size
    compression = detect_compression(start)
    if compression is not None:
        with open_decompressed(path) as stream:
            yield from _split_stream(stream, path, file_format, chunk_size, file_size)
        return
    begin = 0
    with path.open("rb") as file:
        while begin < file_size:
            file.seek(min(begin + chunk_size, file_size))
            file.readline()
            end = min(file.tell(), file_size)
            yield CorpusChunk(path, begin, end, file_format, input_bytes=end - begin)
            begin = end


def detect_compression(start: bytes) -> str | None:
    """Return the compression of a file by its first bytes: a suffix such as ``.gz``, or None."""
    for suffix, magic in _MAGIC_BY_COMPRESSION.items():
        if start.startswith(magic):
            return suffix
    return None


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed if it is compressed.

    Raises:
        DataError: the library for the compression is missing.
    """
    with path.open("rb") as file:
        compression = detect_compression(file.read(8))
    if compression == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if compression == ".bz2":
        return bz2.open(path, "rb")
    if compression == ".xz":
        return lzma.open(path, "rb")
    if compression == ".zst":
        zstandard: Any = import_optional("zstandard", path)
        stream: IO[bytes] = BufferedReader(zstandard.open(path, "rb"))
        return stream
    return path.open("rb")


def import_optional(name: str, path: Path) -> Any:
    """Import a package that is required only for some files.

    Raises:
        DataError: it is not installed; the message names the file.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{path}: reading it requires the package {name} ({error})", hint=f"pip install {name}"
        ) from None


def _split_stream(
    stream: IO[bytes], path: Path, file_format: CorpusFormat, chunk_size: int, file_size: int
) -> Iterator[CorpusChunk]:
    """Yield the chunks of a stream that cannot be read at an offset, with their content.

    The last chunk accounts for all bytes of the input, because the compressed size of a part is
    unknown.
    """
    begin, line = 0, 1
    try:
        data = stream.read(chunk_size)
        while data:
            data += stream.readline()
            following = stream.read(chunk_size)
            yield CorpusChunk(
                path,
                begin,
                begin + len(data),
                file_format,
                data=data,
                first_line=line,
                input_bytes=0 if following else file_size,
            )
            begin += len(data)
            line += data.count(b"\n")
            data = following
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    except Exception as error:  # zstandard's own class of errors
        if type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise DataError(f"{path}: cannot be decompressed: {error}") from None


def _split_parquet(path: Path) -> Iterator[CorpusChunk]:
    """Yield the row groups of a Parquet file."""
    if path == STDIN:
        raise DataError("-: Parquet cannot be read from standard input")
    parquet = import_optional("pyarrow.parquet", path)
    try:
        groups = parquet.ParquetFile(path).metadata.num_row_groups
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise DataError(f"{path}: not a Parquet file: {error}") from None
    size = path.stat().st_size
    for group in range(groups):
        share = size * (group + 1) // groups - size * group // groups
        yield CorpusChunk(path, group, group + 1, "parquet", input_bytes=share)


def read_documents(chunk: CorpusChunk, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the documents of a chunk.

    Args:
        chunk: the part of a file to read.
        keys: keys of a JSON object, or columns of a Parquet file, whose strings are the texts of a
            document.

    Yields:
        For each document, one text per key. In formats ``text`` and ``lines`` a document is one
        text.

    Raises:
        BadRecordError: a line is not UTF-8, not a JSON object, or lacks a key.
    """
    if chunk.format == "parquet":
        yield from _read_parquet(chunk, keys)
        return
    if chunk.data is None:
        with chunk.path.open("rb") as file:
            file.seek(chunk.begin)
            yield from _parse_documents(file, chunk, keys)
        return
    try:
        yield from _parse_documents(BytesIO(chunk.data), chunk, keys)
    except BadRecordError as error:
        # The offset is not one of the file, so count the lines of the content.
        assert isinstance(error.location, int)
        lines = chunk.data.count(b"\n", 0, error.location - chunk.begin)
        raise BadRecordError(error.path, str(chunk.first_line + lines), error.message) from None


def _parse_documents(
    file: IO[bytes], chunk: CorpusChunk, keys: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the documents of a chunk; ``file`` is at its first byte."""
    if chunk.format == "text":
        encoded_text = file.read(chunk.end - chunk.begin)
        body = encoded_text.removeprefix(_BOM) if chunk.begin == 0 else encoded_text
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


def _read_parquet(chunk: CorpusChunk, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the documents of a row group."""
    parquet = import_optional("pyarrow.parquet", chunk.path)
    file = parquet.ParquetFile(chunk.path)
    names = file.schema_arrow.names
    for key in keys:
        if key not in names:
            raise BadRecordError(
                chunk.path, "row 1", f"no column {key!r}; the columns are {', '.join(names[:8])}"
            )
    rows_before = sum(file.metadata.row_group(g).num_rows for g in range(chunk.begin))
    columns = file.read_row_group(chunk.begin, columns=list(dict.fromkeys(keys))).to_pydict()
    for row, texts in enumerate(zip(*(columns[key] for key in keys), strict=True)):
        for key, text in zip(keys, texts, strict=True):
            if not isinstance(text, str):
                message = f"column {key!r} holds {type(text).__name__}, expected a string"
                raise BadRecordError(chunk.path, f"row {rows_before + row + 1}", message)
        yield tuple(texts)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte_offset = offset + error.start
        message = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {byte_offset}"
        raise BadRecordError(path, byte_offset, message) from None


def _parse_fields(text: str, keys: Sequence[str], path: Path, offset: int) -> tuple[str, ...]:
    """Parse a line of JSON; return the strings of its keys."""
    try:
        record = json.loads(text)
    except ValueError as error:
        hint = _LINES_HINT if text.strip() in ("[", "{") else ""
        raise BadRecordError(path, offset, f"not JSON: {error}{hint}") from None
    except RecursionError:
        raise BadRecordError(path, offset, "not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        type_name = type(record).__name__
        hint = _LINES_HINT if isinstance(record, list) else ""
        message = f"expected a JSON object a line, found {type_name}{hint}"
        raise BadRecordError(path, offset, message)
    texts = []
    for key in keys:
        if key not in record:
            present_keys = ", ".join(repr(name) for name in list(record)[:8]) or "none"
            text_keys = [name for name, value in record.items() if isinstance(value, str)]
            # The option is --json-keys of preprocess, and --json-key of the tokenizer's training.
            hint = (
                f"; its text is in {text_keys[0]!r}: give that key" if len(text_keys) == 1 else ""
            )
            message = f"no key {key!r}; the object has {present_keys}{hint}"
            raise BadRecordError(path, offset, message)
        value = record[key]
        if not isinstance(value, str):
            type_name = type(value).__name__
            raise BadRecordError(path, offset, f"key {key!r} holds {type_name}, expected a string")
        texts.append(_replace_lone_surrogates(value))
    return tuple(texts)


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


def slice_text(text: str, max_characters: int = 1 << 20) -> Iterator[str]:
    """Yield a text in slices of at most ``max_characters``, cut after newlines where possible.

    The slices bound a tokenizer's memory on documents of gigabytes.
    """
    begin = 0
    while len(text) - begin > max_characters:
        end = text.rfind("\n", begin, begin + max_characters) + 1
        end = end if end > begin else begin + max_characters
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]
