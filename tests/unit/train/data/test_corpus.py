"""Documents from files: chunks, formats, and errors that name file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flagscale.errors import DataError
from flagscale.train.data import corpus
from flagscale.train.data.corpus import BadRecordError, CorpusFormat

SPECIAL_CHARACTERS = 'tab\t quote" $HOME `x` \\ line\nbreak, emoji \U0001f600 \u2028 end'


def read_all_documents(
    path: Path, file_format: CorpusFormat, keys: tuple[str, ...] = ("text",), chunk_bytes: int = 40
) -> list[tuple[str, ...]]:
    chunks = corpus.split_file(path, file_format, chunk_bytes)
    return [texts for chunk in chunks for texts in corpus.read_documents(chunk, keys)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=60), max_size=12), chunk_bytes=st.integers(1, 200))
def test_chunks_of_json_lines_give_every_text(
    tmp_path: Path, texts: list[str], chunk_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert read_all_documents(path, "jsonl", chunk_bytes=chunk_bytes) == [(text,) for text in texts]


def test_blank_lines_and_a_byte_order_mark_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n   \n{"text": "two"}')
    assert read_all_documents(path, "jsonl") == [("one",), ("two",)]


def test_each_key_gives_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"title": "t", "text": SPECIAL_CHARACTERS, "n": 1}) + "\n")
    assert read_all_documents(path, "jsonl", ("text", "title")) == [(SPECIAL_CHARACTERS, "t")]


def test_a_text_file_is_a_document_and_a_huge_one_several(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\nthree\n")
    assert read_all_documents(path, "text", chunk_bytes=1 << 20) == [("one\ntwo\nthree\n",)]
    assert read_all_documents(path, "text", chunk_bytes=8) == [("one\ntwo\n",), ("three\n",)]
    assert read_all_documents(path, "lines") == [("one",), ("two",), ("three",)]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        pytest.param(b'{"text": "a"}\n{"text": \n', 2, "not JSON: Expecting value", id="cut"),
        pytest.param(
            b'{"text": "a"}\n\n[1]\n', 3, "expected a JSON object a line, found list", id="list"
        ),
        pytest.param(
            b'{"txet": "a"}',
            1,
            "no key 'text'; the object has 'txet'; its text is in 'txet': give that key",
            id="key",
        ),
        pytest.param(b'{"text": 5}', 1, "key 'text' holds int, expected a string", id="type"),
        pytest.param(b'{"text": null}', 1, "holds NoneType", id="null"),
        pytest.param(
            b'{"text": "a"}\n' * 9 + b'{"text": "\xff"}', 10, "not UTF-8: byte 0xff", id="latin1"
        ),
        pytest.param(b"[" * 200_000, 1, "nested too deeply", id="deep"),
    ],
)
def test_bad_records_name_file_and_line(
    tmp_path: Path, content: bytes, line: int, message: str
) -> None:
    path = tmp_path / "with space.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadRecordError) as caught:
        read_all_documents(path, "jsonl")
    error = str(caught.value.to_data_error())
    assert error.startswith(f"{path}:{line}: ")
    assert message in error


def test_inputs_are_listed_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c [1].txt", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    path_with_brackets = tmp_path / "c [1].txt"
    patterns = [str(path_with_brackets), str(tmp_path / "[ab].txt"), str(tmp_path)]
    found = corpus.find_inputs(patterns)
    names = [path.relative_to(tmp_path).as_posix() for path in found.files]
    assert not found.skipped
    assert names == ["c [1].txt", "a.txt", "b.txt", "sub/d.txt"]


def test_a_missing_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such input file"):
        corpus.find_inputs([str(tmp_path / "*.none")])


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(rb'{"text": "a \ud83d\ude00 \ud83d b \ude00"}')
    assert read_all_documents(path, "jsonl") == [("a \U0001f600 \ufffd b \ufffd",)]


@pytest.mark.parametrize(
    ("name", "file_format"),
    [
        ("a.jsonl", "jsonl"),
        ("A.JSON", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.jl", "jsonl"),
        ("a.txt", "text"),
        ("a.md", "text"),
        ("a.json.gz", "jsonl"),
        ("a.b.jsonl.zst", "jsonl"),
        ("a.txt.xz", "text"),
        ("d.parquet", "parquet"),
        ("-", "jsonl"),
    ],
)
def test_format_is_that_of_the_suffix(name: str, file_format: CorpusFormat) -> None:
    assert corpus.guess_format(Path(name)) == file_format


@pytest.mark.parametrize("name", ["shard-00000", "a.py", "a.csv", "a.gz"])
def test_an_unknown_suffix_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="its format cannot be detected") as caught:
        corpus.guess_format(Path(name))
    assert "--format jsonl, text, lines or parquet" in str(caught.value.hint)


def test_a_search_leaves_out_what_is_no_data(tmp_path: Path) -> None:
    reasons = {
        ".ipynb_checkpoints/a-checkpoint.jsonl": "hidden",
        ".git/config": "hidden",
        ".hidden.jsonl": "hidden",
        "__pycache__/x.pyc": "file of a tool",
        "a.jsonl~": "editor or backup file",
        "a.jsonl.bak": "editor or backup file",
        "#a.jsonl#": "editor or backup file",
        "README.md": "description of the data",
    }
    for name in ("a.jsonl", "sub/b.txt", *reasons):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = corpus.find_inputs([str(tmp_path)])
    assert [p.relative_to(tmp_path).as_posix() for p in found.files] == ["a.jsonl", "sub/b.txt"]
    skipped = {p.relative_to(tmp_path).as_posix(): r for p, r in found.skipped.items()}
    assert skipped == reasons
    # A file that is named by itself is read.
    assert corpus.find_inputs([str(tmp_path / "a.jsonl~")]).files == (tmp_path / "a.jsonl~",)
    with pytest.raises(DataError, match="contains no data, only README"):
        corpus.find_inputs([str(tmp_path / "README*")])


def compress(path: Path, data: bytes) -> Path:
    """Write data to a file, compressed as its suffix says."""
    openers: dict[str, Callable[[Path, str], Any]] = {
        ".gz": gzip.open,
        ".xz": lzma.open,
        ".bz2": bz2.open,
        ".zst": zstandard.open,
    }
    with openers[path.suffix](path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("renamed", [False, True], ids=["suffix", "no-suffix"])
def test_compressed_files_are_read(tmp_path: Path, suffix: str, renamed: bool) -> None:
    texts = [f"document {number}" for number in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path = compress(tmp_path / f"a.jsonl{suffix}", lines.encode())
    path = path.rename(tmp_path / "a.jsonl") if renamed else path
    assert read_all_documents(path, "jsonl", chunk_bytes=100) == [(text,) for text in texts]
    chunks = list(corpus.split_file(path, "jsonl", 100))
    assert sum(chunk.input_bytes for chunk in chunks) == path.stat().st_size


def test_a_bad_line_of_a_compressed_file_is_named(tmp_path: Path) -> None:
    path = compress(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n' * 40 + b"{\n")
    with pytest.raises(BadRecordError) as caught:
        read_all_documents(path, "jsonl", chunk_bytes=100)
    assert str(caught.value.to_data_error()).startswith(f"{path}:41: not JSON")


def test_a_truncated_compressed_file_is_refused(tmp_path: Path) -> None:
    path = compress(tmp_path / "a.jsonl.gz", b'{"text": "abc"}\n' * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be decompressed"):
        read_all_documents(path, "jsonl")


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    texts = [f"row {number} \U0001f600" for number in range(25)]
    table = pyarrow.table({"text": texts, "title": [t.upper() for t in texts]})
    path = tmp_path / "d.parquet"
    parquet.write_table(table, path, row_group_size=10)
    assert len(list(corpus.split_file(path, "parquet"))) == 3
    assert read_all_documents(path, "parquet") == [(text,) for text in texts]
    both = read_all_documents(path, "parquet", ("title", "text"))
    assert both == [(text.upper(), text) for text in texts]
    with pytest.raises(BadRecordError, match="no column 'body'; the columns are text, title"):
        read_all_documents(path, "parquet", ("body",))
    with pytest.raises(DataError, match="is a Parquet file"):
        read_all_documents(path.rename(tmp_path / "d.txt"), "text")


def test_a_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", None]}), path, row_group_size=2)
    with pytest.raises(BadRecordError) as caught:
        read_all_documents(path, "parquet")
    assert "d.parquet:row 3: column 'text' holds NoneType" in str(caught.value.to_data_error())


def test_a_json_list_gets_a_hint(tmp_path: Path) -> None:
    for content in ('[{"text": "a"}]', '[\n{"text": "a"}\n]'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(BadRecordError, match="jq -c"):
            read_all_documents(tmp_path / "a.json", "jsonl")


@given(st.text(max_size=200), st.integers(1, 50))
def test_slices_concatenate_to_the_text(text: str, max_characters: int) -> None:
    slices = list(corpus.slice_text(text, max_characters))
    assert "".join(slices) == text
    assert all(0 < len(text_slice) <= max_characters for text_slice in slices)
