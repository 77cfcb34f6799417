"""Preprocessing: the same output for any number of workers, and complete files or none."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flagscale.errors import DataError
from flagscale.train.data import corpus
from flagscale.train.data.indexed_dataset import validate_dataset
from flagscale.train.data.preprocess import PreprocessJob, PreprocessSummary, preprocess
from flagscale.train.data.tokenizers import TokenizerSpec

pytestmark = pytest.mark.torch  # writing takes megatron.core's builder

BYTE_TOKENIZER = TokenizerSpec("ByteLevelTokenizer")
TEXTS = ["alpha", "", "b\nc", "ünï \U0001f600", *(f"document {i} $x 'q'" for i in range(50))]


@pytest.fixture
def job(tmp_path: Path) -> PreprocessJob:
    path = tmp_path / "in put.jsonl"
    lines = [json.dumps({"text": text, "title": f"t{i}"}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return PreprocessJob((path,), str(tmp_path / "out" / "it's"), BYTE_TOKENIZER)


def read_sequences(prefix: str) -> list[list[int]]:
    files = validate_dataset(prefix)
    flat = np.fromfile(files.bin, files.dtype)
    return [part.tolist() for part in np.split(flat, np.cumsum(files.map_lengths())[:-1])]


def encode_texts(texts: list[str], *, eod: bool = False) -> list[list[int]]:
    return [[*text.encode(), *([256] if eod else [])] for text in texts if text]


def test_documents_become_sequences(job: PreprocessJob) -> None:
    reports: list[tuple[int, int]] = []
    summary = preprocess(
        replace(job, append_eod=True), lambda result, total: reports.append((result, total))
    )
    prefix = job.output_prefix + "_text_document"
    assert read_sequences(prefix) == encode_texts(TEXTS, eod=True)
    size = job.inputs[0].stat().st_size
    count = sum(map(len, encode_texts(TEXTS, eod=True)))
    assert summary == PreprocessSummary([prefix], len(TEXTS) - 1, 1, count, size)
    assert reports[-1] == (size, size)


def test_the_output_does_not_depend_on_workers_or_chunks(
    job: PreprocessJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(job)
    first = read_sequences(job.output_prefix + "_text_document")
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 64)
    preprocess(replace(job, workers=3, overwrite=True))
    assert read_sequences(job.output_prefix + "_text_document") == first


def test_each_key_is_written_to_its_own_dataset(job: PreprocessJob, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "last", "title": ""}')
    preprocess(replace(job, inputs=(*job.inputs, more), keys=("title", "text")))
    titles = [f"t{i}" for i in range(len(TEXTS))]
    assert read_sequences(job.output_prefix + "_title_document") == encode_texts(titles)
    assert read_sequences(job.output_prefix + "_text_document") == encode_texts([*TEXTS, "last"])


def test_plain_text_is_read_by_file_or_by_line(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x = 1\ny = 2\n")
    preprocess(replace(job, inputs=(path,)))
    assert read_sequences(job.output_prefix + "_text_document") == encode_texts(["x = 1\ny = 2\n"])
    preprocess(replace(job, inputs=(path,), file_format="lines", overwrite=True))
    assert read_sequences(job.output_prefix + "_text_document") == encode_texts(["x = 1", "y = 2"])


def list_files(job: PreprocessJob) -> list[str]:
    folder = Path(job.output_prefix).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_existing_output_is_kept(job: PreprocessJob) -> None:
    preprocess(job)
    before = [(p, p.read_bytes()) for p in sorted(Path(job.output_prefix).parent.iterdir())]
    with pytest.raises(DataError, match=r"exists already\n.*--overwrite replaces it"):
        preprocess(job)
    job.inputs[0].write_text('{"text": "new"}\n{"oops": 1}\n')
    with pytest.raises(DataError, match=":2: no key 'text'"):
        preprocess(replace(job, overwrite=True))
    assert [(p, p.read_bytes()) for p, _ in before] == before
    assert len(list_files(job)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "the input is empty", id="empty"),
        pytest.param("\n\n", "all 0 documents are empty", id="blank-lines"),
        pytest.param('{"text": ""}\n' * 3, "all 3 documents are empty", id="empty-texts"),
        pytest.param('{"text": "a"}\n{"text', "put.jsonl:2: not JSON", id="corrupt"),
    ],
)
def test_bad_input_leaves_nothing(job: PreprocessJob, content: str, message: str) -> None:
    job.inputs[0].write_text(content)
    with pytest.raises(DataError, match=message):
        preprocess(job)
    assert list_files(job) == []


def test_prepend_bos_requires_a_begin_token(job: PreprocessJob) -> None:
    with pytest.raises(DataError, match="no token that begins a document"):
        preprocess(replace(job, prepend_bos=True))


def test_json_keys_of_plain_text_are_refused(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(DataError, match="json keys title need JSON lines"):
        preprocess(replace(job, inputs=(path,), keys=("title",)))


def test_a_directory_that_cannot_be_created_is_refused(job: PreprocessJob, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be created"):
        preprocess(replace(job, output_prefix=str(tmp_path / "file" / "x")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_refused(job: PreprocessJob, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DataError, match="not writable"):
        preprocess(replace(job, output_prefix=str(tmp_path / "locked" / "x")))


def test_a_full_disk_leaves_nothing(job: PreprocessJob) -> None:
    """A limit on the size of files replaces the full disk: writing fails in the same places."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot be written: File too large"):
            preprocess(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_files(job) == []


def test_a_large_vocabulary_is_stored_as_int32(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("70000 1 2")
    big = replace(job, inputs=(path,), tokenizer=TokenizerSpec("NullTokenizer", vocab_size=80_000))
    preprocess(big)
    assert read_sequences(job.output_prefix + "_text_document") == [[70000, 1, 2]]
    assert validate_dataset(job.output_prefix + "_text_document").dtype == np.int32
