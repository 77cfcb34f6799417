"""Writer of zip archives with uncompressed records, such as those of ``torch.save``.

The checksum of a record follows its content, as in archives of torch, so that contents of any size
are written as they come. Sources: PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from flagscale.train.checkpoint.checksums import crc32

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR, _DESCRIPTOR_ZIP64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END, _END_ZIP64 = struct.Struct("<4sHHHHIIH"), struct.Struct("<4sQHHIIQQQQ")
_END_LOCATOR = struct.Struct("<4sIQI")
_EXTRA_HEADER = struct.Struct("<HH")
_FLAGS = 0x0808
"""The checksum and the sizes follow the content, and names are in UTF-8."""
_VERSION, _VERSION_ZIP64 = 20, 45
_DATE = 0x21  # 1980-01-01, the first one
_LIMIT = 0xFFFFFFFF
"""Smallest size or position that needs the fields of zip64."""
_ZIP64_FIELD, _PADDING_FIELD = 1, 0x4246
"""IDs of fields in a header. torch aligns contents by the second one."""
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StoredRecord:
    """A record that was written.

    Attributes:
        name: name in the archive.
        header: position of its header in the archive.
        begin: position of its content in the file.
        size: number of bytes of its content.
        crc: CRC-32 of its content.
    """

    name: bytes
    header: int
    begin: int
    size: int
    crc: int


class StoredArchive:
    """An archive that is written to a file, from the file's current position on."""

    def __init__(self, file: BinaryIO) -> None:
        """Begin an archive. Nothing else may write to the file until :meth:`finish`."""
        self._file = file
        self._begin = self._position = file.tell()
        self._records: list[StoredRecord] = []

    def write(
        self,
        name: str,
        content: Iterable[bytes | memoryview],
        size: int,
        *,
        is_aligned: bool = False,
    ) -> StoredRecord:
        """Write a record.

        Args:
            name: name in the archive.
            content: its bytes, in parts.
            size: number of all bytes.
            is_aligned: let the content begin at a multiple of 64 bytes in the archive.

        Raises:
            OSError: the file cannot be written.
            ValueError: the content has another size.
        """
        header, encoded_name = self._position - self._begin, name.encode()
        is_zip64 = size >= _LIMIT
        extra = _build_field(_ZIP64_FIELD, bytes(16)) if is_zip64 else b""
        if is_aligned:
            length = _LOCAL_HEADER.size + len(encoded_name) + len(extra) + _EXTRA_HEADER.size
            extra += _build_field(_PADDING_FIELD, b"Z" * (-(header + length) % ALIGNMENT_BYTES))
        sizes = (_LIMIT, _LIMIT) if is_zip64 else (0, 0)
        version = _VERSION_ZIP64 if is_zip64 else _VERSION
        fields = (version, _FLAGS, 0, 0, _DATE, 0, *sizes, len(encoded_name), len(extra))
        self._write(_LOCAL_HEADER.pack(b"PK\x03\x04", *fields) + encoded_name + extra)
        begin, crc = self._position, 0
        for part in content:
            crc = crc32(part, crc)
            self._write(part)
        if self._position - begin != size:
            raise ValueError(f"{name} has {self._position - begin} bytes instead of {size}")
        descriptor = _DESCRIPTOR_ZIP64 if is_zip64 else _DESCRIPTOR
        self._write(descriptor.pack(b"PK\x07\x08", crc, size, size))
        record = StoredRecord(encoded_name, header, begin, size, crc)
        self._records.append(record)
        return record

    def finish(self) -> int:
        """Write the directory of the archive; return the number of bytes of the archive.

        Raises:
            OSError: the file cannot be written.
        """
        begin = self._position - self._begin
        for record in self._records:
            self._write(_build_central_entry(record))
        end = self._position - self._begin
        size, count = end - begin, len(self._records)
        if begin >= _LIMIT:
            versions = (_VERSION_ZIP64, _VERSION_ZIP64)
            body = (_END_ZIP64.size - 12, *versions, 0, 0, count, count, size, begin)
            self._write(_END_ZIP64.pack(b"PK\x06\x06", *body))
            self._write(_END_LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        position = min(begin, _LIMIT)
        self._write(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, position, 0))
        return self._position - self._begin

    def _write(self, content: bytes | memoryview) -> None:
        self._position += write_all(self._file, content)


def write_all(file: BinaryIO, content: bytes | memoryview) -> int:
    """Write all of a content to a file without a buffer, which may write less than all at once.

    Returns:
        The number of bytes.
    """
    rest = memoryview(content).cast("B")
    size = len(rest)
    while rest:
        rest = rest[file.write(rest) :]
    return size


def pad_to_alignment(file: BinaryIO) -> int:
    """Pad a file so that aligned contents of an archive are aligned in it; return its position."""
    position = file.tell()
    return position + write_all(file, bytes(-position % ALIGNMENT_BYTES))


def _build_field(identifier: int, content: bytes) -> bytes:
    return _EXTRA_HEADER.pack(identifier, len(content)) + content


def _build_central_entry(record: StoredRecord) -> bytes:
    """Return the entry of a record in the directory."""
    numbers = (record.size, record.size, record.header)
    large = [number for number in numbers if number >= _LIMIT]
    extra = _build_field(_ZIP64_FIELD, struct.pack(f"<{len(large)}Q", *large)) if large else b""
    size, _, header = (min(number, _LIMIT) for number in numbers)
    version = _VERSION_ZIP64 if large else _VERSION
    fields = (version, version, _FLAGS, 0, 0, _DATE, record.crc, size, size)
    lengths = (len(record.name), len(extra), 0, 0, 0, 0, header)
    return _CENTRAL_HEADER.pack(b"PK\x01\x02", *fields, *lengths) + record.name + extra
