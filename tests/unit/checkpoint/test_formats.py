"""Tensors that are read a region at a time, and the rules that rearrange them."""

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

from flagscale.checkpoints import REQUIRED, check_whole
from flagscale.config.arguments.huggingface.families import FAMILIES
from flagscale.config.arguments.huggingface.models import effective
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats import rules
from flagscale.train.checkpoint.formats.archive import write_tensor
from flagscale.train.checkpoint.formats.base import are_finite, differs
from flagscale.train.checkpoint.formats.safetensors_file import (
    SafetensorsFile,
    shards,
    write_file,
)
from flagscale.train.checkpoint.formats.saved_tensor import view
from flagscale.train.checkpoint.formats.spans import Span, as_written, covering
from flagscale.train.checkpoint.formats.tables import TABLES, entries
from flagscale.train.checkpoint.formats.tensors import (
    Mapped,
    Region,
    Stored,
    pieces,
    raw,
    read,
    whole,
)

pytestmark = pytest.mark.torch


def stored(tensor: Any) -> Mapped:
    return Mapped(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def counted(*shape: int, begin: int = 0) -> Any:
    return torch.arange(begin, begin + prod(shape), dtype=torch.float32).reshape(shape)


SIZES = st.builds(
    lambda groups, each, head, hidden, inner, experts: rules.Sizes(
        vocabulary=7,
        positions=5,
        hidden=hidden,
        heads=groups * each,
        groups=groups,
        head=head,
        inner=inner,
        expert_inner=inner,
        experts=experts,
    ),
    *(st.integers(1, most) for most in (3, 3, 4, 5, 4, 3)),
)
RULES: dict[str, tuple[rules.Rule, tuple[str, ...]]] = {
    "same": (rules.SAME, ("H,A",)),
    "transposed": (rules.TRANSPOSED, ("H,F",)),
    "vocabulary": (rules.VOCABULARY, ("V,H",)),
    "halves": (rules.HALVES, ("F,H", "F,H")),
    "heads": (rules.HEADS, ("A,H", "G,H", "G,H")),
    "heads' biases": (rules.HEADS, ("A", "G", "G")),
    "experts": (rules.per_expert(rules.HALVES), ("F,H", "F,H")),
}


@pytest.mark.parametrize("name", RULES)
@given(sizes=SIZES, data=st.data())
@settings(deadline=None, max_examples=40)
def test_a_rule_and_its_way_back(name: str, sizes: rules.Sizes, data: st.DataObject) -> None:
    rule, shapes = RULES[name]
    count = sizes.experts if name == "experts" else 1
    made = [counted(*sizes.shape(s), begin=1000 * i) for i, s in enumerate(shapes * count)]
    joined = rule.join([stored(tensor) for tensor in made], sizes)
    back = rule.split(joined, sizes)
    assert [tuple(part.shape) for part in back] == [tuple(tensor.shape) for tensor in made]
    assert all(read(part).equal(tensor) for part, tensor in zip(back, made, strict=True))
    for tensor in (joined, *back):
        region = _region(tensor, data)
        slices = tuple(slice(begin, end) for begin, end in region)
        assert tensor.read(region).equal(read(tensor)[slices])


def _region(tensor: Stored, data: st.DataObject) -> Region:
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in tensor.shape]
    return tuple((begin, end) for begin, end in ends)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    sizes = rules.Sizes(
        7, 5, hidden=1, heads=4, groups=2, head=1, inner=1, expert_inner=1, experts=0
    )
    parts = [counted(4, 1), counted(2, 1, begin=10), counted(2, 1, begin=20)]
    joined = rules.HEADS.join([stored(part) for part in parts], sizes)
    assert read(joined).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    fused = torch.cat(parts).t()
    again = rules.HEADS_TRANSPOSED.join([stored(fused)], sizes)
    assert read(again).equal(read(joined))
    assert read(rules.HEADS_TRANSPOSED.split(again, sizes)[0]).equal(fused)


