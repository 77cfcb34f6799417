"""Lazy tensors, weight transforms, and the file formats of converted models."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import zipfile
import zlib
from enum import Enum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.checkpoints import REQUIRED_FILES, check_complete
from flagscale.config.arguments.compat.huggingface.families import HUGGINGFACE_FAMILIES
from flagscale.config.arguments.compat.huggingface.models import effective
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats import weight_transforms
from flagscale.train.checkpoint.formats.base import are_finite, describe_difference
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    MappedTensor,
    Region,
    StackedTensor,
    as_bytes,
    concatenate_rows,
    full_region,
    read_tensor,
    split_region,
)
from flagscale.train.checkpoint.formats.safetensors_file import (
    SafetensorsFile,
    split_into_files,
    write_safetensors,
)
from flagscale.train.checkpoint.formats.saved_tensor import view_saved_tensor
from flagscale.train.checkpoint.formats.span_checksums import FileSpan, cover_file, matches_spans
from flagscale.train.checkpoint.formats.torch_archive import write_tensor
from flagscale.train.checkpoint.formats.weight_mappings import FAMILY_MAPPINGS, iter_weights

pytestmark = pytest.mark.torch


def make_lazy(tensor: Any) -> MappedTensor:
    """Return a lazy tensor that reads ``tensor`` from memory."""
    return MappedTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def count_up(*shape: int, begin: int = 0) -> Any:
    """Return a tensor of consecutive numbers, so that any exchanged element shows."""
    return torch.arange(begin, begin + prod(shape), dtype=torch.float32).reshape(shape)


SIZES = st.builds(
    lambda groups, each, head, hidden, inner, experts: weight_transforms.ModelSizes(
        vocabulary=7,
        positions=5,
        hidden=hidden,
        heads=groups * each,
        groups=groups,
        head_dim=head,
        ffn_hidden=inner,
        expert_ffn_hidden=inner,
        experts=experts,
    ),
    *(st.integers(1, maximum) for maximum in (3, 3, 4, 5, 4, 3)),
)
TRANSFORMS: dict[str, tuple[weight_transforms.WeightTransform, tuple[str, ...]]] = {
    "same": (weight_transforms.IDENTITY, ("H,A",)),
    "transposed": (weight_transforms.TRANSPOSE, ("H,F",)),
    "vocabulary": (weight_transforms.TRIM_VOCABULARY, ("V,H",)),
    "halves": (weight_transforms.GATE_AND_UP, ("F,H", "F,H")),
    "heads": (weight_transforms.GROUPED_QKV, ("A,H", "G,H", "G,H")),
    "heads' biases": (weight_transforms.GROUPED_QKV, ("A", "G", "G")),
    "experts": (weight_transforms.apply_per_expert(weight_transforms.GATE_AND_UP), ("F,H", "F,H")),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@given(sizes=SIZES, data=st.data())
@settings(deadline=None, max_examples=40)
def test_a_transform_and_its_inverse_give_the_same_tensors(
    name: str, sizes: weight_transforms.ModelSizes, data: st.DataObject
) -> None:
    transform, shapes = TRANSFORMS[name]
    count = sizes.experts if name == "experts" else 1
    parts = [count_up(*sizes.shape(s), begin=1000 * i) for i, s in enumerate(shapes * count)]
    megatron_tensor = transform.to_megatron([make_lazy(tensor) for tensor in parts], sizes)
    huggingface_tensors = transform.to_huggingface(megatron_tensor, sizes)
    assert [tuple(part.shape) for part in huggingface_tensors] == [
        tuple(tensor.shape) for tensor in parts
    ]
    assert all(
        read_tensor(part).equal(tensor)
        for part, tensor in zip(huggingface_tensors, parts, strict=True)
    )
    for tensor in (megatron_tensor, *huggingface_tensors):
        region = draw_region(tensor, data)
        slices = tuple(slice(begin, end) for begin, end in region)
        assert tensor.read(region).equal(read_tensor(tensor)[slices])


def draw_region(tensor: LazyTensor, data: st.DataObject) -> Region:
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in tensor.shape]
    return tuple((begin, end) for begin, end in ends)


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    sizes = weight_transforms.ModelSizes(
        7, 5, hidden=1, heads=4, groups=2, head_dim=1, ffn_hidden=1, expert_ffn_hidden=1, experts=0
    )
    parts = [count_up(4, 1), count_up(2, 1, begin=10), count_up(2, 1, begin=20)]
    megatron_tensor = weight_transforms.GROUPED_QKV.to_megatron(
        [make_lazy(part) for part in parts], sizes
    )
    assert read_tensor(megatron_tensor).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    fused = torch.cat(parts).t()
    again = weight_transforms.CONV1D_QKV.to_megatron([make_lazy(fused)], sizes)
    assert read_tensor(again).equal(read_tensor(megatron_tensor))
    assert read_tensor(weight_transforms.CONV1D_QKV.to_huggingface(again, sizes)[0]).equal(fused)


@given(shape=st.lists(st.integers(0, 6), max_size=4), max_bytes=st.integers(4, 200))
def test_split_regions_cover_a_tensor(shape: list[int], max_bytes: int) -> None:
    tensor = count_up(*shape)
    regions = [
        make_lazy(tensor).read(r) for r in split_region(full_region(tensor.shape), 4, max_bytes)
    ]
    flat = [part.flatten() for part in regions]
    assert torch.cat([*flat, torch.empty(0)]).equal(tensor.flatten())
    assert all(part.nbytes <= max_bytes for part in regions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(max_examples=20)
@given(shape=st.lists(st.integers(0, 6), max_size=3), blocks_before=st.integers(0, 3))
def test_a_written_archive_equals_one_of_torch(
    dtype: torch.dtype, shape: list[int], blocks_before: int
) -> None:
    """torch loads it, it is viewed without a copy, and its checksum is right, anywhere in a
    file.
    """
    tensor, file, reported = count_up(*shape).to(dtype), io.BytesIO(), list[int]()
    file.write(b"." * 64 * blocks_before)
    length, span = write_tensor(file, make_lazy(tensor), full_region(tensor.shape), reported.append)
    content = file.getvalue()
    archive = content[64 * blocks_before :]
    assert (length, sum(reported)) == (len(archive), tensor.nbytes)
    assert torch.load(io.BytesIO(archive), weights_only=True).equal(tensor)
    assert view_saved_tensor(torch.frombuffer(bytearray(archive), dtype=torch.uint8)).equal(tensor)
    stored_bytes = content[span.begin : span.begin + span.size]
    assert stored_bytes == bytes(as_bytes(tensor)) and zlib.crc32(stored_bytes) == span.crc
    assert span.begin % 64 == 0
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        assert records.testzip() is None
    if span.size:
        damaged = bytearray(archive)
        damaged[span.begin - 64 * blocks_before + span.size // 2] ^= 4
        viewed = torch.frombuffer(damaged, dtype=torch.uint8)
        with pytest.raises(CheckpointError, match="is not as it was written"):
            view_saved_tensor(viewed)
        assert view_saved_tensor(viewed, is_trusted=True).shape == tensor.shape


@given(
    content=st.binary(max_size=60),
    boundaries=st.lists(st.integers(0, 60), max_size=6),
    known_count=st.integers(0, 63),
    changed_byte=st.integers(0, 59),
)
def test_spans_detect_a_changed_file(
    content: bytes, boundaries: list[int], known_count: int, changed_byte: int
) -> None:
    ends = sorted(
        {0, len(content), *(boundary for boundary in boundaries if boundary < len(content))}
    )
    spans = [FileSpan(a, b - a, zlib.crc32(content[a:b])) for a, b in pairwise(ends)]
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(content)
        known_spans = [span for i, span in enumerate(spans) if known_count >> i & 1]
        recorded = json.loads(json.dumps(cover_file(path, known_spans)))
        assert matches_spans(path, recorded)
        if content:
            changed_content = bytearray(content)
            changed_content[changed_byte % len(content)] ^= 1
            path.write_bytes(changed_content)
            assert not matches_spans(path, recorded)
        path.write_bytes(content + b"x")
        assert not matches_spans(path, recorded)


def test_no_family_names_a_tensor_twice() -> None:
    assert set(FAMILY_MAPPINGS) == set(HUGGINGFACE_FAMILIES)
    base = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 7}
    for model_type in FAMILY_MAPPINGS:
        experts = 2 if FAMILY_MAPPINGS[model_type].experts else None
        values = effective({**base, "num_moe_experts": experts, "max_position_embeddings": 5})
        names = [spec.name for spec in iter_weights(model_type, values)]
        huggingface_names = [
            name
            for spec in iter_weights(model_type, values)
            for name, _ in spec.huggingface_tensors
        ]
        assert len(set(names)) == len(names)
        assert len(set(huggingface_names)) == len(huggingface_names)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), max_bytes=st.integers(1, 120))
def test_files_keep_the_order_and_the_maximum_size(sizes: list[int], max_bytes: int) -> None:
    tensors: dict[str, LazyTensor] = {f"t{i}": make_lazy(count_up(n)) for i, n in enumerate(sizes)}
    files = split_into_files(tensors, max_bytes)
    assert [name for file_tensors in files for name in file_tensors] == list(tensors)
    for file_tensors in files:
        assert (
            len(file_tensors) == 1
            or sum(4 * t.shape[0] for t in file_tensors.values()) <= max_bytes
        )


def test_safetensors_reads_a_written_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written = {
        "a": count_up(3, 5),
        "b.c": torch.ones(2, dtype=torch.bfloat16),
        "none": count_up(0, 4),
    }
    write_safetensors(tmp_path / "x", {n: make_lazy(t) for n, t in written.items()}, lambda _: None)
    for loaded in (
        load_file(tmp_path / "x"),
        {n: read_tensor(t) for n, t in SafetensorsFile(tmp_path / "x").tensors.items()},
    ):
        assert loaded.keys() == written.keys()
        assert all(loaded[n].equal(t) and loaded[n].dtype == t.dtype for n, t in written.items())


def build_header(ranges: list[tuple[int, int]]) -> bytes:
    """Return the length and header of a safetensors file of bytes in these ranges."""
    entries = {
        f"t{i}": {"dtype": "U8", "shape": [max(0, end - begin)], "data_offsets": [begin, end]}
        for i, (begin, end) in enumerate(ranges)
    }
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


@given(
    lengths=st.lists(st.integers(0, 3), max_size=4),
    shifts=st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=2),
    surplus=st.integers(-2, 2),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_safetensors_file_is_accepted_if_safetensors_accepts_it(
    lengths: list[int], shifts: list[tuple[int, int]], surplus: int, order: Any
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    ranges = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    for index, shift in shifts:
        if index < len(ranges):
            ranges[index] = (max(0, ranges[index][0] + shift), max(0, ranges[index][1] + shift))
    order.shuffle(ranges)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        path.write_bytes(build_header(ranges) + bytes(max(0, sum(lengths) + surplus)))
        try:
            expected = {name: tensor.numel() for name, tensor in load_file(path).items()}
        except SafetensorError:
            expected = None
        try:
            tensors = SafetensorsFile(path).tensors
            actual = {name: tensor.shape[0] for name, tensor in tensors.items()}
        except CheckpointError:
            actual = None
    assert actual == expected


SAVED_TENSORS = {
    "plain": count_up(3, 4),
    "16 bits": torch.ones(5, 2, dtype=torch.bfloat16) * 3,
    "a part": count_up(6, 4)[2:5, 1:],
    "turned": count_up(3, 4).t(),
    "nothing": count_up(0, 4),
}


@pytest.mark.parametrize("bytes_before", [0, 1, 3])
@pytest.mark.parametrize("name", SAVED_TENSORS)
def test_a_saved_tensor_is_viewed_without_a_copy(name: str, bytes_before: int) -> None:
    buffer = io.BytesIO()
    torch.save(SAVED_TENSORS[name], buffer)
    raw = torch.frombuffer(bytearray(b"x" * bytes_before + buffer.getvalue()), dtype=torch.uint8)
    assert view_saved_tensor(raw[bytes_before:]).equal(SAVED_TENSORS[name])


class CodeExecution:
    """Object that creates a file when it is unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil"),)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(CodeExecution(), id="code"),
        pytest.param([None], id="no tensor"),
        pytest.param({"a": count_up(2)}, id="several"),
    ],
)
def test_other_pickles_than_tensors_are_refused(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    raw = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="a tensor cannot be read"):
        view_saved_tensor(raw)
    assert list(tmp_path.iterdir()) == []


