"""Tensors in a distributed checkpoint, and verification of their checksums (``verify_checkpoint``).

``torch.save`` writes each tensor as a zip archive with the CRC-32 of every record. torch's reader
ignores these checksums, and copies the bytes of a tensor twice.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from typing import Any

import torch

from flagscale.train.checkpoint.checksums import crc32
from flagscale.train.checkpoint.scattered_bytes import ScatteredBytes, ScatteredFile

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, and lengths of the name and of the extra field that follow."""
_SIGNATURE = b"PK\x03\x04"
_MAX_DESCRIPTIONS = 1024
_descriptions: dict[bytes, Any] = {}
"""Tensors without memory, by the pickled description that an archive contains."""


def open_tensor(content: memoryview | ScatteredBytes, *, verify: bool) -> torch.Tensor:
    """Return the tensor of an archive that ``torch.save`` wrote.

    Args:
        content: the archive, writable. The tensor shares its memory unless its form is unusual, or
            its bytes are in several pieces of memory.
        verify: compare the checksums of all records.

    Raises:
        BadZipFile: a checksum differs, or it is no archive.
    """
    if isinstance(content, memoryview):
        content = ScatteredBytes([content])
    records = _list_records(content)
    if verify:
        for record in records:
            _verify(content, record)
    described = _describe(content, records)
    data = [record for record in records if "/data/" in record.filename]
    if (
        len(data) == 1
        and data[0].compress_type == zipfile.ZIP_STORED
        and data[0].file_size
        and type(described) is torch.Tensor
        and described.layout is torch.strided
        and not described.is_quantized
        and _byte_order(content, records) == sys.byteorder
    ):
        elements = torch.frombuffer(_locate(content, data[0]), dtype=described.dtype)
        return elements.as_strided(
            described.size(), described.stride(), int(described.storage_offset())
        )
    tensor: torch.Tensor = _unpickle(content, "cpu")
    return tensor


def find_data(content: memoryview | ScatteredBytes) -> int:
    """Return the position of the bytes of the tensor in an archive that :func:`open_tensor` takes.

    It is 0 if they are compressed or in several records, as in no archive of today's torch.
    """
    if isinstance(content, memoryview):
        content = ScatteredBytes([content])
    data = [record for record in _list_records(content) if "/data/" in record.filename]
    if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED:
        return 0
    return _find_begin(content, data[0])


def _describe(content: ScatteredBytes, records: list[zipfile.ZipInfo]) -> Any:
    """Return the tensor of an archive without memory, or another object if it contains none.

    Layers of a model have tensors of the same form, and unpickling takes as long as reading a
    megabyte.
    """
    pickles = [record for record in records if record.filename.endswith("/data.pkl")]
    key = bytes(_locate(content, pickles[0])) if len(pickles) == 1 else b""
    if key not in _descriptions:
        described = _unpickle(content, "meta")
        if not key or len(_descriptions) >= _MAX_DESCRIPTIONS:
            return described
        _descriptions[key] = described
    return _descriptions[key]


def _unpickle(content: ScatteredBytes, device: str) -> Any:
    file: Any = ScatteredFile(content)
    return torch.load(file, map_location=device, weights_only=True)


def _list_records(content: ScatteredBytes) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(io.BufferedReader(ScatteredFile(content))) as archive:
        return archive.infolist()


def _verify(content: ScatteredBytes, record: zipfile.ZipInfo) -> None:
    # The first versions of flagscale convert wrote no checksums.
    if record.CRC and crc32(_locate(content, record)) != record.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {record.filename!r}")


def _locate(content: ScatteredBytes, record: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of a record, which torch does not compress."""
    begin = _find_begin(content, record)
    data = content.join(begin, begin + record.compress_size)
    if len(data) != record.compress_size:
        raise zipfile.BadZipFile(f"Truncated file {record.filename!r}")
    return data


def _find_begin(content: ScatteredBytes, record: zipfile.ZipInfo) -> int:
    """Return the position of the bytes of a record."""
    header = content.join(record.header_offset, record.header_offset + _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise zipfile.BadZipFile(f"Truncated header of file {record.filename!r}")
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if signature != _SIGNATURE:
        raise zipfile.BadZipFile(f"Bad header of file {record.filename!r}")
    return int(record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _byte_order(content: ScatteredBytes, records: list[zipfile.ZipInfo]) -> str:
    for record in records:
        if record.filename.endswith("/byteorder"):
            return bytes(_locate(content, record)).decode()
    return "little"