@given(shape=st.lists(st.integers(0, 6), max_size=4), most=st.integers(4, 200))
def test_pieces_are_a_tensor(shape: list[int], most: int) -> None:
    tensor = counted(*shape)
    found = [stored(tensor).read(r) for r in pieces(whole(tensor.shape), 4, most)]
    flat = [part.flatten() for part in found]
    assert torch.cat([*flat, torch.empty(0)]).equal(tensor.flatten())
    assert all(part.nbytes <= most for part in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(max_examples=20)
@given(shape=st.lists(st.integers(0, 6), max_size=3), ahead=st.integers(0, 3))
def test_an_archive_is_what_torch_writes(dtype: torch.dtype, shape: list[int], ahead: int) -> None:
    """It is loaded by torch, seen where it lies, and has its checksum, anywhere in a file."""
    tensor, file, told = counted(*shape).to(dtype), io.BytesIO(), list[int]()
    file.write(b"." * 64 * ahead)
    length, span = write_tensor(file, stored(tensor), whole(tensor.shape), told.append)
    content = file.getvalue()
    archive = content[64 * ahead :]
    assert (length, sum(told)) == (len(archive), tensor.nbytes)
    assert torch.load(io.BytesIO(archive), weights_only=True).equal(tensor)
    assert view(torch.frombuffer(bytearray(archive), dtype=torch.uint8)).equal(tensor)
    own = content[span.begin : span.begin + span.size]
    assert own == bytes(raw(tensor)) and zlib.crc32(own) == span.crc
    assert span.begin % 64 == 0
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        assert records.testzip() is None
    if span.size:
        damaged = bytearray(archive)
        damaged[span.begin - 64 * ahead + span.size // 2] ^= 4
        seen = torch.frombuffer(damaged, dtype=torch.uint8)
        with pytest.raises(CheckpointError, match="is not as it was written"):
            view(seen)
        assert view(seen, trusted=True).shape == tensor.shape


@given(
    content=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    known=st.integers(0, 63),
    changed=st.integers(0, 59),
)
def test_spans_tell_whether_a_file_is_as_it_was(
    content: bytes, cuts: list[int], known: int, changed: int
) -> None:
    ends = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    spans = [Span(a, b - a, zlib.crc32(content[a:b])) for a, b in pairwise(ends)]
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(content)
        given = [span for i, span in enumerate(spans) if known >> i & 1]
        said = json.loads(json.dumps(covering(path, given)))
        assert as_written(path, said)
        if content:
            other = bytearray(content)
            other[changed % len(content)] ^= 1
            path.write_bytes(other)
            assert not as_written(path, said)
        path.write_bytes(content + b"x")
        assert not as_written(path, said)


def test_every_family_has_its_tensors() -> None:
    assert set(TABLES) == set(FAMILIES)
    base = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 7}
    for kind in TABLES:
        experts = 2 if TABLES[kind].sparse else None
        values = effective({**base, "num_moe_experts": experts, "max_position_embeddings": 5})
        names = [entry.name for entry in entries(kind, values)]
        theirs = [name for entry in entries(kind, values) for name, _ in entry.theirs]
        assert len(set(names)) == len(names)
        assert len(set(theirs)) == len(theirs)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), most=st.integers(1, 120))
def test_shards_keep_order_and_size(sizes: list[int], most: int) -> None:
    tensors: dict[str, Stored] = {f"t{i}": stored(counted(n)) for i, n in enumerate(sizes)}
    found = shards(tensors, most)
    assert [name for shard in found for name in shard] == list(tensors)
    for shard in found:
        assert len(shard) == 1 or sum(4 * t.shape[0] for t in shard.values()) <= most


def test_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = {"a": counted(3, 5), "b.c": torch.ones(2, dtype=torch.bfloat16), "none": counted(0, 4)}
    write_file(tmp_path / "x", {n: stored(t) for n, t in made.items()}, lambda _: None)
    for found in (
        load_file(tmp_path / "x"),
        {n: read(t) for n, t in SafetensorsFile(tmp_path / "x").tensors.items()},
    ):
        assert found.keys() == made.keys()
        assert all(found[n].equal(t) and found[n].dtype == t.dtype for n, t in made.items())


