"""Plan of the ranges that are read of a checkpoint, and reading of a file of a disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
    buffer = bytearray(20)
    view = memoryview(buffer)
    with closing(DiskFiles(tmp_path)) as files:
        files.read_into("data", 70, [view[:3], view[3:10], view[10:]])
        assert buffer == bytes(range(70, 90))
        with pytest.raises(
            CheckpointError, match="is not as it was written: it ends within the 20 bytes from 90"
        ):
            files.read_into("data", 90, [view])
        with pytest.raises(CheckpointError, match="is not a file next to its metadata"):
            files.read_into("../data", 0, [view])


def test_each_file_is_read_by_one_stream_in_order() -> None:
    from flagscale.train.checkpoint.range_reader import _assign_streams

    mib = 1 << 20
    counts = {"a": 3, "b": 1, "c": 2}
    spans = plan_spans(
        {name: [(i * 20 * mib, i * 20 * mib + 1) for i in range(n)] for name, n in counts.items()}
    )
    order = [
        (stream, span.name, span.begin // (20 * mib)) for stream, span in _assign_streams(spans, 2)
    ]
    assert order == [
        (0, "a", 0), (1, "b", 0), (0, "a", 1), (0, "a", 2), (0, "c", 0), (0, "c", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [1]), (16, [16]), (20, [20]), (24, [12, 12]), (50, [17, 17, 16])]
)
def test_a_span_is_read_in_about_equal_parts(
    size: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flagscale.train.checkpoint import range_reader
    from flagscale.train.checkpoint.scattered_bytes import ScatteredBytes

    class Files:
        stream_count, stream_readers = 1, 2

        def __init__(self) -> None:
            self.parts: dict[int, int] = {}

        def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
            self.parts[begin] = sum(map(len, buffers))

    monkeypatch.setattr(range_reader, "PART_BYTES", 16)
    files, span = Files(), range_reader._Span("file", 100, 100 + size, ())
    with ThreadPoolExecutor(2) as pool:
        memory = ScatteredBytes([memoryview(bytearray(1)), memoryview(bytearray(size - 1))])
        range_reader._SpanReading(span, memory, files, pool, pool, lambda *_: None).wait()
    assert [files.parts[begin] for begin in sorted(files.parts)] == expected


def save_state(directory: Path, state: dict[str, Any]) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save(state, checkpoint_id=directory, no_dist=True)


def load_state(
    directory: Path, targets: dict[str, Any], positions: dict[int, int], *, verify: bool = True
) -> dict[str, Any]:
    """Load a checkpoint to the memory of ``targets``; return them."""
    from torch.distributed import checkpoint as dcp

    from flagscale.train.checkpoint.range_reader import DiskFiles, RangeReader

    with closing(DiskFiles(directory)) as files:
        reader = RangeReader(directory, files, verify=verify, data_positions=positions)
        dcp.load(targets, storage_reader=reader, no_dist=True)
    return targets


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors be read to where they belong, and few at once."""
    from flagscale.train.checkpoint import range_reader

    monkeypatch.setattr(range_reader, "_MIN_DIRECT_BYTES", 64)
    monkeypatch.setattr(range_reader, "PART_BYTES", 4096)