@given(cut_bytes=st.integers(0, 1100), flipped=st.integers(0, 1100), bits=st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_a_damaged_tensor_is_an_error_or_a_tensor(cut_bytes: int, flipped: int, bits: int) -> None:
    buffer = io.BytesIO()
    torch.save(count_up(3, 4), buffer)
    damaged = bytearray(buffer.getvalue())
    damaged[flipped % len(damaged)] ^= bits
    raw = torch.frombuffer(damaged[: max(len(damaged) - cut_bytes, 1)], dtype=torch.uint8)
    try:
        viewed = view_saved_tensor(raw)
    except CheckpointError:
        return
    assert viewed.numel() * viewed.dtype.itemsize <= len(damaged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_infinities_and_nan_are_differences(dtype: Any, value: float) -> None:
    tensor = torch.full((1000,), -3.0, dtype=dtype)
    assert are_finite(tensor)
    tensor[777] = value
    assert not are_finite(tensor)
    assert describe_difference(make_lazy(tensor), make_lazy(tensor), lambda _: None) is not None


@given(word_index=st.integers(0, 62), unaligned=st.booleans())
def test_one_bit_is_a_difference(word_index: int, unaligned: bool) -> None:
    first = count_up(64)[int(unaligned) :]
    second = first.clone()
    assert describe_difference(make_lazy(first), make_lazy(second), lambda _: None) is None
    second.view(torch.int32)[word_index] ^= 1
    assert (
        describe_difference(make_lazy(first), make_lazy(second), lambda _: None)
        == "it differs from its source"
    )


def test_metadata_refuses_other_classes(tmp_path: Path) -> None:
    from flagscale.checkpoint_metadata import read_metadata

    for content in (pickle.dumps(CodeExecution()), pickle.dumps({"a": 1}), b"", b"\x80"):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            read_metadata(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_checking_a_foreign_checkpoint_runs_no_code(tmp_path: Path) -> None:
    for name in REQUIRED_FILES:
        (tmp_path / name).write_bytes(pickle.dumps(CodeExecution()))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names"):
        check_complete(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(REQUIRED_FILES)


def test_empty_regions_keep_the_dtype() -> None:
    tensors = (make_lazy(torch.ones(2, 3, dtype=torch.bfloat16)),) * 2
    for tensor in (StackedTensor(tensors), concatenate_rows(tensors)):
        empty = tensor.read(((1, 1), *full_region(tensor.shape)[1:]))
        assert (empty.dtype, empty.shape) == (torch.bfloat16, (0, *tensor.shape[1:]))


def test_full_region_covers_every_dimension() -> None:
    assert full_region((2, 3)) == ((0, 2), (0, 3))


class _OldPythonPickler(pickle.Pickler):
    """Pickles members of enumerations as early releases of Python 3.11 do."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Enum):
            return getattr, (type(obj), obj.name)
        return NotImplemented


def test_an_enumeration_of_an_older_python_is_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

    from flagscale.checkpoint_metadata import read_metadata

    content = Metadata({}, storage_data={}, planner_data=TensorProperties())
    with (tmp_path / ".metadata").open("wb") as file:
        _OldPythonPickler(file).dump(content)
    assert read_metadata(tmp_path).planner_data == TensorProperties()


@pytest.mark.parametrize("name", ["__init__", "__reduce__", "mro", "no_such_member"])
def test_only_members_of_enumerations_are_looked_up(name: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    from flagscale.checkpoint_metadata import read_metadata

    class AttributeLookup:
        def __reduce__(self) -> Any:
            return getattr, (Metadata, name)

    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": AttributeLookup()}))
    with pytest.raises(CheckpointError, match="it asks"):
        read_metadata(tmp_path)