SAVED = {
    "plain": counted(3, 4),
    "16 bits": torch.ones(5, 2, dtype=torch.bfloat16) * 3,
    "a part": counted(6, 4)[2:5, 1:],
    "turned": counted(3, 4).t(),
    "nothing": counted(0, 4),
}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("name", SAVED)
def test_what_torch_saved_is_seen_where_it_lies(name: str, ahead: int) -> None:
    buffer = io.BytesIO()
    torch.save(SAVED[name], buffer)
    raw = torch.frombuffer(bytearray(b"x" * ahead + buffer.getvalue()), dtype=torch.uint8)
    assert view(raw[ahead:]).equal(SAVED[name])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil"),)


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(Evil(), id="code"),
        pytest.param([None], id="no tensor"),
        pytest.param({"a": counted(2)}, id="several"),
    ],
)
def test_what_is_no_tensor_is_not_believed(
    item: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(item, buffer)
    raw = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="a tensor cannot be read"):
        view(raw)
    assert list(tmp_path.iterdir()) == []


@given(cut=st.integers(0, 1100), flipped=st.integers(0, 1100), bits=st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_a_damaged_tensor_is_an_error_or_a_tensor(cut: int, flipped: int, bits: int) -> None:
    buffer = io.BytesIO()
    torch.save(counted(3, 4), buffer)
    damaged = bytearray(buffer.getvalue())
    damaged[flipped % len(damaged)] ^= bits
    raw = torch.frombuffer(damaged[: max(len(damaged) - cut, 1)], dtype=torch.uint8)
    try:
        found = view(raw)
    except CheckpointError:
        return
    assert found.numel() * found.dtype.itemsize <= len(damaged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_seen(dtype: Any, bad: float) -> None:
    tensor = torch.full((1000,), -3.0, dtype=dtype)
    assert are_finite(tensor)
    tensor[777] = bad
    assert not are_finite(tensor)
    assert differs(stored(tensor), stored(tensor), lambda _: None) is not None


@given(place=st.integers(0, 62), unaligned=st.booleans())
def test_one_bit_is_a_difference(place: int, unaligned: bool) -> None:
    one = counted(64)[int(unaligned) :]
    other = one.clone()
    assert differs(stored(one), stored(other), lambda _: None) is None
    other.view(torch.int32)[place] ^= 1
    assert differs(stored(one), stored(other), lambda _: None) == "it is not what it was made of"


def test_metadata_knows_no_other_classes(tmp_path: Path) -> None:
    from flagscale.checkpoint_metadata import read_metadata

    for content in (pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"\x80"):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            read_metadata(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_a_checkpoint_of_others_runs_no_code_when_it_is_looked_at(tmp_path: Path) -> None:
    for name in REQUIRED:
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names"):
        check_whole(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(REQUIRED)


def test_whole_is_all_of_it() -> None:
    assert whole((2, 3)) == ((0, 2), (0, 3))


class _AsOldPython(pickle.Pickler):
    """Writes members of enumerations as the first releases of Python 3.11 do."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, Enum):
            return getattr, (type(found), found.name)
        return NotImplemented


def test_an_enumeration_of_an_older_python_is_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

    from flagscale.checkpoint_metadata import read_metadata

    kept = Metadata({}, storage_data={}, planner_data=TensorProperties())
    with (tmp_path / ".metadata").open("wb") as file:
        _AsOldPython(file).dump(kept)
    assert read_metadata(tmp_path).planner_data == TensorProperties()


@pytest.mark.parametrize("name", ["__init__", "__reduce__", "mro", "no_such_member"])
def test_an_attribute_that_is_no_member_is_not_looked_up(name: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    from flagscale.checkpoint_metadata import read_metadata

    class Asks:
        def __reduce__(self) -> Any:
            return getattr, (Metadata, name)

    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": Asks()}))
    with pytest.raises(CheckpointError, match="it asks"):
        read_metadata(tmp_path)
