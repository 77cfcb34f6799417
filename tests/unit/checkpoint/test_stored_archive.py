"""Archives of tensors, compared with those of ``torch.save``, and their records of any size."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


@given(
    st.lists(st.tuples(st.lists(st.binary(max_size=100), max_size=3), st.booleans()), max_size=4),
    st.binary(max_size=5),
)
def test_any_records_are_read_back(records: list[tuple[list[bytes], bool]], before: bytes) -> None:
    from flagscale.train.checkpoint.stored_archive import StoredArchive

    file = io.BytesIO()
    file.write(before)
    archive = StoredArchive(file)
    written = [
        archive.write(f"ü/{i}", parts, len(b"".join(parts)), is_aligned=is_aligned)
        for i, (parts, is_aligned) in enumerate(records)
    ]
    length = archive.finish()
    content = file.getvalue()[len(before) :]
    assert length == len(content)
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == [f"ü/{i}" for i in range(len(records))]
        for record, (parts, is_aligned), name in zip(
            written, records, opened.namelist(), strict=True
        ):
            assert opened.read(name) == b"".join(parts)
            begin = record.begin - len(before)
            assert content[begin : begin + record.size] == b"".join(parts)
            assert not is_aligned or begin % 64 == 0


def test_a_content_of_another_size_is_an_error() -> None:
    from flagscale.train.checkpoint.stored_archive import StoredArchive

    with pytest.raises(ValueError, match="a has 3 bytes instead of 4"):
        StoredArchive(io.BytesIO()).write("a", [b"123"], 4)


@pytest.mark.slow
def test_a_record_of_more_than_four_gibibytes_is_read_back(tmp_path: Path) -> None:
    """So are records after it, whose positions need fields of zip64, too."""
    import torch

    from flagscale.train.checkpoint.tensor_archive_writer import write_archive

    part, count = memoryview(bytes(range(256)) * (1 << 16)), 257
    path = tmp_path / "archive"
    with path.open("wb", buffering=0) as file:
        length, record = write_archive(
            file, torch.float32, (len(part) * count // 4,), [part] * count
        )
    assert length == path.stat().st_size
    with zipfile.ZipFile(path) as opened:
        assert opened.read("archive/version") == b"3\n"
        with opened.open("archive/data/0") as content:
            assert content.read(len(part)) == part
    loaded = torch.load(path, mmap=True, weights_only=True)
    expected = torch.frombuffer(bytearray(part), dtype=torch.float32).view(torch.int32)
    assert torch.equal(loaded[-len(expected) :].view(torch.int32), expected)
    assert record.size == loaded.numel() * 4


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_torch_loads_an_archive(dtype: str, shape: tuple[int, ...]) -> None:
    import torch

    from flagscale.train.checkpoint.tensor_archive_writer import has_archive, write_archive
    from flagscale.train.checkpoint.tensor_memory import view_bytes

    kind: Any = getattr(torch, dtype)
    tensor, file = torch.randn(shape).to(kind), io.BytesIO()
    assert has_archive(kind) and not has_archive(torch.int64)
    length, _ = write_archive(file, kind, shape, [view_bytes(tensor)])
    assert length == len(file.getvalue())
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (kind, tensor.shape)
    assert torch.equal(loaded, tensor)


def test_memory_keeps_its_tensor_alive() -> None:
    import gc
    import weakref

    import torch

    from flagscale.train.checkpoint.tensor_memory import view_bytes

    tensor = torch.zeros(3)
    alive, part = weakref.ref(tensor), view_bytes(tensor)[4:8]
    del tensor
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_memory_of_a_tensor_leaves_it_resizable() -> None:
    import torch

    from flagscale.train.checkpoint.tensor_memory import view_bytes

    tensor = torch.zeros(3)
    view_bytes(tensor)[:4] = b"\0\0\x80?"
    assert tensor.tolist() == [1, 0, 0]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="not contiguous"):
        view_bytes(torch.zeros(3, 4).T)
