"""Plan of the ranges that are read of a checkpoint, and reading of a file of a disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch


def plan_spans(ranges: dict[str, list[tuple[int, int]]]) -> list[Any]:
    """Return the spans of chunks with these ranges, of which each is read by two items."""
    from flagscale.train.checkpoint.range_reader import _plan_spans

    storage: dict[Any, Any] = {}
    items = []
    for name, limits in ranges.items():
        for begin, end in limits:
            index = (name, begin)
            storage[index] = SimpleNamespace(relative_path=name, offset=begin, length=end - begin)
            items += [SimpleNamespace(storage_index=index, number=number) for number in range(2)]
    return list(_plan_spans(storage, SimpleNamespace(items=items[::-1])))  # type: ignore[arg-type]


def test_small_chunks_near_each_other_are_read_together() -> None:
    mib = 1 << 20
    spans = plan_spans(
        {
            "b": [(0, 10), (10, 30), (5 * mib, 5 * mib + 4)],
            "a": [(mib, 40 * mib), (40 * mib, 41 * mib)],
        }
    )
    assert [(span.name, span.begin, span.end) for span in spans] == [
        ("a", mib, 40 * mib),
        ("a", 40 * mib, 41 * mib),
        ("b", 0, 30),
        ("b", 5 * mib, 5 * mib + 4),
    ]
    assert [[(c.begin, len(c.items)) for c in span.chunks] for span in spans] == [
        [(mib, 2)], [(40 * mib, 2)], [(0, 2), (10, 2)], [(5 * mib, 2)],
    ]  # fmt: skip


def test_no_chunk_of_many_is_left_out() -> None:
    spans = plan_spans({"file": [(i << 21, (i << 21) + 1) for i in range(20_000)]})
    assert sum(len(span.chunks) for span in spans) == 20_000


def test_a_file_of_a_disk_is_read_from_a_position(tmp_path: Path) -> None:
    from flagscale.train.checkpoint.range_reader import DiskFiles

    (tmp_path / "data").write_bytes(bytes(range(100)))
    files, buffer = DiskFiles(tmp_path), bytearray(20)
    files.read_into("data", 70, memoryview(buffer))
    assert buffer == bytes(range(70, 90))
    with pytest.raises(CheckpointError, match="is not as it was written: it ends before"):
        files.read_into("data", 90, memoryview(buffer))
    with pytest.raises(CheckpointError, match="is not a file next to its metadata"):
        files.read_into("../data", 0, memoryview(buffer))


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [1]), (16, [16]), (20, [20]), (24, [12, 12]), (50, [17, 17, 16])]
)
def test_a_span_is_read_in_about_equal_parts(
    size: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from flagscale.train.checkpoint import range_reader

    class Files:
        reader_count = 2

        def __init__(self) -> None:
            self.parts: dict[int, int] = {}

        def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
            self.parts[begin] = len(buffer)

    monkeypatch.setattr(range_reader, "PART_BYTES", 16)
    files, span = Files(), range_reader._Span("file", 100, 100 + size, ())
    with ThreadPoolExecutor(2) as pool:
        buffer = torch.empty(64, dtype=torch.uint8)
        range_reader._SpanReading(span, buffer, files, pool, verify=True).wait()
    assert [files.parts[begin] for begin in sorted(files.parts)] == expected