@pytest.mark.usefixtures("small_tensors")
def test_tensors_are_read_to_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is copied once the form of the archives is known."""
    import torch

    from flagscale.train.checkpoint import range_reader

    saved = {f"w{i:02}": torch.randn(16, 16) for i in range(60)}
    save_state(tmp_path, saved)
    copied: list[int] = []
    copy = range_reader._copy

    def count_copies(source: Any, target: Any) -> None:
        copied.extend([1] if source.data_ptr() != target.data_ptr() else [])
        copy(source, target)

    monkeypatch.setattr(range_reader, "_copy", count_copies)
    targets = {name: torch.zeros(16, 16) for name in saved}
    pointers = {name: tensor.data_ptr() for name, tensor in targets.items()}
    positions: dict[int, int] = {}
    for _ in range(2):
        copied.clear()
        for tensor in targets.values():
            tensor.zero_()
        loaded = load_state(tmp_path, targets, positions)
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == pointers
    assert not copied
    assert len(positions) == 1
    # An archive may have its bytes elsewhere.
    for envelope_bytes in positions:
        positions[envelope_bytes] -= 7
    loaded = load_state(tmp_path, {name: torch.zeros(16, 16) for name in saved}, positions)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert len(copied) == 60


@pytest.mark.usefixtures("small_tensors")
def test_any_tensor_is_loaded_to_any_of_its_shape(tmp_path: Path) -> None:
    """Their dtypes and strides differ."""
    import torch

    shape, saved, targets = (8, 24), dict[str, Any](), dict[str, Any]()
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
    for index in range(160):
        values = torch.randn(shape) * 100
        dtype, target_dtype = dtypes[index % 4], dtypes[index // 4 % 4]
        is_transposed, is_target_transposed = index // 16 % 2, index // 32 % 2
        name = f"{'n' * (index % 7)}{index:03}"
        saved[name] = values.to(dtype)
        if is_transposed:
            saved[name] = saved[name].T.contiguous().T
        target = torch.zeros(shape, dtype=target_dtype)
        targets[name] = target.T.contiguous().T if is_target_transposed else target
    save_state(tmp_path, saved)
    expected = {name: saved[name].to(targets[name].dtype) for name in saved}
    positions: dict[int, int] = {}
    load_state(tmp_path, {name: tensor.clone() for name, tensor in targets.items()}, positions)
    loaded = load_state(tmp_path, targets, positions)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.usefixtures("small_tensors")
def test_two_tensors_of_a_checkpoint_may_be_loaded_to_one(tmp_path: Path) -> None:
    import torch

    saved = {f"w{i:02}": torch.full((16, 16), float(i)) for i in range(60)}
    save_state(tmp_path, saved)
    target, positions = torch.zeros(16, 16), dict[int, int]()
    for _ in range(2):
        load_state(tmp_path, dict.fromkeys(saved, target), positions)
        assert target.unique().numel() == 1


@pytest.mark.usefixtures("small_tensors")
def test_a_flipped_bit_is_detected_where_it_belongs(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    saved = {f"w{i:02}": torch.full((16, 16), float(i)) for i in range(60)}
    save_state(tmp_path, saved)
    (path,) = tmp_path.glob("*.distcp")
    positions: dict[int, int] = {}
    load_state(tmp_path, {name: torch.zeros(16, 16) for name in saved}, positions)
    content = bytearray(path.read_bytes())
    position = content.rindex(saved["w50"].numpy().tobytes())
    content[position + 100] ^= 1
    path.write_bytes(content)
    targets = {name: torch.zeros(16, 16) for name in saved}
    with pytest.raises(CheckpointException, match="w50 is not as it was written: Bad CRC-32"):
        load_state(tmp_path, targets, positions)
    loaded = load_state(tmp_path, targets, positions, verify=False)
    assert {name for name in saved if not torch.equal(loaded[name], saved[name])} == {"w50"}


def test_a_buffer_of_another_size_is_found_or_made() -> None:
    from flagscale.train.checkpoint.range_reader import PART_BYTES, _Buffers

    buffers = _Buffers()
    sizes = (PART_BYTES * 5 // 4, PART_BYTES, 3 * PART_BYTES // 2)
    taken = [buffers.take(size) for size in sizes]
    assert [len(buffer) for buffer in taken] == list(sizes)
    for buffer in taken:
        buffers.give_back(buffer)
    assert buffers.take(PART_BYTES // 2) is taken[1]
    assert len(buffers.take(2 * PART_BYTES)) == 2 * PART_BYTES
    assert buffers.take(PART_BYTES) is taken[2], "the smallest one was replaced"


def test_the_latest_files_stay_open(tmp_path: Path) -> None:
    from flagscale.train.checkpoint.range_reader import _MAX_OPEN_FILES, DiskFiles

    with closing(DiskFiles(tmp_path)) as files:
        for number in range(3 * _MAX_OPEN_FILES):
            (tmp_path / str(number)).write_bytes(bytes([number]))
            buffer = bytearray(1)
            files.read_into(str(number), 0, [memoryview(buffer)])
            assert buffer[0] == number
        assert len(files._open_files) == _MAX_OPEN_FILES
