"""Files of records: JSON lines, which may be compressed, and Parquet.

Every error names the file and the line, or the row of a Parquet file. A line is read at once, so
its length is limited.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.train.data.corpus import import_optional, open_decompressed

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line in bytes."""
_PARQUET_SUFFIX = ".parquet"
_ROWS_PER_READ = 1024


@dataclass(frozen=True)
class Record:
    """Record of a file.

    Attributes:
        path: the file.
        line: line number, counted from 1, or ``row 1`` and so on in a Parquet file.
        fields: the values by key.
    """

    path: Path
    line: int | str
    fields: Mapping[str, Any]

    def error(self, message: str) -> DataError:
        """Build an error about the record, with file and line."""
        return DataError(f"{self.path}:{self.line}: {message}")


def read_records(
    path: Path, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[Record]:
    """Read the records of a file; empty lines are skipped.

    Args:
        path: the file. The suffix ``.parquet`` decides the format.
        on_progress: called with the bytes read and the size of the file in bytes.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    read = _read_parquet if path.suffix == _PARQUET_SUFFIX else _read_lines
    try:
        yield from read(path, path.stat().st_size, on_progress)
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from None


def _read_lines(
    path: Path, size: int, on_progress: Callable[[int, int], None] | None
) -> Iterator[Record]:
    with open_decompressed(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if on_progress is not None:
                on_progress(min(file.tell(), size), size)
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB",
                    hint="a conversation is one line of JSON; a file that is one JSON list has "
                    "to be written as lines first",
                )
            body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if body.strip():
                yield Record(path, number, _parse_line(f"{path}:{number}", body))


def _parse_line(location: str, body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise DataError(f"{location}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{location}: not JSON that can be read: nested too deeply") from None
    if not isinstance(fields, dict):
        message = f"{location}: expected a JSON object a line, found {type(fields).__name__}"
        raise DataError(message)
    return fields


def _read_parquet(
    path: Path, size: int, on_progress: Callable[[int, int], None] | None
) -> Iterator[Record]:
    parquet = import_optional("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise DataError(f"{path}: not a Parquet file: {error}") from None
    row, row_count = 0, max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(_ROWS_PER_READ):
        for fields in batch.to_pylist():
            row += 1
            yield Record(path, f"row {row}", fields)
        if on_progress is not None:
            on_progress(size * row // row_count, size)
