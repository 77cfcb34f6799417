"""Documents from files: chunks, formats, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flagscale.errors import DataError
from flagscale.train.data import corpus
from flagscale.train.data.corpus import BadRecordError, CorpusFormat

ODD = 'tab\t quote" $HOME `x` \\ line\nbreak, emoji \U0001f600 \u2028 end'


def documents(
    path: Path, kind: CorpusFormat, keys: tuple[str, ...] = ("text",), step: int = 40
) -> list[tuple[str, ...]]:
    pieces = corpus.split_file(path, kind, step)
    return [texts for piece in pieces for texts in corpus.read_documents(piece, keys)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=60), max_size=12), step=st.integers(1, 200))
def test_chunks_of_json_lines_give_every_text(tmp_path: Path, texts: list[str], step: int) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert documents(path, "jsonl", step=step) == [(text,) for text in texts]


def test_blank_lines_and_a_byte_order_mark_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n   \n{"text": "two"}')
    assert documents(path, "jsonl") == [("one",), ("two",)]


def test_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"title": "t", "text": ODD, "n": 1}) + "\n")
    assert documents(path, "jsonl", ("text", "title")) == [(ODD, "t")]


def test_a_text_file_is_a_document_and_a_huge_one_several(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\nthree\n")
    assert documents(path, "text", step=1 << 20) == [("one\ntwo\nthree\n",)]
    assert documents(path, "text", step=8) == [("one\ntwo\n",), ("three\n",)]
    assert documents(path, "lines") == [("one",), ("two",), ("three",)]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        pytest.param(b'{"text": "a"}\n{"text": \n', 2, "not JSON: Expecting value", id="cut"),
        pytest.param(
            b'{"text": "a"}\n\n[1]\n', 3, "expected a JSON object a line, found list", id="list"
        ),
        pytest.param(b'{"txet": "a"}', 1, "no key 'text'; the object has 'txet'", id="key"),
        pytest.param(b'{"text": 5}', 1, "key 'text' holds int, expected a string", id="type"),
        pytest.param(b'{"text": null}', 1, "holds NoneType", id="null"),
        pytest.param(
            b'{"text": "a"}\n' * 9 + b'{"text": "\xff"}', 10, "not UTF-8: byte 0xff", id="latin1"
        ),
        pytest.param(b"[" * 200_000, 1, "nested too deeply", id="deep"),
        pytest.param(b"\x1f\x8b\x08\x00", 1, "looks gzip-compressed", id="gzip"),
    ],
)
def test_bad_records_name_file_and_line(
    tmp_path: Path, content: bytes, line: int, message: str
) -> None:
    path = tmp_path / "with space.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadRecordError) as caught:
        documents(path, "jsonl")
    error = str(caught.value.to_data_error())
    assert error.startswith(f"{path}:{line}: ")
    assert message in error


def test_inputs_are_found_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c [1].txt", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    odd = tmp_path / "c [1].txt"
    paths = corpus.find_inputs([str(odd), str(tmp_path / "[ab].txt"), str(tmp_path)])
    names = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert names == ["c [1].txt", "a.txt", "b.txt", "sub/d.txt"]


def test_an_input_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such input file"):
        corpus.find_inputs([str(tmp_path / "*.none")])


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(rb'{"text": "a \ud83d\ude00 \ud83d b \ude00"}')
    assert documents(path, "jsonl") == [("a \U0001f600 \ufffd b \ufffd",)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("A.JSON", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.txt", "text"),
        ("a.py", "text"),
        ("noext", "text"),
    ],
)
def test_guess_format(name: str, kind: CorpusFormat) -> None:
    assert corpus.guess_format(Path(name)) == kind


@given(st.text(max_size=200), st.integers(1, 50))
def test_slices_concatenate_to_the_text(text: str, limit: int) -> None:
    parts = list(corpus.slice_text(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)
